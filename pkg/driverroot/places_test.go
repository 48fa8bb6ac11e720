package driverroot_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// platforms has the files of the driver on hosts whose libraries and programs aren't all in a
// usual directory, and what is found of them.
var platforms = map[string]struct {
	host      []string
	flag      string
	library   string
	programs  string // directory of the host
	libraries string // directory in which others are searched for
}{
	"Talos 1.12": {
		host:      []string{"usr/local/glibc/usr/lib/libnvidia-ml.so.1", "usr/local/glibc/lib/ld-linux-x86-64.so.2", "x usr/local/bin/nvidia-smi", "x usr/local/bin/nvidia-cuda-mps-control"},
		library:   "/usr/local/glibc/usr/lib/libnvidia-ml.so.1",
		libraries: "/usr/local/glibc/usr/lib",
		programs:  "/usr/local/bin",
	},
	"Talos 1.12, given the directory of both": {
		host:      []string{"usr/local/glibc/usr/lib/libnvidia-ml.so.1", "x usr/local/bin/nvidia-smi", "x usr/local/bin/nvidia-cuda-mps-control"},
		flag:      "/usr/local",
		library:   "/usr/local/glibc/usr/lib/libnvidia-ml.so.1",
		libraries: "/usr/local/glibc/usr/lib",
		programs:  "/usr/local/bin",
	},
	"Talos 1.12, given the tree of the libraries": {
		host:      []string{"usr/local/glibc/usr/lib/libnvidia-ml.so.1", "usr/local/glibc/lib/ld-linux-x86-64.so.2", "x usr/local/bin/nvidia-smi", "x usr/local/bin/nvidia-cuda-mps-control"},
		flag:      "/usr/local/glibc",
		library:   "/usr/local/glibc/usr/lib/libnvidia-ml.so.1",
		libraries: "/usr/local/glibc/usr/lib",
		programs:  "/usr/local/bin",
	},
	"Talos 1.13": {
		host:      []string{"usr/local/lib/libnvidia-ml.so.580.1", "usr/local/lib/libnvidia-ml.so.1 -> libnvidia-ml.so.580.1", "x usr/local/bin/nvidia-smi", "x usr/local/bin/nvidia-cuda-mps-control"},
		library:   "/usr/local/lib/libnvidia-ml.so.580.1",
		libraries: "/usr/local/lib",
		programs:  "/usr/local/bin",
	},
	"NixOS": {
		host: []string{
			"nix/store/a-nvidia-x11/lib/libnvidia-ml.so.580.1", "nix/store/a-nvidia-x11/lib/libnvidia-ml.so.1 -> libnvidia-ml.so.580.1",
			"nix/store/b-graphics-drivers/lib/libnvidia-ml.so.1 -> /nix/store/a-nvidia-x11/lib/libnvidia-ml.so.1",
			"run/opengl-driver -> /nix/store/b-graphics-drivers",
			"x nix/store/c-bin/bin/nvidia-smi", "x nix/store/c-bin/bin/nvidia-cuda-mps-control", "run/current-system/sw/bin -> /nix/store/c-bin/bin",
		},
		library:   "/nix/store/a-nvidia-x11/lib/libnvidia-ml.so.580.1",
		libraries: "/run/opengl-driver/lib",
		programs:  "/run/current-system/sw/bin",
	},
	"NixOS, given the link": {
		host: []string{
			"nix/store/a-nvidia-x11/lib/libnvidia-ml.so.1", "nix/store/b-graphics-drivers/lib/libnvidia-ml.so.1 -> /nix/store/a-nvidia-x11/lib/libnvidia-ml.so.1",
			"run/opengl-driver -> /nix/store/b-graphics-drivers",
			"x run/current-system/sw/bin/nvidia-smi", "x run/current-system/sw/bin/nvidia-cuda-mps-control",
		},
		flag:      "/run/opengl-driver",
		library:   "/nix/store/a-nvidia-x11/lib/libnvidia-ml.so.1",
		libraries: "/nix/store/b-graphics-drivers/lib",
		programs:  "/run/current-system/sw/bin",
	},
	"Bottlerocket, libraries and programs in directories of their own": {
		host: []string{
			"usr -> x86_64-bottlerocket-linux-gnu/sys-root/usr", "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla/libnvidia-ml.so.1",
			"x x86_64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin/nvidia-smi",
			"x x86_64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin/nvidia-cuda-mps-control",
		},
		library:   "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla/libnvidia-ml.so.1",
		libraries: "/usr/lib/nvidia/tesla",
		programs:  "/usr/libexec/nvidia/tesla/bin",
	},
	"Bottlerocket, libraries in /usr/lib": {
		host: []string{
			"usr -> x86_64-bottlerocket-linux-gnu/sys-root/usr", "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/libnvidia-ml.so.1",
			"x x86_64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin/nvidia-smi",
			"x x86_64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin/nvidia-cuda-mps-control",
		},
		library:   "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/libnvidia-ml.so.1",
		libraries: "/usr/lib",
		programs:  "/usr/libexec/nvidia/tesla/bin",
	},
	"Bottlerocket, both in usual directories": {
		host: []string{
			"usr -> x86_64-bottlerocket-linux-gnu/sys-root/usr", "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/libnvidia-ml.so.1",
			"x x86_64-bottlerocket-linux-gnu/sys-root/usr/bin/nvidia-smi", "x x86_64-bottlerocket-linux-gnu/sys-root/usr/bin/nvidia-cuda-mps-control",
		},
		library:   "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/libnvidia-ml.so.1",
		libraries: "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib",
		programs:  "/x86_64-bottlerocket-linux-gnu/sys-root/usr/bin",
	},
	"Bottlerocket, given its root": {
		host: []string{
			"usr -> aarch64-bottlerocket-linux-gnu/sys-root/usr", "aarch64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla/libnvidia-ml.so.1",
			"x aarch64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin/nvidia-smi",
			"x aarch64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin/nvidia-cuda-mps-control",
		},
		flag:      "/aarch64-bottlerocket-linux-gnu/sys-root",
		library:   "/aarch64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla/libnvidia-ml.so.1",
		libraries: "/aarch64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
		programs:  "/aarch64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin",
	},
	"WSL": {
		host: []string{
			"usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libnvidia-ml.so.1", "usr/lib/wsl/lib/libnvidia-ml.so.1 -> ../drivers/nv_dispi.inf_amd64_1/libnvidia-ml.so.1",
			"x usr/lib/wsl/lib/nvidia-smi", "x usr/lib/wsl/lib/nvidia-cuda-mps-control",
		},
		library:   "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libnvidia-ml.so.1",
		libraries: "/usr/lib/wsl/lib",
		programs:  "/usr/lib/wsl/lib",
	},
	"Container-Optimized OS": {
		host:     []string{"home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1", "x home/kubernetes/bin/nvidia/bin/nvidia-smi", "x home/kubernetes/bin/nvidia/bin/nvidia-cuda-mps-control"},
		library:  "/home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1",
		programs: "/home/kubernetes/bin/nvidia/bin",
	},
	"GKE with Ubuntu": {
		host:     []string{"opt/nvidia/lib64/libnvidia-ml.so.1", "x opt/nvidia/bin/nvidia-smi", "x opt/nvidia/bin/nvidia-cuda-mps-control"},
		library:  "/opt/nvidia/lib64/libnvidia-ml.so.1",
		programs: "/opt/nvidia/bin",
	},
	"AKS with Ubuntu": {
		host:      []string{"usr/bin/lib64/libnvidia-ml.so.1", "x usr/bin/nvidia-smi", "x usr/bin/nvidia-cuda-mps-control"},
		library:   "/usr/bin/lib64/libnvidia-ml.so.1",
		libraries: "/usr/bin/lib64",
		programs:  "/usr/bin",
	},
	"Flatcar": {
		host: []string{
			"opt/nvidia/580.1/6.12.1/usr/lib64/libnvidia-ml.so.1", "x opt/nvidia/580.1/6.12.1/usr/bin/nvidia-smi",
			"x opt/nvidia/580.1/6.12.1/usr/bin/nvidia-cuda-mps-control", "opt/nvidia/current -> 580.1/6.12.1",
		},
		library:  "/opt/nvidia/580.1/6.12.1/usr/lib64/libnvidia-ml.so.1",
		programs: "/opt/nvidia/580.1/6.12.1/usr/bin",
	},
}

