package main_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// built has the program and the library, built once for all tests.
type built struct{ dir string }

var binaries built

func TestMain(m *testing.M) {
	os.Exit(runTests(m))
}

// ownProcessEnv names the directory of the binaries in the separate process of
// a test.
const ownProcessEnv = "NVMLSIM_TEST_BINARIES"

func runTests(m *testing.M) int {
	if dir := os.Getenv(ownProcessEnv); dir != "" {
		binaries.dir = dir
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "nvmlsim")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binaries.dir = dir
	c := exec.Command("go", "build", "-o", dir, ".", "./lib")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := c.CombinedOutput()
	if err == nil {
		out, err = exec.Command(dir+"/lib", dir+"/libnvidia-ml.so.1").CombinedOutput()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// nvmlsim runs the program and returns what it printed.
func nvmlsim(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("nvmlsim %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// install creates a driver root with a machine.
func install(t *testing.T, machine string) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "driver")
	nvmlsim(t, "install", "--root", root, "--machine", machine, "--node-name", "node-a")
	return root
}

func smi(t *testing.T, root string, args ...string) string {
	t.Helper()
	out, err := exec.Command(filepath.Join(root, "usr/bin/nvidia-smi"), args...).Output()
	if err != nil {
		t.Fatalf("nvidia-smi %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// files returns the paths under a directory with the relevant properties of
// each.
func files(t *testing.T, root string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		st := fi.Sys().(*syscall.Stat_t)
		rel, err := filepath.Rel(root, path)
		found[rel] = fmt.Sprintf("%v inode %d device %x", fi.Mode(), st.Ino, st.Rdev)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestInstallLooksLikeADriver(t *testing.T) {
	root := install(t, "2xh100-80gb")
	got := files(t, root)
	const libraries = "usr/lib/x86_64-linux-gnu/"
	for path, want := range map[string]string{
		"dev/nvidia0":                            fmt.Sprintf("device %x", 195<<8),
		"dev/nvidia1":                            fmt.Sprintf("device %x", 195<<8|1),
		"dev/nvidiactl":                          fmt.Sprintf("device %x", 195<<8|255),
		"dev/nvidia-modeset":                     fmt.Sprintf("device %x", 195<<8|254),
		"dev/nvidia-uvm":                         "Dcrw-rw-rw-",
		"dev/nvidia-uvm-tools":                   "Dcrw-rw-rw-",
		libraries + "libcuda.so.580.159.04":      "-rwxr-xr-x",
		libraries + "libcuda.so.1":               "L",
		libraries + "libnvidia-ml.so.580.159.04": "-rwxr-xr-x",
		libraries + "libnvidia-ml.so.1":          "L",
		"usr/bin/nvidia-smi":                     "-rwxr-xr-x",
		"usr/bin/nvidia-cuda-mps-control":        "-rwxr-xr-x",
		"usr/bin/nvidia-cuda-mps-server":         "-rwxr-xr-x",
		"proc/devices":                           "-r--r--r--",
		"proc/driver/nvidia/version":             "-r--r--r--",
		"proc/driver/nvidia/params":              "-r--r--r--",
		"proc/driver/nvidia-caps/mig-minors":     "-r--r--r--",
	} {
		if !strings.Contains(got[path], want) {
			t.Errorf("%s: %q, want %q", path, got[path], want)
		}
	}
	for path, want := range map[string]string{
		"proc/driver/nvidia/capabilities/mig/config":               "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n",
		"proc/driver/nvidia/capabilities/gpu1/mig/gi13/access":     "DeviceFileMinor: 255\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
		"proc/driver/nvidia/capabilities/gpu1/mig/gi13/ci0/access": "DeviceFileMinor: 256\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
	} {
		if b, err := os.ReadFile(filepath.Join(root, path)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v, want %q", path, b, err, want)
		}
	}
	if b, err := os.ReadFile(filepath.Join(root, "proc/driver/nvidia-caps/mig-minors")); err != nil || !strings.HasPrefix(string(b), "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n") || !strings.Contains(string(b), "\ngpu1/gi13/ci0/access 256\n") {
		t.Errorf("mig-minors: %v\n%s", err, b)
	}
	if out, err := exec.Command("ldconfig", "-n", "-N", "-v", filepath.Join(root, libraries)).CombinedOutput(); err != nil || !bytes.Contains(out, []byte("libnvidia-ml.so.1 -> libnvidia-ml.so.580.159.04")) || !bytes.Contains(out, []byte("libcuda.so.1 -> libcuda.so.580.159.04")) {
		t.Errorf("ldconfig: %v\n%s", err, out)
	}
	if gpus := smi(t, root, "-L"); strings.Count(gpus, "NVIDIA H100 80GB HBM3 (UUID: GPU-") != 2 {
		t.Errorf("nvidia-smi -L:\n%s", gpus)
	}
}

func TestInstallAgainKeepsEverything(t *testing.T) {
	root := install(t, "4xl40s")
	nvmlsim(t, "break", "2", "--lost", "--root", root)
	before, state := files(t, root), nvmlsim(t, "state", "--root", root)
	nvmlsim(t, "install", "--root", root, "--machine", "4xl40s", "--node-name", "node-a")
	if diff := cmp.Diff(before, files(t, root)); diff != "" {
		t.Errorf("files changed:\n%s", diff)
	}
	if diff := cmp.Diff(state, nvmlsim(t, "state", "--root", root)); diff != "" {
		t.Errorf("state changed:\n%s", diff)
	}
}

func TestInstallPutsRightAndPrunes(t *testing.T) {
	root := install(t, "4xl40s")
	for _, path := range []string{"dev/nvidia1", "usr/bin/nvidia-smi"} {
		if err := os.Remove(filepath.Join(root, path)); err != nil {
			t.Fatal(err)
		}
	}
	machine := filepath.Join(t.TempDir(), "machine.yaml")
	if err := os.WriteFile(machine, []byte("driverVersion: 590.10.01\ngpus: [{model: l40s, count: 2}]\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	nvmlsim(t, "install", "--root", root, "--machine", machine, "--node-name", "node-a")
	for path := range files(t, root) {
		if strings.Contains(path, "580.159") || path == "dev/nvidia2" || path == "dev/nvidia3" {
			t.Errorf("%s is still there", path)
		}
	}
	if out := smi(t, root, "--query-gpu=index,driver_version", "--format=csv,noheader"); out != "0, 590.10.01\n1, 590.10.01\n" {
		t.Errorf("nvidia-smi: %q", out)
	}
}

func TestUninstallRemovesExactlyWhatInstallMade(t *testing.T) {
	root := install(t, "2xt4")
	others := filepath.Join(root, "usr/bin/other")
	if err := os.WriteFile(others, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	nvmlsim(t, "uninstall", "--root", root)
	left := files(t, root)
	if len(left) != 1 || left["usr/bin/other"] == "" {
		t.Errorf("left: %v", left)
	}
	out, err := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), "uninstall", "--root", root).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "no simulated driver is installed under "+root) {
		t.Errorf("second time: %v\n%s", err, out)
	}

	alone := install(t, "t4")
	nvmlsim(t, "uninstall", "--root", alone)
	if _, err := os.Stat(alone); !os.IsNotExist(err) {
		t.Errorf("the root itself: %v", err)
	}
}

func TestBadInput(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"no machine":     {[]string{"install", "--root", dir}, `required flag(s) "machine" not set`},
		"unknown model":  {[]string{"install", "--root", dir, "--machine", "8xh10"}, `"h10" is not a GPU model`},
		"missing file":   {[]string{"install", "--root", dir, "--machine", dir + "/none.yaml"}, "none.yaml: no such file"},
		"root is /":      {[]string{"install", "--root", "/", "--machine", "l4"}, "not /"},
		"no library":     {[]string{"install", "--root", dir, "--machine", "l4", "--library", dir + "/none.so"}, "build it with"},
		"other library":  {[]string{"install", "--root", dir, "--machine", "l4", "--library", "/proc/self/exe"}, "libnvidia-ml.so.1"},
		"no root":        {[]string{"state"}, "which machine? Set --root DIR"},
		"not installed":  {[]string{"state", "--root", dir}, "no simulated machine"},
		"unknown option": {[]string{"state", "--rot", dir}, "unknown flag: --rot"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), c.args...).CombinedOutput()
			if err == nil || !strings.Contains(string(out), c.want) {
				t.Errorf("%v, printed %q, want %q", err, out, c.want)
			}
		})
	}
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// container creates the directory of a container with some GPUs of a driver
// root, as a container runtime does: only the library, nvidia-smi and device
// nodes.
func container(t *testing.T, root string, nodes ...string) string {
	t.Helper()
	dir := t.TempDir()
	copyTo := func(path string) {
		b, err := os.ReadFile(filepath.Join(root, path))
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, path), b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	copyTo("usr/bin/nvidia-smi")
	copyTo("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04")
	for _, n := range nodes {
		var st syscall.Stat_t
		path := filepath.Join(dir, "dev", n)
		if err := syscall.Stat(filepath.Join(root, "dev", n), &st); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mknod(path, syscall.S_IFCHR|0o666, int(st.Rdev)); err != nil {
			t.Fatal(err)
		}
	}
	// In a container a static program finds its path through /proc.
	if err := os.MkdirAll(filepath.Join(dir, "proc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("proc", filepath.Join(dir, "proc"), "proc", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(filepath.Join(dir, "proc"), 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestContainerSeesTheGPUsItWasGiven(t *testing.T) {
	root := install(t, "8xh100-80gb")
	all := strings.Split(strings.TrimSpace(smi(t, root, "--query-gpu=uuid", "--format=csv,noheader")), "\n")
	for name, c := range map[string]struct {
		nodes []string
		args  []string
		want  string
		code  int
	}{
		"one": {
			[]string{"nvidiactl", "nvidia-uvm", "nvidia5"},
			[]string{"-L"}, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: " + all[5] + ")\n", 0,
		},
		"two": {
			[]string{"nvidiactl", "nvidia1", "nvidia6"},
			[]string{"--query-gpu=index,uuid", "--format=csv,noheader"}, "0, " + all[1] + "\n1, " + all[6] + "\n", 0,
		},
		"none":       {[]string{"nvidiactl"}, nil, "No devices were found\n", 6},
		"no control": {[]string{"nvidia0"}, nil, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", 9},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command("/usr/bin/nvidia-smi", c.args...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: container(t, root, c.nodes...)}
			cmd.Dir = "/"
			out, _ := cmd.Output()
			if code := cmd.ProcessState.ExitCode(); !strings.HasPrefix(string(out), c.want) || code != c.code {
				t.Errorf("exit code %d (want %d), printed %q, want %q", code, c.code, out, c.want)
			}
		})
	}
}

// mountFirmware adds the driver's firmware to a container, as container
// runtimes do.
func mountFirmware(t *testing.T, root, dir string) {
	t.Helper()
	const firmware = "lib/firmware/nvidia/580.159.04/gsp_nvmlsim.bin"
	if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, firmware)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, firmware), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount(filepath.Join(root, firmware), filepath.Join(dir, firmware), "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(filepath.Join(dir, firmware), 0); err != nil {
			t.Error(err)
		}
	})
}

