package main_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	nvdevice "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

// TestLibraryMIGLife creates and destroys a MIG device as a driver does,
// through the real client library.
func TestLibraryMIGLife(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "2xh100-80gb")
	l := open(t, root)
	d := device(t, l, 1)
	activation, r := d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	if r != nvml.SUCCESS || activation != nvml.SUCCESS {
		t.Fatal(activation, r)
	}
	profile, r := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_2_SLICE)
	ok(t, r)
	gi, r := d.CreateGpuInstanceWithPlacement(&profile, &nvml.GpuInstancePlacement{Start: 2, Size: 2})
	ok(t, r)
	info, r := gi.GetInfo()
	ok(t, r)
	if info.Device != d || info.Id != 4 || info.ProfileId != profile.Id || info.Placement != (nvml.GpuInstancePlacement{Start: 2, Size: 2}) {
		t.Errorf("GPU instance %+v", info)
	}
	part, r := gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
	ok(t, r)
	ci, r := gi.CreateComputeInstance(&part)
	ok(t, r)
	if err := gi.Destroy(); err != nvml.ERROR_IN_USE {
		t.Errorf("destroy in use: %v", err)
	}

	m, r := d.GetMigDeviceHandleByIndex(0)
	ok(t, r)
	uuid, r := m.GetUUID()
	ok(t, r)
	checkMIGDevice(t, l, m, d, uuid)
	if _, r := d.GetMigDeviceHandleByIndex(1); r != nvml.ERROR_NOT_FOUND {
		t.Errorf("a second MIG device: %v", r)
	}
	wantList := fmt.Sprintf("  MIG 2g.20gb     Device  0: (UUID: %s)\n", uuid)
	if out := smi(t, root, "-L"); !strings.HasSuffix(out, wantList) {
		t.Errorf("nvidia-smi -L in another process:\n%s", out)
	}

	ok(t, ci.Destroy())
	if _, r := m.GetUUID(); r != nvml.ERROR_NOT_FOUND && r != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("UUID of a MIG device that is gone: %v", r)
	}
	// A GPU instance without compute instance, as a crash leaves it.
	if left, r := d.GetGpuInstances(&profile); r != nvml.SUCCESS || len(left) != 1 || left[0] != gi {
		t.Errorf("GPU instances %v, %v", left, r)
	}
	ok(t, gi.Destroy())
	if r := gi.Destroy(); r != nvml.ERROR_NOT_FOUND && r != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("destroyed twice: %v", r)
	}
}

func checkMIGDevice(t *testing.T, l nvml.Interface, m, parent nvml.Device, uuid string) {
	t.Helper()
	if is, r := m.IsMigDeviceHandle(); r != nvml.SUCCESS || !is {
		t.Errorf("is a MIG device: %v, %v", is, r)
	}
	if p, r := m.GetDeviceHandleFromMigDeviceHandle(); r != nvml.SUCCESS || p != parent {
		t.Errorf("parent %v, %v", p, r)
	}
	if same, r := l.DeviceGetHandleByUUID(uuid); r != nvml.SUCCESS || same != m {
		t.Errorf("by UUID: %v, %v", same, r)
	}
	gi, r := m.GetGpuInstanceId()
	ok(t, r)
	ci, r := m.GetComputeInstanceId()
	ok(t, r)
	attributes, r := m.GetAttributes()
	ok(t, r)
	want := nvml.DeviceAttributes{MultiprocessorCount: 32, SharedCopyEngineCount: 2, SharedDecoderCount: 2, SharedJpegCount: 2, GpuInstanceSliceCount: 2, ComputeInstanceSliceCount: 2, MemorySizeMB: 20096}
	if diff := cmp.Diff(want, attributes); diff != "" || gi != 4 || ci != 0 {
		t.Errorf("GPU instance %d, compute instance %d, attributes (-want +got):\n%s", gi, ci, diff)
	}
	mig, err := nvdevice.New(l).NewMigDevice(m)
	if err != nil {
		t.Fatal(err)
	}
	profile, err := mig.GetProfile()
	if err != nil || profile.String() != "2g.20gb" {
		t.Errorf("go-nvlib calls it %v, %v", profile, err)
	}
}

