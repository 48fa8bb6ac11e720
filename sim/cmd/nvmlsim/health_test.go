package main_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	sim "github.com/tessera-dra/tessera/sim/nvmlsim"
)

// healthOf returns the state of a GPU.
func healthOf(t *testing.T, root string, gpu int) sim.Health {
	t.Helper()
	var s sim.State
	if err := json.Unmarshal([]byte(nvmlsim(t, "state", "--root", root)), &s); err != nil {
		t.Fatal(err)
	}
	return s.GPUs[gpu].Health
}

func TestBreakAndHeal(t *testing.T) {
	root := install(t, "2xh100-nvl")
	for args, want := range map[string]sim.Health{
		"--lost":                           {Lost: true},
		"--wedged":                         {Wedged: true},
		"--reset-required":                 {ResetRequired: true},
		"--recovery drain-and-reset":       {RecoveryAction: 4},
		"--recovery system-reboot":         {RecoveryAction: 7},
		"--remap pending":                  {RemappedRows: sim.RemappedRows{Pending: true}},
		"--remap failed --ecc 2 --sram":    {RemappedRows: sim.RemappedRows{Failed: true}, UncorrectableErrors: 2, SRAMThresholdExceeded: true},
		"--nvlink 0,4 --recovery reset":    {NVLinksDown: []int{0, 4}, RecoveryAction: 1},
		"--fabric not-started":             {Fabric: sim.FabricNotStarted},
		"--nvlink all":                     {NVLinksDown: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}},
		"--xid 48 --pid 7 --name x":        {},
		"--recovery none --remap none":     {},
		"--lost --wedged --recovery reset": {Lost: true, Wedged: true, RecoveryAction: 1},
		"--mig-mode-pends":                 {MIGModePends: true},
		"--no-node --no-capabilities":      {NodeMissing: true, CapabilitiesMissing: true},
	} {
		t.Run(args, func(t *testing.T) {
			nvmlsim(t, append([]string{"break", "1", "--root", root}, strings.Fields(args)...)...)
			if diff := cmp.Diff(want, healthOf(t, root, 1)); diff != "" {
				t.Errorf("broken (-want +got):\n%s", diff)
			}
			nvmlsim(t, "heal", "1", "--root", root)
			if h := healthOf(t, root, 1); !cmp.Equal(h, sim.Health{}) {
				t.Errorf("healed: %+v", h)
			}
		})
	}
	nvmlsim(t, "break", "0", "1", "--lost", "--root", root)
	nvmlsim(t, "heal", "--root", root)
	for gpu := range 2 {
		if h := healthOf(t, root, gpu); !cmp.Equal(h, sim.Health{}) {
			t.Errorf("GPU %d, all healed: %+v", gpu, h)
		}
	}
	for args, want := range map[string]string{
		"break 0":                      "break it how?",
		"break 2 --lost":               `has no GPU "2"`,
		"break 0 --recovery heal":      "want one of none, reset",
		"break 0 --remap some":         "want pending, failed or none",
		"break 0 --fabric up":          "want not-started, in-progress, failed or ready",
		"break 0 --nvlink 12":          "h100-nvl has 12 NVLinks",
		"break 0 --xid 31 --ci 0":      "--ci needs --gi",
		"break 0 --pid 7":              "which one? For example --xid 31",
		"break 0 --xid 31 --gi 3":      "doesn't have the instance",
		"break 0 --xid 31 --name x":    "--name needs --pid",
		"break 0 --xid page-fault":     "invalid argument",
		"break --lost":                 "requires at least 1 arg",
		"fault --clear --gpu 0 --hang": "",
		"fault --clear --gpu 2":        `has no GPU "2"`,
		"fault DeviceCreateGpuInstance --gpu 0 --profile 9g.90gb --code 999":           `profile "9g.90gb": want one of 1g.12gb, `,
		"fault DeviceCreateGpuInstance --gpu 0 --profile 3g.47gb --start 1 --code 999": "start 1: want one of [0 4]",
		"fault DeviceCreateGpuInstance --gpu 0 --start -1":                             "--start",
		"fault DeviceSetMigMode --gpu 0 --start 4 --code 999":                          "DeviceSetMigMode has none",
	} {
		out, err := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), append(strings.Fields(args), "--root", root)...).CombinedOutput()
		if (err == nil) != (want == "") || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v, printed %q, want %q", args, err, out, want)
		}
	}
}