// TestContainerSeesItsMIGDevices checks that a container sees the MIG devices
// whose two capability nodes it has.
func TestContainerSeesItsMIGDevices(t *testing.T) {
	root := install(t, "1xh100-80gb")
	smi(t, root, "-mig", "1")
	smi(t, root, "mig", "-cgi", "1g.10gb:0,1g.10gb:1,1g.10gb:2", "-C")
	all := strings.Split(strings.TrimSpace(smi(t, root, "-L")), "\n")
	dir := container(t, root, "nvidiactl", "nvidia0")
	mountFirmware(t, root, dir)
	caps := filepath.Join(dir, "dev/nvidia-caps")
	if err := os.MkdirAll(caps, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, capability := range []string{"gi8/access", "gi8/ci0/access"} {
		b, err := os.ReadFile(filepath.Join(root, "proc/driver/nvidia/capabilities/gpu0/mig", capability))
		if err != nil {
			t.Fatal(err)
		}
		var minor int
		if _, err := fmt.Sscanf(string(b), "DeviceFileMinor: %d", &minor); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mknod(fmt.Sprintf("%s/nvidia-cap%d", caps, minor), syscall.S_IFCHR|0o666, 509<<8|minor); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("/usr/bin/nvidia-smi", "-L")
	cmd.SysProcAttr, cmd.Dir = &syscall.SysProcAttr{Chroot: dir}, "/"
	out, err := cmd.Output()
	// GPU instance 8 is at slice 1, the second of three.
	want := all[0] + "\n" + strings.Replace(all[2], "Device  1", "Device  0", 1) + "\n"
	if diff := cmp.Diff(want, string(out)); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// Containers read the state of a GPU from the firmware file that container
// runtimes mount, so they see changes.
func TestContainerSeesWhatHappens(t *testing.T) {
	root := install(t, "2xh100-80gb")
	dir := container(t, root, "nvidiactl", "nvidia1")
	mountFirmware(t, root, dir)
	list := func(want int) {
		t.Helper()
		cmd := exec.Command("/usr/bin/nvidia-smi", "-L")
		cmd.SysProcAttr, cmd.Dir = &syscall.SysProcAttr{Chroot: dir}, "/"
		if out, _ := cmd.Output(); cmd.ProcessState.ExitCode() != want {
			t.Errorf("exit code %d, printed %q, want %d", cmd.ProcessState.ExitCode(), out, want)
		}
	}
	nvmlsim(t, "break", "0", "--lost", "--root", root) // not this container's
	list(0)
	nvmlsim(t, "break", "1", "--lost", "--root", root)
	list(15)
}

func TestSMI(t *testing.T) {
	root := install(t, "2xa100-40gb")
	uuid := strings.TrimSpace(smi(t, root, "-i", "1", "--query-gpu=uuid", "--format=csv,noheader"))
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"summary": {nil, []string{"| NVIDIA-SMI 580.159.04 ", "Driver Version: 580.159.04", "CUDA Version: 13.0", "NVIDIA A100-SXM4-40GB", "0MiB /  40960MiB", "No running processes found"}},
		"csv":     {[]string{"--query-gpu=index,name,memory.total,mig.mode.current,compute_mode,utilization.gpu,temperature.gpu", "--format=csv"}, []string{"index, name, memory.total [MiB], mig.mode.current, compute_mode, utilization.gpu [%], temperature.gpu\n0, NVIDIA A100-SXM4-40GB, 40960 MiB, Disabled, Default, 0 %, 30\n1, "}},
		"nounits": {[]string{"--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=" + uuid}, []string{"40785\n"}},
		"query":   {[]string{"-q", "-i", "1"}, []string{"==============NVSMI LOG==============", "Attached GPUs                                     : 2", "    GPU UUID                                      : " + uuid, "    MIG Mode\n        Current                                   : Disabled"}},
		"xml":     {[]string{"-q", "-x"}, []string{"<nvidia_smi_log>", "<uuid>" + uuid + "</uuid>", "<minor_number>1</minor_number>", "<current_mig>Disabled</current_mig>"}},
	} {
		t.Run(name, func(t *testing.T) {
			out := smi(t, root, c.args...)
			for _, want := range c.want {
				if !strings.Contains(out, want) {
					t.Errorf("want %q in:\n%s", want, out)
				}
			}
		})
	}
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"unknown option": {[]string{"--frob"}, 2, `Option "--frob" is not recognized`},
		"unknown field":  {[]string{"--query-gpu=indx", "--format=csv"}, 2, `Field "indx" is not a valid field to query.`},
		"no format":      {[]string{"--query-gpu=index"}, 2, "Must specify format"},
		"unknown GPU":    {[]string{"-i", "9"}, 6, "No devices were found"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(filepath.Join(root, "usr/bin/nvidia-smi"), c.args...)
			out, _ := cmd.Output()
			if cmd.ProcessState.ExitCode() != c.code || !strings.Contains(string(out), c.want) {
				t.Errorf("exit code %d, printed %q", cmd.ProcessState.ExitCode(), out)
			}
		})
	}
	nvmlsim(t, "break", "0", "--lost", "--root", root)
	cmd := exec.Command(filepath.Join(root, "usr/bin/nvidia-smi"))
	if out, _ := cmd.Output(); cmd.ProcessState.ExitCode() != 15 || !strings.Contains(string(out), "GPU is lost") {
		t.Errorf("lost GPU: %q", out)
	}
	nvmlsim(t, "driver", "unload", "--root", root)
	cmd = exec.Command(filepath.Join(root, "usr/bin/nvidia-smi"))
	if out, _ := cmd.Output(); cmd.ProcessState.ExitCode() != 9 || !strings.Contains(string(out), "couldn't communicate with the NVIDIA driver") {
		t.Errorf("unloaded driver: %q", out)
	}
}