// TestPlatforms checks that the library is found on each platform, and the programs that
// belong to it, also if another tree has them.
func TestPlatforms(t *testing.T) {
	for name, tc := range platforms {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			put(t, dir, tc.host...)
			host := driverroot.NewHost(dir)
			root, err := driverroot.Find(host, tc.flag)
			if err != nil {
				t.Fatal(err)
			}
			var libraries []string
			if tc.libraries != "" {
				libraries = []string{tc.libraries}
			}
			if diff := cmp.Diff(append([]string{tc.library}, libraries...), append([]string{root.Library}, root.LibraryDirs...)); diff != "" {
				t.Errorf("library, and directories of others (-want +got):\n%s", diff)
			}
			for _, name := range []string{"nvidia-smi", "nvidia-cuda-mps-control"} {
				program, err := root.Program(host, name)
				if err != nil {
					t.Error(err)
					continue
				}
				if want, got := filepath.Join(tc.programs, name), filepath.Join(program.Root, program.Path); got != want {
					t.Errorf("%s is %s, want %s", name, got, want)
				}
			}
		})
	}
}

// TestSearchedPlaces checks that errors name all places that were searched.
func TestSearchedPlaces(t *testing.T) {
	dir := t.TempDir()
	host := driverroot.NewHost(dir)
	contains := func(err error, all ...string) {
		t.Helper()
		for _, want := range all {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v doesn't say %q", err, want)
			}
		}
	}
	_, err := driverroot.Find(host, "")
	contains(err, "/usr/local/glibc/usr/lib", "/run/opengl-driver/lib", "/usr/lib/nvidia/tesla", "/home/kubernetes/bin/nvidia", "/usr/lib64")
	put(t, dir, "usr/local/glibc/usr/lib/libnvidia-ml.so.1")
	root, err := driverroot.Find(host, "")
	if err != nil {
		t.Fatal(err)
	}
	_, err = root.Program(host, "nvidia-smi")
	if e, ok := errors.AsType[*driverroot.NoProgramError](err); !ok || e.Program != "nvidia-smi" {
		t.Errorf("got %v, want a NoProgramError", err)
	}
	contains(err, "/usr/local/bin", "/usr/bin", "/usr/local/glibc/usr/bin")
}