// TestRefusedInstances checks a placement that a GPU refuses once.
func TestRefusedInstances(t *testing.T) {
	root := install(t, "2xh100-80gb")
	smi(t, root, "-mig", "1")
	create := func(gpu string) (string, bool) {
		out, err := exec.Command(filepath.Join(root, "usr/bin/nvidia-smi"), "mig", "-i", gpu, "-cgi", "3g.40gb:4").CombinedOutput()
		return string(out), err == nil
	}
	nvmlsim(t, "fault", "DeviceCreateGpuInstance", "--gpu", "1", "--profile", "3g.40gb", "--start", "4", "--code", "999", "--count", "1", "--root", root)
	if out, made := create("0"); !made {
		t.Errorf("on another GPU: %s", out)
	}
	if out, made := create("1"); made || !strings.Contains(out, "Unknown Error") {
		t.Errorf("refused: %s", out)
	}
	if out, made := create("1"); !made {
		t.Errorf("after that: %s", out)
	}
}

// TestMissingNodes checks that files of a GPU that are missing stay so, whoever
// would make them, until heal; in the driver root, and where the kernel's files are
// elsewhere.
func TestMissingNodes(t *testing.T) {
	const access = "proc/driver/nvidia/capabilities/gpu0/mig/gi9/ci0/access"
	for _, own := range []bool{true, false} {
		root := filepath.Join(t.TempDir(), "driver")
		kernel := root
		if !own {
			kernel = filepath.Join(t.TempDir(), "kernel")
		}
		install := func() {
			nvmlsim(t, "install", "--root", root, "--machine", "2xh100-80gb", "--node-name", "node-a", "--kernel", kernel)
		}
		install()
		whole := contents(files(t, kernel))
		check := func(when string, missing bool, paths ...string) {
			t.Helper()
			for _, path := range paths {
				if _, err := os.Stat(filepath.Join(kernel, path)); os.IsNotExist(err) != missing {
					t.Errorf("%s: %s: %v, want missing %v", when, path, err, missing)
				}
			}
		}
		nvmlsim(t, "break", "0", "--no-node", "--root", root)
		check("broken", true, "dev/nvidia0")
		check("broken", false, access)
		nvmlsim(t, "break", "0", "--no-capabilities", "--root", root)
		check("broken", true, "dev/nvidia0", access)
		check("broken", false, "dev/nvidia1", strings.Replace(access, "gpu0", "gpu1", 1))
		out, err := exec.Command(filepath.Join(root, "usr/bin/nvidia-modprobe"), "-u", "-c0").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "/dev/nvidia0") {
			t.Errorf("nvidia-modprobe: %v, printed %q", err, out)
		}
		install()
		check("installed again", true, "dev/nvidia0", access)
		nvmlsim(t, "heal", "1", "--root", root)
		check("another one healed", true, "dev/nvidia0", access)
		nvmlsim(t, "heal", "0", "--root", root)
		if diff := cmp.Diff(whole, contents(files(t, kernel))); diff != "" {
			t.Errorf("healed (-want +got):\n%s", diff)
		}
		nvmlsim(t, "break", "1", "--no-node", "--root", root)
		nvmlsim(t, "uninstall", "--root", root)
		if _, err := os.Stat(root); !os.IsNotExist(err) {
			t.Errorf("uninstalled, and the root: %v", err)
		}
	}
	for machine, want := range map[string]string{
		"l4":                               "--no-capabilities: l4 has no MIG",
		"wsl: true\ngpus: [{model: h200}]": "--no-capabilities: the machine has no device nodes",
	} {
		root := install(t, machineFile(t, machine))
		out, err := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), "break", "0", "--no-node", "--no-capabilities", "--root", root).CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v, printed %q, want %q", machine, err, out, want)
		}
	}
}

// contents leaves the inode numbers out of what files returns.
func contents(all map[string]string) map[string]string {
	for path, properties := range all {
		all[path] = regexp.MustCompile(`inode \d+ `).ReplaceAllString(properties, "")
	}
	return all
}

