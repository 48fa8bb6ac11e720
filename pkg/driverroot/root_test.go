package driverroot_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// put creates files on a fake host: a path ending in "/" is a directory, one
// with " -> " a link, one starting with "c " a character device, one with "x " a program.
func put(t *testing.T, host string, entries ...string) {
	t.Helper()
	for _, e := range entries {
		device, isDevice := strings.CutPrefix(e, "c ")
		program, isProgram := strings.CutPrefix(device, "x ")
		path, target, isLink := strings.Cut(program, " -> ")
		full := filepath.Join(host, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		switch {
		case isDevice:
			err = unix.Mknod(full, unix.S_IFCHR|0o666, int(unix.Mkdev(195, 255)))
		case isLink:
			err = os.Symlink(target, full)
		case isProgram:
			err = os.WriteFile(full, nil, 0o755)
		case strings.HasSuffix(path, "/"):
			err = os.MkdirAll(full, 0o755)
		default:
			err = os.WriteFile(full, nil, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestFind(t *testing.T) {
	for name, tc := range map[string]struct {
		host []string
		flag string
		want driverroot.Root
	}{
		"installed in the host": {
			host: []string{"usr/lib64/libnvidia-ml.so.580.1", "usr/lib64/libnvidia-ml.so.1 -> libnvidia-ml.so.580.1", "c dev/nvidiactl"},
			want: driverroot.Root{Path: "/", DevRoot: "/", SysRoot: "/", ProcRoot: "/", Library: "/usr/lib64/libnvidia-ml.so.580.1"},
		},
		"absolute links are the host's": {
			host: []string{
				"usr/local/nvidia/lib/libnvidia-ml.so.580.1",
				"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 -> /usr/local/nvidia/lib/libnvidia-ml.so.580.1",
			},
			want: driverroot.Root{Path: "/", DevRoot: "/", SysRoot: "/", ProcRoot: "/", Library: "/usr/local/nvidia/lib/libnvidia-ml.so.580.1"},
		},
		"in no usual directory": {
			host: []string{"usr/local/nvidia/lib64/libnvidia-ml.so.1"},
			want: driverroot.Root{
				Path: "/", DevRoot: "/", SysRoot: "/", ProcRoot: "/", Library: "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
				LibraryDirs: []string{"/usr/local/nvidia/lib64"},
			},
		},
		"in a tree of its own, with programs": {
			host: []string{
				"usr/local/nvidia/lib64/libnvidia-ml.so.580.1", "usr/local/nvidia/bin/nvidia-smi", "usr/bin/nvidia-smi",
				"usr/lib/libnvidia-ml.so.1 -> /usr/local/nvidia/lib64/libnvidia-ml.so.580.1",
				"usr/local/nvidia/lib64/libnvidia-ml.so.1 -> libnvidia-ml.so.580.1", "c dev/nvidiactl",
			},
			want: driverroot.Root{Path: "/usr/local/nvidia", DevRoot: "/", SysRoot: "/", ProcRoot: "/", Library: "/usr/local/nvidia/lib64/libnvidia-ml.so.580.1"},
		},
		"driver container with its own device nodes": {
			host: []string{"run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "c run/nvidia/driver/dev/nvidiactl", "run/nvidia/driver/sys/bus/pci/devices/", "run/nvidia/driver/proc/driver/nvidia/"},
			want: driverroot.Root{
				Path: "/run/nvidia/driver", DevRoot: "/run/nvidia/driver", SysRoot: "/run/nvidia/driver", ProcRoot: "/run/nvidia/driver",
				Library: "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
			},
		},
		"Google Kubernetes Engine": {
			host: []string{"home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1", "c dev/nvidiactl"},
			want: driverroot.Root{
				Path: "/home/kubernetes/bin/nvidia", DevRoot: "/", SysRoot: "/", ProcRoot: "/",
				Library: "/home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1",
			},
		},
		"given, though there is another": {
			host: []string{"usr/lib64/libnvidia-ml.so.1", "opt/driver/usr/lib64/libnvidia-ml.so.1"},
			flag: "/opt/driver/",
			want: driverroot.Root{
				Path: "/opt/driver", DevRoot: "/", SysRoot: "/", ProcRoot: "/", Library: "/opt/driver/usr/lib64/libnvidia-ml.so.1",
			},
		},
		"given as a link": {
			host: []string{"opt/driver-580/usr/lib64/libnvidia-ml.so.1", "opt/driver -> driver-580"},
			flag: "/opt/driver",
			want: driverroot.Root{
				Path: "/opt/driver-580", DevRoot: "/", SysRoot: "/", ProcRoot: "/", Library: "/opt/driver-580/usr/lib64/libnvidia-ml.so.1",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			host := t.TempDir()
			put(t, host, tc.host...)
			got, err := driverroot.Find(driverroot.NewHost(host), tc.flag)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("driver root (-want +got):\n%s", diff)
			}
		})
	}
}

func TestNotFound(t *testing.T) {
	for name, tc := range map[string]struct {
		host []string
		flag string
		want []string // in the message
	}{
		"nothing anywhere": {
			want: []string{"/run/nvidia/driver", "/home/kubernetes/bin/nvidia", "--driver-root", "libnvidia-ml.so.1"},
		},
		"a dangling link is no library": {
			host: []string{"usr/lib64/libnvidia-ml.so.1 -> libnvidia-ml.so.580.1"},
			want: []string{"install the driver"},
		},
		"not where it was said to be": {
			host: []string{"usr/lib64/libnvidia-ml.so.1", "opt/"},
			flag: "/opt",
			want: []string{"--driver-root /opt"},
		},
		"a file": {
			host: []string{"opt"},
			flag: "/opt",
			want: []string{"--driver-root /opt"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			host := t.TempDir()
			put(t, host, tc.host...)
			_, err := driverroot.Find(driverroot.NewHost(host), tc.flag)
			if _, ok := errors.AsType[*driverroot.NotFoundError](err); !ok {
				t.Fatalf("got %v, want a NotFoundError", err)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q doesn't say %q", err, want)
				}
			}
		})
	}
}

func TestFoundLater(t *testing.T) {
	dir := t.TempDir()
	host := driverroot.NewHost(dir)
	if _, err := driverroot.Find(host, ""); err == nil {
		t.Fatal("found a driver on an empty host")
	}
	put(t, dir, "run/nvidia/driver/usr/lib64/libnvidia-ml.so.1")
	root, err := driverroot.Find(host, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(host.Path(root.Library)); err != nil {
		t.Errorf("this process doesn't find the library: %v", err)
	}
}

func TestHostIsNotMounted(t *testing.T) {
	err := driverroot.NewHost(filepath.Join(t.TempDir(), "nothing")).Do(func() error { return nil })
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want one that says that nothing is there", err)
	}
}

func TestDoLeavesTheProcessAlone(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "only-here")
	err := driverroot.NewHost(dir).Do(func() error {
		_, err := os.Stat("/only-here")
		return err
	})
	if err != nil {
		t.Errorf("f doesn't see the host's files: %v", err)
	}
	for range 8 { // on any thread
		if _, err := os.Stat(filepath.Join(dir, "only-here")); err != nil {
			t.Errorf("the process has lost its root directory: %v", err)
		}
	}
}