// TestProfileNamesByGoNVLib checks that NVIDIA's library derives the same name
// as the tables for every profile of every product.
func TestProfileNamesByGoNVLib(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "a30,a100-40gb,a100-80gb,h100-80gb,h100-nvl,h200,h200-nvl,"+
		"b200,gb200,gb200-189gb,rtx-pro-6000,rtx-pro-6000-max-q,rtx-pro-6000-workstation")
	l := open(t, root)
	devices, err := nvdevice.New(l).GetDevices()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		profiles, err := d.GetMigProfiles()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, p := range profiles {
			if i := p.GetInfo(); i.C == i.G {
				got = append(got, p.String())
			}
		}
		var want []string
		for enum := range nvml.GPU_INSTANCE_PROFILE_COUNT {
			if p, r := d.GetGpuInstanceProfileInfoV(enum).V2(); r == nvml.SUCCESS {
				want = append(want, strings.TrimRight(string(asBytes(p.Name[:])), "\x00"))
			}
		}
		for _, name := range want {
			if !slices.Contains(got, name) {
				name2, _ := d.GetName()
				t.Errorf("%s: %s is not among %v", name2, name, got)
			}
		}
	}
}

// TestInstancesByGoNVLib creates an instance of each profile by the ids that NVIDIA's library
// has for its name, as mig-parted and NVIDIA's DRA driver do. For a profile of one slice with
// double memory, too, it is the compute instance profile with enum 0, one of two.
func TestInstancesByGoNVLib(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	machine := filepath.Join(t.TempDir(), "machine.yaml")
	err := os.WriteFile(machine, []byte("gpus:\n- {model: a30, migEnabled: true}\n- {model: a100-80gb, migEnabled: true}\n"+
		"- {model: h100-80gb, migEnabled: true}\n- {model: b200, migEnabled: true}\n- {model: rtx-pro-6000, migEnabled: true}\n"), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	l := open(t, install(t, machine))
	devices, err := nvdevice.New(l).GetDevices()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		profiles, err := d.GetMigProfiles()
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{} // of several with a name, the first is taken
		for _, profile := range profiles {
			p := profile.GetInfo()
			if p.C != p.G || seen[profile.String()] {
				continue
			}
			seen[profile.String()] = true
			info, r := d.GetGpuInstanceProfileInfo(p.GIProfileID)
			ok(t, r)
			gi, r := d.CreateGpuInstance(&info)
			ok(t, r)
			compute, r := gi.GetComputeInstanceProfileInfo(p.CIProfileID, p.CIEngProfileID)
			if r != nvml.SUCCESS {
				t.Errorf("%s: compute instance profile %d: %v", profile, p.CIProfileID, r)
				ok(t, gi.Destroy())
				continue
			}
			ci, r := gi.CreateComputeInstance(&compute)
			ok(t, r)
			ok(t, ci.Destroy())
			ok(t, gi.Destroy())
		}
	}
}

func TestSMIForMIG(t *testing.T) {
	root := install(t, "1xh100-80gb,1xa100-40gb,1xl4")
	for _, step := range []struct {
		args string
		code int
		want string
	}{
		{"mig -lgi", 6, "No MIG-enabled devices found."},
		{"-mig 1 -i 0", 0, "Enabled MIG Mode for GPU "},
		{"-mig 1 -i 1", 0, "Warning: MIG mode is in pending enable state for GPU "},
		{"-mig 1 -i 2", 3, "Not Supported"},
		{"mig -lgi", 6, "No GPU instances found: Not Found"},
		{"mig -cgi 3g.40gb:4,19:0 -C", 0, "Successfully created GPU instance ID  2 on GPU  0 using profile MIG 3g.40gb (ID  9)"},
		{"mig -cgi 4g.40gb", 23, "Unable to create a GPU instance on GPU  0 using profile 5: Insufficient Resources"},
		{"mig -lgi", 0, "|   0  MIG 3g.40gb            9        2          4:4     |\n"},
		{"mig -lci", 0, "|   0       2       MIG 3g.40gb            2         0         0:3     |\n"},
		{"mig -lgip -i 0", 0, "|   0  MIG 1g.10gb         19      3/7        9.75       No     16     1     0  |\n"},
		{"mig -lgipp -i 1", 0, "Profile ID  9 Placements: {0,4}:4\n"},
		{"-L -i 0", 0, "  MIG 3g.40gb     Device  0: (UUID: MIG-"},
		{"-mig 0 -i 0", 19, "Unable to disable MIG Mode"},
		{"mig -dgi -gi 2", 19, "In use by another client"},
		{"mig -dci", 0, "Successfully destroyed compute instance ID  0 from GPU  0 GPU instance ID  7"},
		{"mig -cci 1c.3g.40gb,0 -gi 2", 0, "Successfully created compute instance ID  1 on GPU  0 GPU instance ID  2 using profile MIG 1c.3g.40gb (ID  0)"},
		{"mig -dci -gi 2", 0, "Successfully destroyed compute instance ID  1"},
		{"mig -dgi", 0, "Successfully destroyed GPU instance ID  7 from GPU  0"},
		{"mig -cgi frob", 2, `Unable to parse profile "frob"`},
		{"-mig 0 -i 0", 0, "Disabled MIG Mode for GPU "},
		{"--gpu-reset -i 1", 0, "was successfully reset."},
		{"mig -i 1 -cgi 1g.5gb -C", 0, "Successfully created compute instance ID  0 on GPU  1 GPU instance ID 13"},
		{"-r -i 1", 0, "All done."},
		{"mig -lgi -i 1", 6, "No GPU instances found: Not Found"},
	} {
		c := exec.Command(filepath.Join(root, "usr/bin/nvidia-smi"), strings.Fields(step.args)...)
		out, _ := c.Output()
		if code := c.ProcessState.ExitCode(); code != step.code || !strings.Contains(string(out), step.want) {
			t.Errorf("nvidia-smi %s: exit code %d (want %d), want %q in:\n%s", step.args, code, step.code, step.want, out)
		}
	}
}