// TestKernelLog checks that the log is in the driver root, and stays when the
// driver is installed again.
func TestKernelLog(t *testing.T) {
	root := install(t, "h100-80gb")
	read := func() string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(root, "dev/kmsg"))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if log := read(); log != "" {
		t.Errorf("nothing has happened, and the log is %q", log)
	}
	nvmlsim(t, "break", "0", "--xid", "13,31", "--pid", "4711", "--name", "train", "--root", root)
	log := read()
	if strings.Count(log, "\n") != 3 || !strings.Contains(log, "): 31, pid=4711, name=train, channel ") {
		t.Errorf("log:\n%s", log)
	}
	nvmlsim(t, "install", "--root", root, "--machine", "h100-80gb", "--node-name", "node-a")
	if again := read(); again != log {
		t.Errorf("installed again, the log is\n%s", again)
	}
	nvmlsim(t, "uninstall", "--root", root)
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("uninstalled, and the root: %v", err)
	}
}

// TestResetCommands checks both ways to reset a GPU, while a program has NVML
// open and after it.
func TestResetCommands(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "2xh100-80gb")
	run := func(command string, args ...string) (string, int) {
		t.Helper()
		c := exec.Command(command, args...)
		out, _ := c.CombinedOutput()
		return string(out), c.ProcessState.ExitCode()
	}
	resets := map[string]func() (string, int){
		"nvmlsim":    func() (string, int) { return run(filepath.Join(binaries.dir, "nvmlsim"), "reset", "1", "--root", root) },
		"nvidia-smi": func() (string, int) { return run(filepath.Join(root, "usr/bin/nvidia-smi"), "--gpu-reset", "-i", "1") },
	}
	for name, reset := range resets {
		nvmlsim(t, "break", "1", "--reset-required", "--recovery", "reset", "--root", root)
		l := nvml.New(nvml.WithLibraryPath(library(root)))
		ok(t, l.Init())
		if r := second(l.DeviceGetHandleByIndex(1)); r != nvml.ERROR_RESET_REQUIRED {
			t.Errorf("%s: a call before the reset: %v", name, r)
		}
		if out, code := reset(); code == 0 || !strings.Contains(out, "In use by another client") {
			t.Errorf("%s, NVML open: exit code %d, printed %q", name, code, out)
		}
		ok(t, l.Shutdown())
		if out, code := reset(); code != 0 {
			t.Errorf("%s: exit code %d, printed %q", name, code, out)
		}
		if h := healthOf(t, root, 1); !cmp.Equal(h, sim.Health{}) {
			t.Errorf("%s: after the reset: %+v", name, h)
		}
	}
	nvmlsim(t, "break", "1", "--recovery", "drain-and-reset", "--root", root)
	if out := smi(t, root, "-q", "-i", "1"); !strings.Contains(out, "GPU Recovery Action                           : Drain and Reset") {
		t.Errorf("nvidia-smi -q:\n%s", out)
	}
	nvmlsim(t, "break", "1", "--lost", "--root", root)
	for name, reset := range resets {
		if out, code := reset(); code == 0 || !strings.Contains(out, "GPU is lost") {
			t.Errorf("%s, lost: exit code %d, printed %q", name, code, out)
		}
	}
}

// TestModuleOfEachLoad checks that the module's directory in sysfs is there while
// the driver is loaded, and another one after each load.
func TestModuleOfEachLoad(t *testing.T) {
	root := install(t, "h100-80gb")
	inode := func() uint64 {
		t.Helper()
		fi, err := os.Stat(filepath.Join(root, "sys/module/nvidia"))
		if os.IsNotExist(err) {
			return 0
		}
		if err != nil {
			t.Fatal(err)
		}
		return fi.Sys().(*syscall.Stat_t).Ino
	}
	first := inode()
	nvmlsim(t, "driver", "unload", "--root", root)
	if n := inode(); n != 0 {
		t.Error("unloaded, and the directory is there")
	}
	nvmlsim(t, "driver", "load", "--root", root)
	if n := inode(); n == 0 || n == first {
		t.Errorf("inode %d after the load, %d before", n, first)
	}
	nvmlsim(t, "driver", "unload", "--root", root)
	nvmlsim(t, "uninstall", "--root", root)
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("uninstalled, and the root: %v", err)
	}
}
