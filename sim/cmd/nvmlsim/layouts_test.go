package main_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// layouts has where platforms have the driver's files; links are there before.
var layouts = map[string]struct {
	root, libraries, programs string
	links                     map[string]string
	// link is another path of the library.
	link string
}{
	"GKE with Container-Optimized OS": {root: "home/kubernetes/bin/nvidia", libraries: "lib64", programs: "bin"},
	"GKE with Ubuntu":                 {libraries: "opt/nvidia/lib64", programs: "opt/nvidia/bin"},
	"GPU Operator":                    {root: "run/nvidia/driver"},
	"EKS":                             {libraries: "usr/lib64", programs: "usr/bin"},
	"AKS with Ubuntu":                 {libraries: "usr/bin/lib64", programs: "usr/bin"},
	"Talos 1.12":                      {libraries: "usr/local/glibc/usr/lib", programs: "usr/local/bin"},
	"Talos 1.13":                      {libraries: "usr/local/lib", programs: "usr/local/bin"},
	"Bottlerocket": {
		libraries: "usr/lib/nvidia/tesla", programs: "usr/libexec/nvidia/tesla/bin",
		links: map[string]string{
			"usr": "x86_64-bottlerocket-linux-gnu/sys-root/usr", "lib": "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib",
			"x86_64-bottlerocket-linux-gnu/sys-root/lib": "usr/lib",
		},
	},
	"NixOS": {
		libraries: "nix/store/a-nvidia-x11/lib", programs: "nix/store/c-bin/bin",
		links: map[string]string{"run/opengl-driver": "../nix/store/a-nvidia-x11"}, link: "run/opengl-driver/lib",
	},
	"Flatcar": {
		libraries: "opt/nvidia/580.1/6.12/usr/lib64", programs: "opt/nvidia/580.1/6.12/usr/bin",
		links: map[string]string{"opt/nvidia/current": "580.1/6.12"}, link: "opt/nvidia/current/usr/lib64",
	},
	"WSL": {
		libraries: "usr/lib/wsl/drivers/x", programs: "usr/lib/wsl/lib",
	},
}

