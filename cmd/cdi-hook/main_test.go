package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/cdihook"
)

// asHook makes the test's program the hook program.
const asHook = "TESSERA_TEST_AS_HOOK"

func TestMain(m *testing.M) {
	if os.Getenv(asHook) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// call runs hooks for a container.
func call(t *testing.T, args ...string) (root, output string, err error) {
	t.Helper()
	return callOf(t, os.Args[0], args...)
}

// callOf runs a program's hooks for a container as a runtime does: what it says of the container
// comes once, on standard input. It returns the container's root and what the program printed.
func callOf(t *testing.T, program string, args ...string) (root, output string, err error) {
	t.Helper()
	bundle := t.TempDir()
	root = filepath.Join(bundle, "rootfs")
	if err := os.MkdirAll(filepath.Join(root, "usr/lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name string, v any) []byte {
		data, err := json.Marshal(v)
		if err == nil {
			err = os.WriteFile(filepath.Join(bundle, name), data, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	write("config.json", map[string]any{"ociVersion": "1.2.1", "root": map[string]any{"path": "rootfs"}})
	state := write("state.json", map[string]any{"ociVersion": "1.2.1", "id": "a", "status": "created", "bundle": bundle})
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), asHook+"=1")
	cmd.Stdin = strings.NewReader(string(state))
	out, err := cmd.CombinedOutput()
	return root, string(out), err
}

func TestEachHookSeesTheContainer(t *testing.T) {
	root, out, err := call(t,
		"create-symlinks", "--link", "a.so.1::/usr/lib/a.so",
		"--", "enable-cuda-compat", "--host-driver-version=580.159.04",
		"--", "create-symlinks", "--link", "b.so.1::/usr/lib/b.so", "--link", "c.so.1::/usr/lib/c.so")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, name := range []string{"a", "b", "c"} {
		if got, err := os.Readlink(filepath.Join(root, "usr/lib", name+".so")); err != nil || got != name+".so.1" {
			t.Errorf("%s.so is a link to %q: %v", name, got, err)
		}
	}
}

// TestFailedHookIsTheLast: a container that lacks something doesn't start, and the message says
// which hook failed.
func TestFailedHookIsTheLast(t *testing.T) {
	root, out, err := call(t,
		"create-symlinks", "--link", "a.so.1::/usr/lib/a.so",
		"--", "create-symlinks", "--link", "no link",
		"--", "create-symlinks", "--link", "b.so.1::/usr/lib/b.so")
	if err == nil || !strings.Contains(out, "create-symlinks: invalid symlink specification no link") {
		t.Errorf("error %v, output %q", err, out)
	}
	if _, err := os.Lstat(filepath.Join(root, "usr/lib/b.so")); !os.IsNotExist(err) {
		t.Errorf("the hook after the failed one has run: %v", err)
	}
}

// TestUnknownHooksArePassedOver: a specification may be of another release than the program for
// a moment, after an upgrade or a rollback.
func TestUnknownHooksArePassedOver(t *testing.T) {
	root, out, err := call(t, "hook-of-tomorrow", "--flag", "--", "create-symlinks", "--link", "a.so.1::/usr/lib/a.so")
	if err != nil || !strings.Contains(out, "hook-of-tomorrow") {
		t.Errorf("error %v, output %q", err, out)
	}
	if _, err := os.Readlink(filepath.Join(root, "usr/lib/a.so")); err != nil {
		t.Error(err)
	}
}

// TestNVIDIAsProgramRunsTheFirst: after a rollback to a release that installed NVIDIA's own program,
// containers start with the first hook until that release has written its specification.
func TestNVIDIAsProgramRunsTheFirst(t *testing.T) {
	program := filepath.Join(t.TempDir(), "nvidia-cdi-hook")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	hooks := []string{program, "create-symlinks", "--link", "a.so.1::/usr/lib/a.so"}
	hooks = cdihook.Join(hooks, []string{program, "enable-cuda-compat", "--host-driver-version=580.159.04"})
	hooks = cdihook.Join(hooks, []string{program, "update-ldcache", "--folder", "/usr/lib64"})
	root, out, err := callOf(t, program, hooks[1:]...)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if _, err := os.Readlink(filepath.Join(root, "usr/lib/a.so")); err != nil {
		t.Error(err)
	}
}
