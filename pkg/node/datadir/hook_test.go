package datadir

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// ownMounts runs the calling test once more, in a process whose mounts are its own, and
// returns true there.
func ownMounts(t *testing.T) bool {
	t.Helper()
	const variable = "TESSERA_TEST_OWN_MOUNTS"
	if os.Getenv(variable) == t.Name() {
		return true
	}
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.count=1")
	cmd.Env = append(os.Environ(), variable+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("in a mount namespace of its own: %v\n%s", err, out)
	}
	return false
}

// hookNode is a node with a data directory and one other directory that may have the hook.
// Each is a file system of the host, and is mounted here, as in a container, without the
// flags that it has there.
type hookNode struct {
	*Dir
	t           *testing.T
	host        driverroot.Host
	data, other string
	program     string
}

func newHookNode(t *testing.T) *hookNode {
	t.Helper()
	dir := t.TempDir()
	n := &hookNode{
		t: t, host: driverroot.NewHost(filepath.Join(dir, "host")), data: filepath.Join(dir, "data"), other: filepath.Join(dir, "other"),
		program: writeHook(t),
	}
	for _, place := range []string{n.data, n.other} {
		for _, path := range []string{place, n.host.Path(place)} {
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		for _, err := range []error{
			unix.Mount("tmpfs", n.host.Path(place), "tmpfs", unix.MS_NOEXEC, ""),
			unix.Mount(n.host.Path(place), place, "", unix.MS_BIND, ""),
			unix.Mount("", place, "", unix.MS_BIND|unix.MS_REMOUNT, ""),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Cleanup(func() {
		for _, place := range []string{n.data, n.other} {
			for _, path := range []string{place, n.host.Path(place)} {
				if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			}
		}
	})
	n.Dir = locked(t, n.data)
	return n
}

// mount sets how the host mounts the directories.
func (n *hookNode) mount(data, other uintptr) {
	n.t.Helper()
	for place, flags := range map[string]uintptr{n.data: data, n.other: other} {
		if err := unix.Mount("", n.host.Path(place), "", unix.MS_BIND|unix.MS_REMOUNT|flags, ""); err != nil {
			n.t.Fatal(err)
		}
	}
}

// install installs the hook, and checks that the host can start it, or that it says why not.
func (n *hookNode) install() (path string) {
	n.t.Helper()
	path, unusable, err := n.InstallHook(n.program, n.host, n.other)
	if err != nil {
		n.t.Fatal(err)
	}
	if out, err := exec.CommandContext(n.t.Context(), n.host.Path(path)).CombinedOutput(); (err != nil) != (unusable != nil) {
		n.t.Errorf("%s on the host: %v %s, and unusable is %v", path, err, out, unusable)
	}
	if checked := CheckHookDirs(n.host, n.data, n.other); (checked != nil) != (unusable != nil) {
		n.t.Errorf("the check says %v, and the installation %v", checked, unusable)
	}
	return path
}

// hooks returns the directories that have a hook program.
func (n *hookNode) hooks() (in []string) {
	for name, dir := range map[string]string{"data": n.data, "other": n.other} {
		if _, err := os.Stat(filepath.Join(dir, hookFile)); err == nil {
			in = append(in, name)
		}
	}
	if len(in) == 2 {
		return []string{"data", "other"}
	}
	return in
}

// TestHookWhereProgramsCanBeStarted checks that the flags of the host's mounts decide in which
// directory the hook is, and that one that specifications name stays when that changes.
func TestHookWhereProgramsCanBeStarted(t *testing.T) {
	if !ownMounts(t) {
		return
	}
	n := newHookNode(t)
	check := func(what string, want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, n.hooks()); diff != "" {
			t.Errorf("%s: directories with a hook (-want +got):\n%s", what, diff)
		}
	}
	n.mount(0, 0)
	first := n.install()
	check("both exec", "data")

	n.mount(unix.MS_NOEXEC, 0)
	second := n.install()
	if err := n.RemoveOldHooks(second, specs{hooks: []string{first}}.write(t)); err != nil {
		t.Fatal(err)
	}
	check("noexec data, and the specifications have the former path", "data", "other")
	if err := n.RemoveOldHooks(second, specs{hooks: []string{second}}.write(t)); err != nil {
		t.Fatal(err)
	}
	check("noexec data", "other")
	if _, err := os.Stat(filepath.Dir(first)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v, want it removed", filepath.Dir(first), err)
	}

	n.mount(0, 0)
	third := n.install()
	if err := n.RemoveOldHooks(third, specs{hooks: []string{second, third}}.write(t)); err != nil || third != first {
		t.Fatalf("exec again: %s, %v, want %s", third, err, first)
	}
	check("exec again, and a specification has the former path", "data", "other")
	if err := n.Clean(); err != nil {
		t.Fatal(err)
	}
	check("cleaned")

	n.mount(unix.MS_NOEXEC, unix.MS_NOEXEC)
	n.install()
	err := CheckHookDirs(n.host, n.data, n.other)
	if e, ok := errors.AsType[*NoExecError](err); !ok || cmp.Diff([]string{n.data, n.other}, e.Dirs) != "" || !strings.Contains(err.Error(), "node.dataDir") {
		t.Errorf("both noexec: %v, want an error with both directories and the value to change", err)
	}
}

func TestHookBesideNothing(t *testing.T) {
	d, missing := locked(t, dataDir(t)), filepath.Join(t.TempDir(), "not", "there")
	path, unusable, err := d.InstallHook(writeHook(t), driverroot.NewHost("/"), missing)
	if err != nil || unusable != nil {
		t.Fatal(err, unusable)
	}
	if err := errors.Join(d.RemoveOldHooks(path, specs{}.write(t)), d.Clean()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(missing); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v, want that it wasn't made", missing, err)
	}
}
