package datadir

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
)

// here is the host.
var here = driverroot.NewHost("/")

func dataDir(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "data")
}

// locked locks the directory until the test ends.
func locked(t *testing.T, path string) *Dir {
	t.Helper()
	d, err := Lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func writeHook(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hook")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestTemporaryHookIsRemoved checks that a temporary file left by a power loss is removed, and
// not written to: the disk may have kept both names of a rename.
func TestTemporaryHookIsRemoved(t *testing.T) {
	for name, newer := range map[string]bool{"the same program": false, "another program": true} {
		t.Run(name, func(t *testing.T) {
			d, hook := locked(t, dataDir(t)), writeHook(t)
			path, _, err := d.InstallHook(hook, here)
			if err != nil {
				t.Fatal(err)
			}
			temp := path + ".tmp"
			if err := os.Link(path, temp); err != nil {
				t.Fatal(err)
			}
			present, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer present.Close()
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if newer {
				if err := os.WriteFile(hook, []byte("#!/bin/sh\n# newer\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if _, _, err := d.InstallHook(hook, here); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(temp); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: %v, want it removed", temp, err)
			}
			if got, err := io.ReadAll(present); err != nil || string(got) != string(want) {
				t.Errorf("the program that was there has %q, %v, want it unchanged", got, err)
			}
		})
	}
}

func TestInstallHook(t *testing.T) {
	d, hook := locked(t, dataDir(t)), writeHook(t)
	path, _, err := d.InstallHook(hook, here)
	if err != nil {
		t.Fatal(err)
	}
	first, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if first.Mode() != 0o755 {
		t.Errorf("mode %v", first.Mode())
	}
	if _, _, err := d.InstallHook(hook, here); err != nil {
		t.Fatal(err)
	}
	if again, err := os.Stat(path); err != nil || !os.SameFile(first, again) {
		t.Errorf("the same program was installed again (%v)", err)
	}
	if err := os.WriteFile(hook, []byte("#!/bin/sh\n# newer\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, _, err := d.InstallHook(hook, here); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff("#!/bin/sh\n# newer\n", string(got)); diff != "" {
		t.Errorf("the newer program (-want +got):\n%s", diff)
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestOnePluginAtATime(t *testing.T) {
	path := dataDir(t)
	first, err := Lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	waiting, cancel := context.WithCancel(t.Context())
	second := make(chan error)
	go func() {
		f, err := Lock(waiting, path)
		if err == nil {
			f.Close()
		}
		second <- err
	}()
	cancel()
	if err := <-second; err == nil {
		t.Error("two plugins use one directory")
	}
	go func() {
		f, err := Lock(t.Context(), path)
		if err == nil {
			f.Close()
		}
		second <- err
	}()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-second; err != nil {
		t.Errorf("the next plugin: %v", err)
	}
}

// The file that a waiting plugin has opened may be gone when it locks it.
func TestOnePluginAtATimeAfterALeave(t *testing.T) {
	path := dataDir(t)
	first := locked(t, path)
	opened, err := openLock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	if err := errors.Join(first.Clean(), first.Close()); err != nil {
		t.Fatal(err)
	}
	if ok, err := lock(opened, path); ok || err != nil {
		t.Errorf("a file that is gone: locked %t, %v, want another try", ok, err)
	}
	locked(t, path)
	if _, ok, err := TryLock(path); ok || err != nil {
		t.Errorf("two plugins use one directory: locked %t, %v", ok, err)
	}
}

// TestLockLeftBehind checks that the next plugin can lock and remove the directory, although
// a lock file was left there: a waiting plugin created it after the acting one had removed
// its own, and then both ended.
func TestLockLeftBehind(t *testing.T) {
	path := dataDir(t)
	acting := locked(t, path)
	if err := acting.Clean(); err != nil {
		t.Fatal(err)
	}
	waiting, err := openLock(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(waiting.Close(), acting.Close()); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(path, lockFile)); err != nil || info.Size() != 0 {
		t.Fatalf("the file left behind: %v, %v, want an empty one", info, err)
	}
	next, ok, err := TryLock(path)
	if err != nil || !ok {
		t.Fatalf("the next plugin: locked %t, %v", ok, err)
	}
	if _, ok, err := TryLock(path); ok || err != nil {
		t.Errorf("two plugins use one directory: locked %t, %v", ok, err)
	}
	if err := errors.Join(next.Clean(), next.Close()); err != nil {
		t.Fatal(err)
	}
	next.Remove()
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory stays when the next plugin leaves: %v", err)
	}
}

// TestHandOver checks that the lock is never free while it is given to another plugin.
func TestHandOver(t *testing.T) {
	path := dataDir(t)
	before := locked(t, path)
	fd, err := unix.Dup(int(before.File().Fd())) // as a socket does
	if err := errors.Join(err, before.Close()); err != nil {
		t.Fatal(err)
	}
	isLocked := func(want bool) {
		t.Helper()
		third, ok, err := TryLock(path)
		if err != nil || ok == want {
			t.Errorf("a third plugin: locked %t, %v, want %t", ok, err, !want)
		}
		if ok {
			third.Close()
		}
	}
	isLocked(true)
	after, err := Adopt(path, os.NewFile(uintptr(fd), "given"))
	if err != nil {
		t.Fatal(err)
	}
	isLocked(true)
	if err := after.Close(); err != nil {
		t.Fatal(err)
	}
	isLocked(false)

	other, err := os.Create(filepath.Join(t.TempDir(), "other"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Adopt(path, other); err == nil {
		t.Error("a file that isn't the lock was adopted")
	}
}

func TestLeave(t *testing.T) {
	path := dataDir(t)
	d := locked(t, path)
	if _, _, err := d.InstallHook(writeHook(t), here); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(d.Journal(), 0o700); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(d.Journal(), "notes.txt")
	for _, path := range []string{foreign, filepath.Join(path, hookTemp)} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Clean(); err != nil {
		t.Errorf("with a file of somebody else: %v", err)
	}
	if err := os.Remove(foreign); err != nil {
		t.Fatal(err)
	}
	if err := d.Clean(); err != nil {
		t.Fatal(err)
	}
	if left, err := fs.Glob(os.DirFS(path), "*"); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// specs are the claims' CDI specifications, and the hooks and the marks that they use.
type specs struct {
	claims []string
	hooks  []string
	marks  string // directory
}

// write writes them to a directory: the hooks to the specification that all claims share.
func (s specs) write(t *testing.T) *cdi.Specs {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, edits cdispecs.ContainerEdits) {
		data, err := json.Marshal(cdispecs.Spec{ContainerEdits: edits})
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, gpu.CDIVendor+"-"+name+".json"), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	var common cdispecs.ContainerEdits
	for _, path := range s.hooks {
		common.Hooks = append(common.Hooks, &cdispecs.Hook{Path: path})
	}
	write("driver", common)
	for _, uid := range s.claims {
		var edits cdispecs.ContainerEdits
		if s.marks != "" {
			edits.Mounts = []*cdispecs.Mount{{HostPath: filepath.Join(s.marks, uid)}}
		}
		write("claim_"+uid, edits)
	}
	return cdi.New(cdi.Config{Dir: dir})
}

// TestDataDirChanged: a plugin with another data directory doesn't start while
// claims are prepared: its journal knows nothing of them.
func TestDataDirChanged(t *testing.T) {
	path := dataDir(t)
	d := locked(t, path)
	const before, elsewhere = "/var/lib/before", "/var/lib/kubelet/plugins/gpu.nvidia.com/" + hookFile
	one, marks := []string{"claim-1"}, before+"/"+marksDir
	for name, tc := range map[string]struct {
		specs specs
		fails bool
	}{
		"same":                      {specs{one, []string{path + "/" + hookFile}, d.Marks()}, false},
		"same, hook elsewhere":      {specs{one, []string{elsewhere}, d.Marks()}, false},
		"other":                     {specs{one, []string{before + "/" + hookFile}, marks}, true},
		"other, hook elsewhere":     {specs{one, []string{elsewhere}, marks}, true},
		"other, without marks":      {specs{one, []string{before + "/" + hookFile}, ""}, true},
		"same, without marks":       {specs{one, []string{path + "/" + hookFile}, ""}, false},
		"nothing prepared":          {specs{nil, []string{before + "/" + hookFile}, marks}, false},
		"neither a hook nor a mark": {specs{one, nil, ""}, false},
	} {
		t.Run(name, func(t *testing.T) {
			err := d.Check(tc.specs.write(t))
			if !tc.fails && err != nil {
				t.Errorf("got %v", err)
			}
			if tc.fails && (err == nil || !strings.Contains(err.Error(), "--data-dir: ") || !strings.Contains(err.Error(), before+",") || !strings.Contains(err.Error(), path)) {
				t.Errorf("got %v, want a refusal that names the flag and both directories", err)
			}
		})
	}
}
