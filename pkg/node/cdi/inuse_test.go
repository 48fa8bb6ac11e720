package cdi_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
)

func TestInUse(t *testing.T) {
	dir := t.TempDir()
	const ownHook = `{"devices": [{"name": "a-gpu", "containerEdits": {"hooks": [{"path": "/older/hook"}]}}],
		"containerEdits": {"mounts": [{"hostPath": "/data/containers/a"}]}}`
	for name, content := range map[string]string{
		"k8s.gpu.nvidia.com-driver.json":        `{"containerEdits": {"hooks": [{"path": "/newer/hook"}, {"path": "/newer/hook"}]}}`,
		"k8s.gpu.nvidia.com-claim_a.json":       ownHook,
		"k8s.gpu.nvidia.com-claim_damaged.json": "{",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	specs := cdi.New(cdi.Config{Dir: dir})
	hooks, err := specs.HooksInUse()
	if diff := cmp.Diff([]string{"/newer/hook", "/older/hook"}, hooks); err != nil || diff != "" {
		t.Errorf("hooks (-want +got): %v\n%s", err, diff)
	}
	for claim, want := range map[string]string{"a": "/data/containers/a", "damaged": "", "none": ""} {
		if got, err := specs.MarkInUse(claim); err != nil || got != want {
			t.Errorf("mark of %s: %q, %v, want %q", claim, got, err, want)
		}
	}
}

// TestNoSpecWithoutHook checks that claims aren't prepared where their containers couldn't
// start, and that the error says why.
func TestNoSpecWithoutHook(t *testing.T) {
	_, d, dir := setUp(t)
	noexec := errors.New("no directory is mounted exec")
	specs := cdi.New(cdi.Config{Dir: dir, HookPath: hook, HookError: noexec, Host: driverroot.NewHost(installed.Host)})
	if err := specs.SetDriver(d); !errors.Is(err, noexec) {
		t.Errorf("set the driver: %v", err)
	}
	if _, err := specs.Write(devices(t, d, "a", 0)); !errors.Is(err, noexec) {
		t.Errorf("write: %v", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the CDI directory: %v, want that nothing was written", err)
	}
}
