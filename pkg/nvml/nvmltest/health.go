package nvmltest

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// Vitals checks the port's vitals of the first GPU of a simulated machine when
// it is broken in each way. The GPU is healthy afterwards.
func Vitals(t *testing.T, port Port, machine *nvmlsim.Machine) {
	gpus, err := port.GPUs()
	must(t, err)
	g := gpus[0]
	healthy, err := port.Vitals(g.UUID)
	must(t, err)
	for name, c := range map[string]struct {
		broken func(*nvmlsim.GPUState)
		want   func(*gpu.Vitals)
	}{
		"reset":           {func(s *nvmlsim.GPUState) { s.RecoveryAction = 1 }, func(v *gpu.Vitals) { v.Recovery = gpu.RecoveryReset }},
		"reboot":          {func(s *nvmlsim.GPUState) { s.RecoveryAction = 2 }, func(v *gpu.Vitals) { v.Recovery = gpu.RecoveryReboot }},
		"drain P2P":       {func(s *nvmlsim.GPUState) { s.RecoveryAction = 3 }, func(v *gpu.Vitals) { v.Recovery = gpu.RecoveryDrainP2P }},
		"drain and reset": {func(s *nvmlsim.GPUState) { s.RecoveryAction = 4 }, func(v *gpu.Vitals) { v.Recovery = gpu.RecoveryDrainAndReset }},
		"IMEX":            {func(s *nvmlsim.GPUState) { s.RecoveryAction = 5 }, func(v *gpu.Vitals) { v.Recovery = gpu.RecoveryIMEX }},
		"bus reset":       {func(s *nvmlsim.GPUState) { s.RecoveryAction = 6 }, func(v *gpu.Vitals) { v.Recovery = gpu.RecoveryBusReset }},
		"system reboot":   {func(s *nvmlsim.GPUState) { s.RecoveryAction = 7 }, func(v *gpu.Vitals) { v.Recovery = gpu.RecoverySystemReboot }},
		"another action":  {func(s *nvmlsim.GPUState) { s.RecoveryAction = 8 }, func(v *gpu.Vitals) { v.Recovery = gpu.RecoveryOther }},
		"calls refused": {func(s *nvmlsim.GPUState) { s.ResetRequired = true }, func(v *gpu.Vitals) {
			*v = gpu.Vitals{Recovery: gpu.RecoveryReset}
		}},
		"remap pending": {func(s *nvmlsim.GPUState) { s.RemappedRows.Pending = true }, func(v *gpu.Vitals) {
			if v.RowRemap != nil {
				v.RowRemap = &gpu.RowRemap{Pending: true}
			}
		}},
		"remap failed": {func(s *nvmlsim.GPUState) { s.RemappedRows.Failed = true }, func(v *gpu.Vitals) {
			if v.RowRemap != nil {
				v.RowRemap = &gpu.RowRemap{Failed: true}
			}
		}},
		"SRAM errors": {func(s *nvmlsim.GPUState) { s.SRAMThresholdExceeded = true }, func(v *gpu.Vitals) {
			if v.SRAMThresholdExceeded != nil {
				v.SRAMThresholdExceeded = new(true)
			}
		}},
		"NVLinks down": {func(s *nvmlsim.GPUState) { s.NVLinksDown = []int{0, 3} }, func(v *gpu.Vitals) {
			if g.NVLink != nil {
				v.NVLinksDown = []int{0, 3}
				v.NVLinksUp = slices.DeleteFunc(slices.Clone(v.NVLinksUp), func(l int) bool { return l == 0 || l == 3 })
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			want := healthy
			c.want(&want)
			var before nvmlsim.GPUState
			must(t, machine.ChangeGPU(0, func(s *nvmlsim.GPUState) error { before = *s; c.broken(s); return nil }))
			defer func() {
				must(t, machine.ChangeGPU(0, func(s *nvmlsim.GPUState) error { *s = before; return nil }))
			}()
			got, err := port.Vitals(g.UUID)
			must(t, err)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Events checks the kinds of events of the first GPU of a simulated machine, in
// order. Before them the GPU reports XID 0 until the port watches it.
func Events(t *testing.T, port Port, machine *nvmlsim.Machine) {
	const none = nvmlsim.NoInstance
	gpus, err := port.GPUs()
	must(t, err)
	uuid := gpus[0].UUID
	push := func(e nvmlsim.Event) {
		t.Helper()
		must(t, machine.PushEvent(e))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got := WatchEvents(ctx, port, func() {
		push(nvmlsim.Event{Type: nvmlsim.XIDCriticalError, GPUInstance: none, ComputeInstance: none})
	})
	push(nvmlsim.Event{Type: nvmlsim.XIDCriticalError, Data: 79, GPUInstance: none, ComputeInstance: none})
	push(nvmlsim.Event{Type: nvmlsim.XIDCriticalError, Data: 31, GPUInstance: 9, ComputeInstance: none})
	push(nvmlsim.Event{Type: nvmlsim.XIDCriticalError, Data: 13, GPUInstance: 9})
	push(nvmlsim.Event{Type: nvmlsim.GPUUnavailable, GPUInstance: none, ComputeInstance: none})
	push(nvmlsim.Event{Type: nvmlsim.GPURecoveryAction, GPUInstance: none, ComputeInstance: none})
	push(nvmlsim.Event{Type: nvmlsim.DoubleBitECCError, GPUInstance: none, ComputeInstance: none})
	push(nvmlsim.Event{Type: nvmlsim.MIGConfigChange, GPUInstance: none, ComputeInstance: none})
	xid := func(code uint64, gi, ci *int) nvml.Event {
		return nvml.Event{GPU: uuid, Kind: nvml.EventXID, XID: &gpu.XID{GPU: uuid, Code: code, GPUInstance: gi, ComputeInstance: ci}}
	}
	for _, want := range []nvml.Event{
		xid(79, nil, nil),
		xid(31, new(9), nil),
		xid(13, new(9), new(0)),
		{GPU: uuid, Kind: nvml.EventUnavailable},
		{GPU: uuid, Kind: nvml.EventRecovery},
		{GPU: uuid, Kind: nvml.EventMemory},
		{GPU: uuid, Kind: nvml.EventMIG},
	} {
		e, ok := <-got
		for ; ok && e.XID != nil && e.XID.Code == 0; e, ok = <-got { // more than one was pushed
		}
		if !ok {
			t.Fatal("no more events")
		}
		if e.XID != nil && e.XID.At.IsZero() {
			t.Errorf("event %+v has no time", e)
		}
		if diff := cmp.Diff(want, e, cmpopts.IgnoreFields(gpu.XID{}, "At")); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// WatchEvents returns the port's events until ctx ends. It calls raise,
// which raises an event of a GPU, until the first event has come: then the port watches
// that GPU. More events of raise may follow.
func WatchEvents(ctx context.Context, port healthPort, raise func()) <-chan nvml.Event {
	events := make(chan nvml.Event)
	go func() {
		defer close(events)
		for {
			e, err := port.WaitEvent(ctx)
			if err != nil {
				return
			}
			select {
			case events <- e:
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		raise()
		select {
		case <-events:
			return events
		case <-time.After(100 * time.Millisecond): // it may not be registered yet
		}
	}
}