// Processes use MIG devices: nvidia-smi lists them and can't destroy these
// devices, and the library names the processes.
func TestProcessesHoldMIGDevices(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, machineFile(t, "gpus: [{model: h100-80gb, migEnabled: true}]"))
	smi(t, root, "mig", "-cgi", "1g.10gb:4", "-C")
	nvmlsim(t, "process", "add", "--gpu", "0", "--gi", "11", "--ci", "0", "--pid", "4711", "--name", "train", "--memory", "512", "--root", root)
	d := device(t, open(t, root), 0)
	m, r := d.GetMigDeviceHandleByIndex(0)
	ok(t, r)
	for name, list := range map[string]func() ([]nvml.ProcessInfo, nvml.Return){"MIG device": m.GetComputeRunningProcesses, "GPU": d.GetComputeRunningProcesses} {
		got, r := list()
		ok(t, r)
		if diff := cmp.Diff([]nvml.ProcessInfo{{Pid: 4711, UsedGpuMemory: 512 << 20, GpuInstanceId: 11}}, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	table := smi(t, root)
	for _, want := range []string{
		"|  0   11   0   0  |           512MiB /  9984MiB    |  16      0 |  1   0    1    0    1  |\n",
		"|    0    11    0             4711      C   train                                   512MiB |\n",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("want %q in\n%s", want, table)
		}
	}
	destroy := exec.Command(filepath.Join(root, "usr/bin/nvidia-smi"), "mig", "-dci")
	if out, _ := destroy.Output(); destroy.ProcessState.ExitCode() != 19 {
		t.Errorf("destroyed in use: %s", out)
	}
	nvmlsim(t, "process", "remove", "--gpu", "0", "--pid", "4711", "--root", root)
	smi(t, root, "mig", "-dci")
}

