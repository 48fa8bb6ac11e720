package nvmlsim_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestWhatHeals checks which defects are left after each way to recover a GPU.
func TestWhatHeals(t *testing.T) {
	reset := func(m *nvmlsim.Machine) error { return m.GPUs()[0].ResetIdle() }
	reload := func(m *nvmlsim.Machine) error {
		check(t, m.LoadDriver(false))
		return m.LoadDriver(true)
	}
	reboot := (*nvmlsim.Machine).Reboot
	heal := func(m *nvmlsim.Machine) error { return m.Heal(0) }
	ways := []struct {
		name string
		do   func(*nvmlsim.Machine) error
	}{{"reset", reset}, {"reload", reload}, {"reboot", reboot}, {"heal", heal}}
	type health = nvmlsim.Health
	const lost = nvmlsim.GPUIsLost
	rows := func(pending, failed bool) health {
		return health{RemappedRows: nvmlsim.RemappedRows{Uncorrectable: 1, Pending: pending, Failed: failed}}
	}
	for name, c := range map[string]struct {
		broken  health
		refused nvmlsim.Return    // the answer to a reset
		left    map[string]health // none if missing
	}{
		"calls refused":    {broken: health{ResetRequired: true}},
		"reset wanted":     {broken: health{RecoveryAction: 1}},
		"drain and reset":  {broken: health{RecoveryAction: 4}},
		"memory errors":    {broken: health{UncorrectableErrors: 2}},
		"NVLinks":          {broken: health{NVLinksDown: []int{1}}},
		"reboot wanted":    {broken: health{RecoveryAction: 2}, left: map[string]health{"reset": {RecoveryAction: 2}, "reload": {RecoveryAction: 2}}},
		"bus reset wanted": {broken: health{RecoveryAction: 6}, left: map[string]health{"reset": {RecoveryAction: 6}, "reload": {RecoveryAction: 6}}},
		"rows pending":     {broken: rows(true, false), left: map[string]health{"reset": rows(false, false), "reload": rows(false, false), "reboot": rows(false, false)}},
		"rows failed":      {broken: rows(false, true), left: map[string]health{"reset": rows(false, true), "reload": rows(false, true), "reboot": rows(false, true)}},
		"SRAM": {broken: health{SRAMThresholdExceeded: true}, left: map[string]health{
			"reset": {SRAMThresholdExceeded: true}, "reload": {SRAMThresholdExceeded: true}, "reboot": {SRAMThresholdExceeded: true},
		}},
		"Fabric Manager": {broken: health{Fabric: nvmlsim.FabricNotStarted}, left: map[string]health{
			"reset": {Fabric: nvmlsim.FabricNotStarted}, "reload": {Fabric: nvmlsim.FabricNotStarted},
		}},
		"mode that pends": {broken: health{MIGModePends: true}},
		"missing files": {broken: health{NodeMissing: true, CapabilitiesMissing: true}, left: map[string]health{
			"reset":  {NodeMissing: true, CapabilitiesMissing: true},
			"reload": {NodeMissing: true, CapabilitiesMissing: true},
			"reboot": {NodeMissing: true, CapabilitiesMissing: true},
		}},
		"lost": {broken: health{Lost: true}, refused: lost, left: map[string]health{"reset": {Lost: true}, "reload": {Lost: true}}},
	} {
		for _, way := range ways {
			t.Run(name+"/"+way.name, func(t *testing.T) {
				m := create(t, "h100-80gb")
				check(t, m.ChangeGPU(0, func(g *nvmlsim.GPUState) error { g.Health = c.broken; return nil }))
				err := way.do(m)
				if way.name == "reset" && nvmlsim.Code(err) != c.refused {
					t.Errorf("reset: %v, want %v", err, c.refused)
				} else if way.name != "reset" {
					check(t, err)
				}
				if diff := cmp.Diff(c.left[way.name], m.State().GPUs[0].Health); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		}
	}
}

// TestResetNeedsAnIdleGPU checks that neither processes nor sessions of others
// have their GPU reset.
func TestResetNeedsAnIdleGPU(t *testing.T) {
	m := create(t, "2xh100-80gb")
	check(t, m.Init())
	other, err := nvmlsim.Open(m.StatePath())
	check(t, err)
	g := m.GPUs()[0]
	check(t, g.ResetIdle())
	check(t, other.Init())
	check(t, other.Init())
	check(t, other.Shutdown())
	if err := g.ResetIdle(); err != nvmlsim.InUse {
		t.Errorf("reset with another session: %v, want InUse", err)
	}
	check(t, other.Shutdown())
	if err := other.Shutdown(); err != nvmlsim.Uninitialized {
		t.Errorf("shut down too often: %v", err)
	}
	check(t, g.ResetIdle())
	check(t, other.Init())
	check(t, other.Close())
	check(t, g.ResetIdle())
	check(t, m.AddProcess(0, nvmlsim.Process{PID: 7, GPUInstance: nvmlsim.NoInstance, ComputeInstance: nvmlsim.NoInstance}))
	if err := g.ResetIdle(); err != nvmlsim.InUse {
		t.Errorf("reset with a process: %v, want InUse", err)
	}
	check(t, m.GPUs()[1].ResetIdle())
}

// TestWhichGPUsCanBeReset checks where one GPU can be reset alone.
func TestWhichGPUsCanBeReset(t *testing.T) {
	for machine, want := range map[string]nvmlsim.Return{
		"2xh100-80gb":      nvmlsim.Success,
		"v100-sxm2-16gb":   nvmlsim.Success,
		"2xv100-pcie-16gb": nvmlsim.Success,
		"4xv100-sxm2-16gb": nvmlsim.NotSupported,
		"virtualization: passthrough\ngpus: [{model: h200}]": nvmlsim.NotSupported,
	} {
		if err := create(t, machine).GPUs()[0].ResetIdle(); nvmlsim.Code(err) != want {
			t.Errorf("%s: %v, want %v", machine, err, want)
		}
	}
}

// TestHealthEvents checks the events and the kernel log of a GPU that breaks, in
// the forms of a real driver (the lines of 13 and 31 as on an H100, 79 and 154 as
// published by users).
func TestHealthEvents(t *testing.T) {
	m := create(t, "gpus: [{model: h100-80gb, migEnabled: true, pciBusIDs: ['0000:07:00.0']}]")
	g := m.GPUs()[0]
	gi, err := g.CreateInstance(profileID(t, g, "3g.40gb"), new(uint32(0)))
	check(t, err)
	_, err = gi.CreateCompute(2, nil)
	check(t, err)
	set, err := m.NewEventSet()
	check(t, err)
	defer set.Close()
	check(t, set.Register(g, 0xFF9F))
	check(t, m.RaiseXID(0, nvmlsim.XID{Code: 13, PID: 4711, Name: "train\n"}))
	check(t, m.RaiseXID(0, nvmlsim.XID{Code: 31, PID: 4711, Name: "train", GPUInstance: new(uint32(1)), ComputeInstance: new(uint32(0))}))
	check(t, m.RaiseXID(0, nvmlsim.XID{Code: 48, GPUInstance: new(uint32(1))}))
	check(t, m.SetRecoveryAction(0, 1))
	check(t, m.SetRecoveryAction(0, 1)) // nothing new
	check(t, m.SetRemappedRows(0, true, false))
	check(t, m.SetUncorrectableErrors(0, 2))
	check(t, m.Lose(0))
	check(t, m.Lose(0))
	check(t, m.Heal(0))
	const none = nvmlsim.NoInstance
	for _, want := range []nvmlsim.Event{
		{Type: nvmlsim.XIDCriticalError, Data: 13, GPUInstance: none, ComputeInstance: none},
		{Type: nvmlsim.XIDCriticalError, Data: 31, GPUInstance: 1, ComputeInstance: 0},
		{Type: nvmlsim.XIDCriticalError, Data: 48, GPUInstance: 1, ComputeInstance: none},
		{Type: nvmlsim.GPURecoveryAction, GPUInstance: none, ComputeInstance: none},
		{Type: nvmlsim.XIDCriticalError, Data: 154, GPUInstance: none, ComputeInstance: none},
		{Type: nvmlsim.DRAMRetirement, GPUInstance: none, ComputeInstance: none},
		{Type: nvmlsim.DoubleBitECCError, GPUInstance: none, ComputeInstance: none},
		{Type: nvmlsim.GPUUnavailable, GPUInstance: none, ComputeInstance: none},
		{Type: nvmlsim.XIDCriticalError, Data: 79, GPUInstance: none, ComputeInstance: none},
		{Type: nvmlsim.GPURecoveryAction, GPUInstance: none, ComputeInstance: none},
		{Type: nvmlsim.XIDCriticalError, Data: 154, GPUInstance: none, ComputeInstance: none},
	} {
		got, err := set.Wait(context.Background(), time.Minute)
		check(t, err)
		got.Seq = 0
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	log, err := os.ReadFile(m.KernelLog())
	check(t, err)
	lines := strings.Split(strings.TrimSuffix(string(log), "\n"), "\n")
	wants := []string{
		"NVRM: Xid (PCI:0000:07:00): 13, Graphics SM Warp Exception",
		`NVRM: Xid (PCI:0000:07:00): 13, pid=4711, name=train\x0a, `,
		"NVRM: Xid (PCI:0000:07:00 GPU-I:01 GPU-CI:00): 31, pid=4711, name=train, channel 0x00000003, intr 00000000. MMU Fault: ",
		"NVRM: Xid (PCI:0000:07:00 GPU-I:01): 48, ",
		"NVRM: Xid (PCI:0000:07:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
		"NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off the bus.",
		"NVRM: Xid (PCI:0000:07:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
	}
	if len(lines) != len(wants) {
		t.Fatalf("%d lines, want %d:\n%s", len(lines), len(wants), log)
	}
	for i, line := range lines {
		head, text, _ := strings.Cut(line, ";")
		if fields := strings.Split(head, ","); len(fields) != 4 || fields[0] != "6" || fields[1] != string(rune('0'+i)) || fields[3] != "-" {
			t.Errorf("record %d begins with %q", i, head)
		}
		if !strings.HasPrefix(text, wants[i]) {
			t.Errorf("record %d: %q, want %q", i, text, wants[i])
		}
	}
	if err := m.RaiseXID(0, nvmlsim.XID{Code: 13, GPUInstance: new(uint32(5))}); nvmlsim.Code(err) != nvmlsim.NotFound {
		t.Errorf("an instance that isn't there: %v", err)
	}
}
