package nvmlsim_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestWhatHardwareForgets checks MIG mode and instances of a GPU with MIG on
// and an instance, after reboots, resets and reloads.
func TestWhatHardwareForgets(t *testing.T) {
	reboot := (*nvmlsim.Machine).Reboot
	reload := func(m *nvmlsim.Machine) error {
		if err := m.LoadDriver(false); err != nil {
			return err
		}
		return m.LoadDriver(true)
	}
	reset := func(m *nvmlsim.Machine) error { return m.GPUs()[0].Reset() }
	for name, c := range map[string]struct {
		machine string
		happens func(*nvmlsim.Machine) error
		mode    bool
	}{
		"Hopper rebooted":                       {"h100-80gb", reboot, false},
		"Blackwell rebooted":                    {"rtx-pro-6000", reboot, false},
		"Ampere rebooted":                       {"a100-40gb", reboot, true},
		"Hopper rebooted that boots with it on": {"gpus: [{model: h100-80gb, migEnabled: true}]", reboot, true},
		"Hopper, driver reloaded":               {"h100-80gb", reload, false},
		"Ampere, driver reloaded":               {"a100-40gb", reload, true},
		"Hopper reset":                          {"h100-80gb", reset, true},
		"Ampere reset":                          {"a100-40gb", reset, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := create(t, c.machine)
			g := m.GPUs()[0]
			_, err := g.SetMIGMode(true)
			check(t, err)
			check(t, g.Reset())
			_, err = g.CreateInstance(g.Model().MIG.Profiles[0].ID, nil)
			check(t, err)
			check(t, c.happens(m))
			current, pending, err := g.MIGMode()
			check(t, err)
			if current != c.mode || pending != c.mode {
				t.Errorf("mode %v, pending %v, want %v", current, pending, c.mode)
			}
			if left := m.State().GPUs[0].Instances; len(left) > 0 {
				t.Errorf("instances are left: %+v", left)
			}
		})
	}
}

// The GPU reports every change of its MIG configuration as an event.
func TestMIGEvents(t *testing.T) {
	m := create(t, "2xh100-80gb")
	set, err := m.NewEventSet()
	check(t, err)
	defer set.Close()
	g := m.GPUs()[1]
	check(t, set.Register(g, nvmlsim.MIGConfigChange))
	_, err = g.SetMIGMode(true)
	check(t, err)
	gi, err := g.CreateInstance(profileID(t, g, "1g.10gb"), new(uint32(4)))
	check(t, err)
	ci, err := gi.CreateCompute(0, nil)
	check(t, err)
	check(t, ci.Destroy())
	check(t, gi.Destroy())
	const none = nvmlsim.NoInstance
	for _, want := range [][2]uint32{{none, none}, {11, none}, {11, 0}, {11, 0}, {11, none}} {
		e, err := set.Wait(context.Background(), time.Minute)
		check(t, err)
		if e.GPU != 1 || e.Type != nvmlsim.MIGConfigChange || [2]uint32{e.GPUInstance, e.ComputeInstance} != want {
			t.Errorf("event %+v, want of %v", e, want)
		}
	}
	if e, err := set.Wait(context.Background(), 0); err != nvmlsim.Timeout {
		t.Errorf("one event too many: %+v, %v", e, err)
	}
}