// layoutHost makes the directory of a host with the links of a layout.
func layoutHost(t *testing.T, name string) string {
	t.Helper()
	dir, l := t.TempDir(), layouts[name]
	if err := os.WriteFile(filepath.Join(dir, "hostname"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for path, target := range l.links {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(filepath.Dir(path), target), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, path); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// installLayout installs a machine on a host at dir.
func installLayout(t *testing.T, name, dir string) {
	t.Helper()
	l := layouts[name]
	nvmlsim(t, "install", "--root", filepath.Join(dir, l.root), "--libraries", l.libraries, "--programs", l.programs,
		"--kernel", dir, "--machine", "2xh100-80gb", "--node-name", "node-a")
}

// loads fails unless a program can use the library at that path.
func loads(t *testing.T, program, library string) {
	t.Helper()
	c := exec.Command(program, library)
	if out, err := c.CombinedOutput(); err != nil || string(out) != "nvmlInit_v2: 0\n" {
		t.Errorf("load %s: %v, %q", library, err, out)
	}
}

// TestLayouts installs the driver where platforms have it, with the kernel's files in the
// host, and uses all that commands and programs use.
func TestLayouts(t *testing.T) {
	program := compile(t, "call_all", t.TempDir())
	for name, l := range layouts {
		t.Run(name, func(t *testing.T) {
			dir := layoutHost(t, name)
			empty := files(t, dir)
			installLayout(t, name, dir)
			root := filepath.Join(dir, l.root)
			libraries, programs := l.libraries, l.programs
			if libraries == "" {
				libraries, programs = "usr/lib/x86_64-linux-gnu", "usr/bin"
			}
			smi := filepath.Join(root, programs, "nvidia-smi")
			if out, err := exec.Command(smi, "-L").Output(); err != nil || strings.Count(string(out), "GPU-") != 2 {
				t.Errorf("nvidia-smi: %v\n%s", err, out)
			}
			loads(t, program, filepath.Join(root, libraries, "libnvidia-ml.so.1"))
			if l.link != "" {
				loads(t, program, filepath.Join(dir, l.link, "libnvidia-ml.so.1"))
			}
			for _, path := range []string{"dev/nvidia1", "proc/driver/nvidia/version", "proc/devices", "sys/module/nvidia/version", "sys/bus/pci/devices/*/config"} {
				if found, err := filepath.Glob(filepath.Join(dir, path)); err != nil || len(found) == 0 {
					t.Errorf("no %s: %v", path, err)
				}
			}
			before := files(t, dir)
			installLayout(t, name, dir)
			if diff := cmp.Diff(before, files(t, dir)); diff != "" {
				t.Errorf("files that the second install has changed:\n%s", diff)
			}
			checkLayoutInUse(t, dir, root, filepath.Join(root, programs))
			nvmlsim(t, "uninstall", "--root", root)
			if diff := cmp.Diff(empty, files(t, dir)); diff != "" {
				t.Errorf("after uninstall (-want +got):\n%s", diff)
			}
		})
	}
}

// checkLayoutInUse changes the machine of a driver root in a host at dir, and checks that the
// kernel's files follow.
func checkLayoutInUse(t *testing.T, dir, root, programs string) {
	t.Helper()
	nvmlsim(t, "break", "1", "--xid", "48", "--root", root)
	if log, err := os.ReadFile(filepath.Join(dir, "dev/kmsg")); err != nil || !strings.Contains(string(log), "NVRM: Xid (PCI:0000:") {
		t.Errorf("kernel log: %q, %v", log, err)
	}
	nvmlsim(t, "heal", "1", "--root", root)
	nvmlsim(t, "driver", "unload", "--root", root)
	if _, err := os.Stat(filepath.Join(dir, "sys/module/nvidia")); !os.IsNotExist(err) {
		t.Errorf("the module of an unloaded driver: %v", err)
	}
	nvmlsim(t, "driver", "load", "--root", root)
	if _, err := os.Stat(filepath.Join(dir, "sys/module/nvidia/version")); err != nil {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(dir, "dev/nvidia-uvm")); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(filepath.Join(programs, "nvidia-modprobe"), "-u").CombinedOutput(); err != nil {
		t.Errorf("nvidia-modprobe: %v\n%s", err, out)
	}
	if _, err := os.Stat(filepath.Join(dir, "dev/nvidia-uvm")); err != nil {
		t.Error(err)
	}
	mps := func(args ...string) {
		t.Helper()
		c := exec.Command(filepath.Join(programs, "nvidia-cuda-mps-control"), args...)
		c.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(dir, "mps"), "CUDA_MPS_LOG_DIRECTORY=" + filepath.Join(dir, "mps")}
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("nvidia-cuda-mps-control %s: %v\n%s", args, err, out)
		}
	}
	mps("-d")
	mps("start_server", "-uid", "0")
	mps("quit")
	if err := os.RemoveAll(filepath.Join(dir, "mps")); err != nil {
		t.Fatal(err)
	}
}

// TestLayoutsInContainer loads the library in a mount namespace in which, as in a container, it
// is at the path of the host, and nvidia-smi in a usual directory.
func TestLayoutsInContainer(t *testing.T) {
	program := compile(t, "call_all", t.TempDir())
	for name, l := range layouts {
		t.Run(name, func(t *testing.T) {
			dir := layoutHost(t, name)
			installLayout(t, name, dir)
			if l.libraries == "" {
				l.libraries, l.programs = "usr/lib/x86_64-linux-gnu", "usr/bin"
			}
			const script = `set -e
mount -t tmpfs tmpfs /usr/local/bin && mount -t tmpfs -o dev tmpfs /opt && mkdir -p /opt/$2
cp $3/nvidia-smi /usr/local/bin && cp $1/$2/libnvidia-ml.so.1 /opt/$2
mkdir /opt/dev && mknod -m 666 /opt/dev/nvidiactl c 195 255 && mknod -m 666 /opt/dev/nvidia1 c 195 1
cp -a /dev/null /opt/dev && mount --bind /opt/dev /dev
nvidia-smi -L
exec $4 /opt/$2/libnvidia-ml.so.1`
			root := filepath.Join(dir, l.root)
			c := exec.Command("sh", "-c", script, "sh", root, l.libraries, filepath.Join(root, l.programs), program)
			c.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
			c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			out, err := c.CombinedOutput()
			if err != nil || strings.Count(string(out), "GPU-") != 1 || !strings.HasSuffix(string(out), "nvmlInit_v2: 0\n") {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// machineItself makes the root directory of a machine that has files of its own in /proc,
// /sys and /dev, with the program and the library in /build.
func machineItself(t *testing.T) ownMachine {
	t.Helper()
	dir := t.TempDir()
	for _, sub := range []string{"build", "proc", "sys/devices", "dev"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for path, from := range map[string]string{"devices": "/proc/devices", "build/nvmlsim": binaries.dir + "/nvmlsim", "build/libnvidia-ml.so.1": binaries.dir + "/libnvidia-ml.so.1"} {
		content, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, path), content, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mknod(filepath.Join(dir, "dev/kmsg"), syscall.S_IFCHR|0o600, 1<<8|11); err != nil {
		t.Fatal(err)
	}
	return ownMachine(dir)
}

type ownMachine string

// run runs a shell command in a machine. proc is a shell command that prepares /proc.
func (m ownMachine) run(t *testing.T, proc, command string) (string, error) {
	t.Helper()
	c := exec.Command("sh", "-c", `mount -t proc proc "$1/proc" && cd "$1" && eval "$2" && exec chroot . /build/`+command, "sh", string(m), proc)
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := c.CombinedOutput()
	return string(out), err
}

// TestInstallInTheMachineItself installs the driver in a root directory, as in a real host.
func TestInstallInTheMachineItself(t *testing.T) {
	m := machineItself(t)
	const install = "nvmlsim install --root / --kernel / --libraries usr/lib64 --machine 2xl4"
	if out, err := m.run(t, "true", install); err == nil || !strings.Contains(out, "/proc/driver is the kernel's own") {
		t.Errorf("with the kernel's /proc/driver: %v, %q", err, out)
	}
	if out, err := m.run(t, "true", "nvmlsim install --root / --machine 2xl4"); err == nil || !strings.Contains(out, "--kernel /") {
		t.Errorf("without --kernel: %v, %q", err, out)
	}
	if left := files(t, string(m)); len(left) != 4 {
		t.Errorf("refused installations have made files: %v", left)
	}
	// What is mounted in /proc stays in this directory from one run to the next.
	if err := os.MkdirAll(filepath.Join(string(m), "own/driver"), 0o755); err != nil {
		t.Fatal(err)
	}
	const own = "mount --bind own/driver proc/driver && mount --bind devices proc/devices"
	numbers, err := os.ReadFile(filepath.Join(string(m), "devices"))
	if err != nil {
		t.Fatal(err)
	}
	before := files(t, string(m))
	for range 2 {
		if out, err := m.run(t, own, install); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	with, err := os.ReadFile(filepath.Join(string(m), "devices"))
	if want := strings.Replace(string(numbers), "\n\nBlock", "\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n509 nvidia-caps\n510 nvidia-uvm\n\nBlock", 1); err != nil || string(with) != want {
		t.Errorf("/proc/devices: %v (-want +got):\n%s", err, cmp.Diff(want, string(with)))
	}
	if out, err := m.run(t, own, "../usr/bin/nvidia-smi -L"); err != nil || strings.Count(out, "GPU-") != 2 {
		t.Errorf("nvidia-smi: %v\n%s", err, out)
	}
	if out, err := m.run(t, own, "nvmlsim break 1 --xid 48 --root /"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if log, err := os.ReadFile(filepath.Join(string(m), "dev/kmsg")); err != nil || !strings.Contains(string(log), "NVRM: Xid") {
		t.Errorf("kernel log: %q, %v", log, err)
	}
	if out, err := m.run(t, own, "nvmlsim uninstall --root /"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if diff := cmp.Diff(before, files(t, string(m))); diff != "" {
		t.Errorf("after uninstall (-want +got):\n%s", diff)
	}
	if without, err := os.ReadFile(filepath.Join(string(m), "devices")); err != nil || string(without) != string(numbers) {
		t.Errorf("/proc/devices after uninstall: %v\n%s", err, without)
	}
}
