package driverroot_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// copyProgram copies a program of this machine to a fake host.
func copyProgram(t *testing.T, program, to string) {
	t.Helper()
	data, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, data, 0o755); err != nil {
		t.Fatal(err)
	}
}

func findRoot(t *testing.T, dir string) (driverroot.Host, driverroot.Root) {
	t.Helper()
	host := driverroot.NewHost(dir)
	root, err := driverroot.Find(host, "")
	if err != nil {
		t.Fatal(err)
	}
	return host, root
}

func TestProgram(t *testing.T) {
	const loader = "lib64/ld-linux-x86-64.so.2"
	for name, tc := range map[string]struct {
		host    []string
		program string // path of a dynamically linked program
		want    driverroot.Program
	}{
		"installed in the host": {
			host:    []string{"usr/lib64/libnvidia-ml.so.1"},
			program: "usr/bin/nvidia-smi",
			want:    driverroot.Program{Root: "/", Path: "/usr/bin/nvidia-smi", Env: []string{"PATH=/usr/bin:/usr/sbin:/usr/bin:/sbin:/bin"}},
		},
		"a tree without a loader runs in the host": {
			host:    []string{"usr/local/nvidia/lib64/libnvidia-ml.so.1", loader},
			program: "usr/local/nvidia/bin/nvidia-smi",
			want: driverroot.Program{Root: "/", Path: "/usr/local/nvidia/bin/nvidia-smi", Env: []string{
				"PATH=/usr/local/nvidia/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LD_LIBRARY_PATH=/usr/local/nvidia/lib64",
			}},
		},
		"a driver container is a system of its own": {
			host:    []string{"run/nvidia/driver/usr/lib64/libnvidia-ml.so.1", "run/nvidia/driver/" + loader, loader},
			program: "run/nvidia/driver/usr/bin/nvidia-smi",
			want:    driverroot.Program{Root: "/run/nvidia/driver", Path: "/usr/bin/nvidia-smi", Env: []string{"PATH=/usr/bin:/usr/sbin:/usr/bin:/sbin:/bin"}},
		},
		"Google Kubernetes Engine": {
			host:    []string{"home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1", loader},
			program: "home/kubernetes/bin/nvidia/bin/nvidia-smi",
			want: driverroot.Program{Root: "/", Path: "/home/kubernetes/bin/nvidia/bin/nvidia-smi", Env: []string{
				"PATH=/home/kubernetes/bin/nvidia/bin:/usr/sbin:/usr/bin:/sbin:/bin",
				"LD_LIBRARY_PATH=/home/kubernetes/bin/nvidia/lib64",
			}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			put(t, dir, tc.host...)
			copyProgram(t, "/bin/true", filepath.Join(dir, tc.program))
			host, root := findRoot(t, dir)
			got, err := root.Program(host, "nvidia-smi")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestNoProgram(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "usr/lib64/libnvidia-ml.so.1", "usr/bin/nvidia-cuda-mps-control") // not executable
	host, root := findRoot(t, dir)
	_, err := root.Command(t.Context(), host, "nvidia-cuda-mps-control")
	if e, ok := errors.AsType[*driverroot.NoProgramError](err); !ok || !strings.Contains(e.Error(), "has no nvidia-cuda-mps-control") {
		t.Errorf("got %v", err)
	}
}

// A program runs with the host's root and only its own environment.
func TestCommandRunsInTheHost(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "usr/lib64/libnvidia-ml.so.1", "only-here")
	copyProgram(t, buildStatic(t), filepath.Join(dir, "usr/bin/nvidia-smi"))
	host, root := findRoot(t, dir)
	cmd, err := root.Command(t.Context(), host, "nvidia-smi", "/only-here")
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if diff := cmp.Diff("/only-here PATH=/usr/bin:/usr/sbin:/usr/bin:/sbin:/bin\n", string(out)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Each command searches for its program: the search must leave no thread, and
// must not be visible to other programs.
func TestProgramKeepsNoThread(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	put(t, dir, "driver/usr/lib64/libnvidia-ml.so.1")
	host, root := driverroot.NewHost("/"), driverroot.Root{Path: filepath.Join(dir, "driver"), Library: filepath.Join(dir, "driver/usr/lib64/libnvidia-ml.so.1")}
	threads := func() int {
		entries, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := threads()
	const times = 100
	for range times {
		if _, err := root.Program(host, "nvidia-smi"); err == nil {
			t.Fatal("there is no such program")
		}
	}
	if after := threads(); after >= before+times/2 {
		t.Errorf("%d threads, there were %d", after, before)
	}
	if seen, err := os.Readlink("/proc/self/root"); err != nil || seen != "/" {
		t.Errorf("the process's root directory is seen as %q, %v", seen, err)
	}
}