func TestProcesses(t *testing.T) {
	m := create(t, "gpus: [{model: h100-80gb, migEnabled: true}]")
	g := m.GPUs()[0]
	gi, err := g.CreateInstance(profileID(t, g, "1g.10gb"), nil)
	check(t, err)
	ci, err := gi.CreateCompute(0, nil)
	check(t, err)
	holder := nvmlsim.Process{PID: 7, Name: "train", UsedMemory: 1 << 20, GPUInstance: 13, ComputeInstance: 0}
	for name, p := range map[string]nvmlsim.Process{
		"no GPU instance": {PID: 1, GPUInstance: 3}, "no compute instance": {PID: 1, GPUInstance: 13, ComputeInstance: 1}, "no PID": {GPUInstance: 13},
	} {
		if err := m.AddProcess(0, p); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	check(t, m.AddProcess(0, holder))
	if err := m.AddProcess(0, holder); err == nil {
		t.Error("the same process twice: accepted")
	}
	if diff := cmp.Diff([]nvmlsim.Process{holder}, get(t, ci.Processes)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := ci.Destroy(); err != nvmlsim.InUse {
		t.Errorf("destroy with a process: %v", err)
	}
	check(t, m.RemoveProcess(0, 7))
	if err := m.RemoveProcess(0, 7); nvmlsim.Code(err) != nvmlsim.NotFound {
		t.Errorf("removed twice: %v", err)
	}
	check(t, ci.Destroy())
}

// Setting and removing delays doesn't affect other faults.
func TestLatency(t *testing.T) {
	m := create(t, "h100-80gb")
	fault := nvmlsim.Fault{Call: "GpuInstanceDestroy", GPU: 0, Code: nvmlsim.InUse, Count: 1}
	check(t, m.Fault(fault))
	sum := func(call ...string) (d time.Duration) {
		for _, f := range m.State().Faults {
			for _, c := range call {
				if f.Call == c && f.Code == nvmlsim.Success {
					d += time.Duration(f.DelayMS) * time.Millisecond
				}
			}
		}
		return d
	}
	for _, want := range []nvmlsim.Latency{nvmlsim.RealisticLatency(), {Create: 200 * time.Millisecond, Destroy: time.Second}, {}} {
		check(t, m.SetLatency(want))
		got := nvmlsim.Latency{
			Init:    sum("Init"),
			Create:  sum("DeviceCreateGpuInstanceWithPlacement", "GpuInstanceCreateComputeInstance"),
			Destroy: sum("GpuInstanceDestroy", "ComputeInstanceDestroy"),
			Mode:    sum("DeviceSetMigMode"),
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	if diff := cmp.Diff([]nvmlsim.Fault{fault}, m.State().Faults); diff != "" {
		t.Errorf("what was set to fail (-want +got):\n%s", diff)
	}
	if err := m.SetLatency(nvmlsim.Latency{Create: -1}); nvmlsim.Code(err) != nvmlsim.InvalidArgument {
		t.Errorf("negative: %v", err)
	}
}

// TestMinorsMove checks that a GPU gets another device node with each change of its
// MIG mode, which may be the one that another GPU had.
func TestMinorsMove(t *testing.T) {
	m := create(t, "minorsMove: true\ngpus: [{model: h100-80gb, count: 2}]")
	if diff := cmp.Diff([]int{0, 1, 2}, m.Description().Minors()); diff != "" {
		t.Errorf("numbers that may be used (-want +got):\n%s", diff)
	}
	minors := func() (all []int) {
		for _, g := range m.GPUs() {
			all = append(all, get(t, g.MinorNumber))
		}
		return all
	}
	for _, step := range []struct {
		what string
		do   func() error
		want []int
	}{
		{"booted", func() error { return nil }, []int{0, 1}},
		{"mode of the first on", func() error { _, err := m.GPUs()[0].SetMIGMode(true); return err }, []int{2, 1}},
		{"again", func() error { _, err := m.GPUs()[0].SetMIGMode(true); return err }, []int{2, 1}},
		{"mode of the second on", func() error { _, err := m.GPUs()[1].SetMIGMode(true); return err }, []int{2, 0}},
		{"mode of the first off", func() error { _, err := m.GPUs()[0].SetMIGMode(false); return err }, []int{1, 0}},
		{"reset", func() error { return m.GPUs()[0].Reset() }, []int{1, 0}},
		{"rebooted", m.Reboot, []int{0, 1}},
	} {
		check(t, step.do())
		if diff := cmp.Diff(step.want, minors()); diff != "" {
			t.Errorf("%s: minor numbers (-want +got):\n%s", step.what, diff)
		}
	}
}
