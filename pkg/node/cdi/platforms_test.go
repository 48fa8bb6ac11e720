package cdi_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	simulated "github.com/tessera-dra/tessera/sim/nvmlsim/driverroot"
)

// platforms has where the driver is on hosts of the tests of package driverroot.
var platforms = map[string]struct {
	root, libraries, programs string
	links                     map[string]string
	flag                      string
}{
	"EKS":             {libraries: "usr/lib64"},
	"AKS with Ubuntu": {libraries: "usr/bin/lib64", programs: "usr/bin"},
	"GPU Operator":    {root: "run/nvidia/driver"},
	"GKE with Container-Optimized OS": {
		root: "home/kubernetes/bin/nvidia", libraries: "lib64", programs: "bin",
	},
	"GKE with Ubuntu": {libraries: "opt/nvidia/lib64", programs: "opt/nvidia/bin"},
	"Talos 1.12":      {libraries: "usr/local/glibc/usr/lib", programs: "usr/local/bin"},
	"Talos 1.12, given the tree of the libraries": {
		libraries: "usr/local/glibc/usr/lib", programs: "usr/local/bin", flag: "/usr/local/glibc",
	},
	"Talos 1.13": {libraries: "usr/local/lib", programs: "usr/local/bin"},
	"NixOS": {
		libraries: "nix/store/a-nvidia-x11/lib", programs: "nix/store/c-bin/bin",
		links: map[string]string{"run/opengl-driver": "/nix/store/a-nvidia-x11", "run/current-system/sw/bin": "/nix/store/c-bin/bin"},
	},
	"Bottlerocket, libraries and programs in directories of their own": {
		libraries: "usr/lib/nvidia/tesla", programs: "usr/libexec/nvidia/tesla/bin",
		links: map[string]string{"usr": "x86_64-bottlerocket-linux-gnu/sys-root/usr", "lib": "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib"},
	},
	"Bottlerocket, libraries in /usr/lib": {
		libraries: "usr/lib", programs: "usr/libexec/nvidia/tesla/bin",
		links: map[string]string{"usr": "x86_64-bottlerocket-linux-gnu/sys-root/usr", "lib": "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib"},
	},
	"Bottlerocket, both in usual directories": {
		libraries: "usr/lib", programs: "usr/bin",
		links: map[string]string{"usr": "x86_64-bottlerocket-linux-gnu/sys-root/usr", "lib": "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib"},
	},
	"Bottlerocket, given its root": {
		libraries: "usr/lib/nvidia/tesla", programs: "usr/libexec/nvidia/tesla/bin", flag: "/x86_64-bottlerocket-linux-gnu/sys-root",
		links: map[string]string{
			"usr": "x86_64-bottlerocket-linux-gnu/sys-root/usr", "lib": "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib",
			"x86_64-bottlerocket-linux-gnu/sys-root/lib": "usr/lib",
		},
	},
	"WSL": {libraries: "usr/lib/wsl/lib", programs: "usr/lib/wsl/lib"},
	"Flatcar": {
		libraries: "opt/nvidia/580.1/6.12/usr/lib64", programs: "opt/nvidia/580.1/6.12/usr/bin",
		links: map[string]string{"opt/nvidia/current": "580.1/6.12"},
	},
}

// installOn installs the simulated driver on a new host, as a platform has it.
func installOn(t *testing.T, name string) string {
	t.Helper()
	dir, p := t.TempDir(), platforms[name]
	for path, target := range p.links {
		full := filepath.Join(dir, path)
		at := filepath.Dir(full)
		if filepath.IsAbs(target) {
			at = dir
		}
		for _, d := range []string{filepath.Dir(full), filepath.Join(at, target)} {
			if err := os.MkdirAll(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink(target, full); err != nil {
			t.Fatal(err)
		}
	}
	build := filepath.Join(installed.Host, "build")
	err := simulated.Install(simulated.Options{
		Root: filepath.Join(dir, p.root), Libraries: p.libraries, Programs: p.programs, Kernel: dir,
		Machine: installed.Machine, Library: filepath.Join(build, "libnvidia-ml.so.1"), SMI: filepath.Join(build, "nvmlsim"),
	})
	if err != nil {
		t.Fatal(err)
	}
	for path, target := range p.links { // absolute links lead to other files here
		if full := filepath.Join(dir, path); !strings.Contains(path, "/") {
			if err := os.Remove(full); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("/"+target, full); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

// commonOn returns what all containers with a GPU get on a host.
func commonOn(t *testing.T, dir, flag string) specs.ContainerEdits {
	t.Helper()
	_, driver, _ := setUp(t)
	host := driverroot.NewHost(dir)
	root, err := driverroot.Find(host, flag)
	if err != nil {
		t.Fatal(err)
	}
	driver.Root, driver.DevRoot, driver.ProcRoot, driver.LibraryDirs = root.Path, root.DevRoot, root.ProcRoot, root.LibraryDirs
	if driver.ProgramDirs, err = root.ProgramDirs(host); err != nil {
		t.Fatal(err)
	}
	cdiDir := filepath.Join(dir, "run/cdi")
	s := cdi.New(cdi.Config{Dir: cdiDir, HookPath: hook, Host: host})
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Write(devices(t, driver, "claim-1", 0)); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(cdiDir, "k8s.gpu.nvidia.com-driver.json"))
	if err != nil {
		t.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		t.Fatal(err)
	}
	return spec.ContainerEdits
}

// TestContainerGetsTheDriverOfEachPlatform checks that a container gets the libraries, in a
// directory that its loader will know, and the programs, in a directory of its PATH, wherever
// the host has them.
func TestContainerGetsTheDriverOfEachPlatform(t *testing.T) {
	for name, p := range platforms {
		t.Run(name, func(t *testing.T) {
			edits := commonOn(t, installOn(t, name), p.flag)
			got := map[string]string{}
			for _, m := range edits.Mounts {
				got[filepath.Base(m.ContainerPath)] = filepath.Dir(m.ContainerPath)
			}
			var folders []string
			for _, h := range edits.Hooks {
				if i := slices.Index(h.Args, "--folder"); i >= 0 && slices.Contains(h.Args, "update-ldcache") {
					folders = append(folders, h.Args[i+1])
				}
			}
			for _, library := range []string{"libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvidia-nvvm"} {
				if dir := got[library+".so.580.159.04"]; !slices.Contains(folders, dir) {
					t.Errorf("%s is in %q, the loader searches %v", library, dir, folders)
				}
			}
			for _, program := range []string{"nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"} {
				if dir := got[program]; !slices.Contains([]string{"/usr/bin", "/bin", "/usr/local/bin"}, dir) {
					t.Errorf("%s is in %q", program, dir)
				}
			}
			if p.flag == "" && !strings.HasPrefix(got["gsp_nvmlsim.bin"], "/lib/firmware/") {
				t.Errorf("firmware is in %q", got["gsp_nvmlsim.bin"])
			}
		})
	}
}