// Exactly the faults for its name and GPU apply to a MIG call.
func TestMIGCallsMeetTheirFaults(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, machineFile(t, "gpus: [{model: h100-80gb, migEnabled: true, count: 2}]"))
	smi(t, root, "mig", "-cgi", "1g.10gb:4", "-C")
	l := open(t, root)
	d := device(t, l, 0)
	m, r := d.GetMigDeviceHandleByIndex(0)
	ok(t, r)
	uuid, r := m.GetUUID()
	ok(t, r)
	profile, r := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE)
	ok(t, r)
	gi, r := d.GetGpuInstanceById(11)
	ok(t, r)
	part, r := gi.GetComputeInstanceProfileInfo(0, 0)
	ok(t, r)
	ci, r := gi.GetComputeInstanceById(0)
	ok(t, r)
	place := nvml.GpuInstancePlacement{Start: 5, Size: 1}
	for call, do := range map[string]func() nvml.Return{
		"DeviceGetMigMode":                                func() nvml.Return { _, _, r := d.GetMigMode(); return r },
		"DeviceSetMigMode":                                func() nvml.Return { _, r := d.SetMigMode(0); return r },
		"DeviceGetMaxMigDeviceCount":                      func() nvml.Return { _, r := d.GetMaxMigDeviceCount(); return r },
		"DeviceGetMigDeviceHandleByIndex":                 func() nvml.Return { _, r := d.GetMigDeviceHandleByIndex(0); return r },
		"DeviceGetHandleByUUID":                           func() nvml.Return { _, r := l.DeviceGetHandleByUUID(uuid); return r },
		"DeviceGetUUID":                                   func() nvml.Return { _, r := m.GetUUID(); return r },
		"DeviceGetGpuInstanceId":                          func() nvml.Return { _, r := m.GetGpuInstanceId(); return r },
		"DeviceGetComputeInstanceId":                      func() nvml.Return { _, r := m.GetComputeInstanceId(); return r },
		"DeviceGetAttributes":                             func() nvml.Return { _, r := m.GetAttributes(); return r },
		"DeviceGetComputeRunningProcesses":                func() nvml.Return { _, r := m.GetComputeRunningProcesses(); return r },
		"DeviceGetGpuInstanceProfileInfo":                 func() nvml.Return { _, r := d.GetGpuInstanceProfileInfo(0); return r },
		"DeviceGetGpuInstanceProfileInfoV":                func() nvml.Return { _, r := d.GetGpuInstanceProfileInfoV(0).V2(); return r },
		"DeviceGetGpuInstanceProfileInfoByIdV":            func() nvml.Return { _, r := d.GetGpuInstanceProfileInfoByIdV(19).V2(); return r },
		"DeviceGetGpuInstancePossiblePlacements":          func() nvml.Return { _, r := d.GetGpuInstancePossiblePlacements(&profile); return r },
		"DeviceGetGpuInstanceRemainingCapacity":           func() nvml.Return { _, r := d.GetGpuInstanceRemainingCapacity(&profile); return r },
		"DeviceCreateGpuInstance":                         func() nvml.Return { _, r := d.CreateGpuInstance(&profile); return r },
		"DeviceCreateGpuInstanceWithPlacement":            func() nvml.Return { _, r := d.CreateGpuInstanceWithPlacement(&profile, &place); return r },
		"DeviceGetGpuInstances":                           func() nvml.Return { _, r := d.GetGpuInstances(&profile); return r },
		"DeviceGetGpuInstanceById":                        func() nvml.Return { _, r := d.GetGpuInstanceById(11); return r },
		"GpuInstanceGetInfo":                              func() nvml.Return { _, r := gi.GetInfo(); return r },
		"GpuInstanceDestroy":                              gi.Destroy,
		"GpuInstanceGetComputeInstanceProfileInfo":        func() nvml.Return { _, r := gi.GetComputeInstanceProfileInfo(0, 0); return r },
		"GpuInstanceGetComputeInstanceRemainingCapacity":  func() nvml.Return { _, r := gi.GetComputeInstanceRemainingCapacity(&part); return r },
		"GpuInstanceGetComputeInstancePossiblePlacements": func() nvml.Return { _, r := gi.GetComputeInstancePossiblePlacements(&part); return r },
		"GpuInstanceCreateComputeInstance":                func() nvml.Return { _, r := gi.CreateComputeInstance(&part); return r },
		"GpuInstanceCreateComputeInstanceWithPlacement": func() nvml.Return {
			_, r := gi.CreateComputeInstanceWithPlacement(&part, &nvml.ComputeInstancePlacement{Size: 1})
			return r
		},
		"GpuInstanceGetComputeInstances":    func() nvml.Return { _, r := gi.GetComputeInstances(&part); return r },
		"GpuInstanceGetComputeInstanceById": func() nvml.Return { _, r := gi.GetComputeInstanceById(0); return r },
		"ComputeInstanceGetInfo":            func() nvml.Return { _, r := ci.GetInfo(); return r },
		"ComputeInstanceDestroy":            ci.Destroy,
	} {
		nvmlsim(t, "fault", "*", "--gpu", "1", "--code", "999", "--root", root)
		nvmlsim(t, "fault", call, "--gpu", "0", "--code", "28", "--count", "1", "--root", root)
		if r := do(); r != nvml.ERROR_GPU_NOT_FOUND {
			t.Errorf("%s: %v", call, r)
		}
		nvmlsim(t, "fault", "--clear", "--root", root)
	}
	if _, r := m.GetUUID(); r != nvml.SUCCESS {
		t.Errorf("calls that failed did something all the same: %v", r)
	}
}

// Only root may change MIG, as with a real driver.
func TestMIGNeedsRoot(t *testing.T) {
	root := install(t, machineFile(t, "gpus: [{model: h100-80gb, migEnabled: true}]"))
	for dir := root; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm()&0o005 != 0o005 {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	c := exec.Command(filepath.Join(root, "usr/bin/nvidia-smi"), "mig", "-cgi", "1g.10gb")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, _ := c.Output(); c.ProcessState.ExitCode() != 4 || !strings.Contains(string(out), "Insufficient Permissions") {
		t.Errorf("nobody creates an instance: exit code %d, %s", c.ProcessState.ExitCode(), out)
	}
}

func TestLatencyCommand(t *testing.T) {
	root := install(t, "h100-80gb")
	for args, want := range map[string]string{
		"realistic": `"delayMS": 950`, "--create 200ms --destroy 2s": `"delayMS": 1900`,
	} {
		nvmlsim(t, append([]string{"latency", "--root", root}, strings.Fields(args)...)...)
		if state := nvmlsim(t, "state", "--root", root); !strings.Contains(state, want) {
			t.Errorf("latency %s: %s", args, state)
		}
	}
	nvmlsim(t, "latency", "none", "--root", root)
	if state := nvmlsim(t, "state", "--root", root); strings.Contains(state, "delayMS") {
		t.Errorf("latency none: %s", state)
	}
}

func machineFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "machine.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
