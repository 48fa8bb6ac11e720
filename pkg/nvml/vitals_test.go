package nvml_test

import (
	"context"
	"errors"
	"testing"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestVitalsThatAreUnknown checks that what a driver can't say is unknown, and
// that what it fails to say is an error.
func TestVitalsThatAreUnknown(t *testing.T) {
	all := gpu.Vitals{Recovery: gpu.RecoveryNone, RowRemap: &gpu.RowRemap{}, SRAMThresholdExceeded: new(false), NVLinksUp: []int{0, 1, 2, 3}}
	without := func(change func(*gpu.Vitals)) gpu.Vitals {
		v := all
		change(&v)
		return v
	}
	for name, c := range map[string]struct {
		call string
		code nvmlsim.Return
		want gpu.Vitals
		err  error
	}{
		"all":                       {"", nvmlsim.Success, all, nil},
		"no fields":                 {"DeviceGetFieldValues", nvmlsim.NotSupported, without(func(v *gpu.Vitals) { v.Recovery = gpu.RecoveryUnsupported }), nil},
		"an unknown field":          {"DeviceGetFieldValues", nvmlsim.InvalidArgument, without(func(v *gpu.Vitals) { v.Recovery = gpu.RecoveryUnsupported }), nil},
		"no row remapper":           {"DeviceGetRemappedRows", nvmlsim.NotSupported, without(func(v *gpu.Vitals) { v.RowRemap = nil }), nil},
		"no SRAM threshold":         {"DeviceGetSramEccErrorStatus", nvmlsim.NotSupported, without(func(v *gpu.Vitals) { v.SRAMThresholdExceeded = nil }), nil},
		"SRAM errors that fail":     {"DeviceGetSramEccErrorStatus", nvmlsim.Unknown, without(func(v *gpu.Vitals) { v.SRAMThresholdExceeded = nil }), nil},
		"no state of links":         {"DeviceGetNvLinkState", nvmlsim.NotSupported, without(func(v *gpu.Vitals) { v.NVLinksUp = nil }), nil},
		"a field that fails":        {"DeviceGetFieldValues", nvmlsim.Unknown, gpu.Vitals{}, gonvml.ERROR_UNKNOWN},
		"a row remapper that fails": {"DeviceGetRemappedRows", nvmlsim.Unknown, without(func(v *gpu.Vitals) { v.RowRemap = nil }), nil},
		"lost in between":           {"DeviceGetSramEccErrorStatus", nvmlsim.GPUIsLost, gpu.Vitals{}, nvml.ErrLost},
		"a reset needed since":      {"DeviceGetSramEccErrorStatus", nvmlsim.ResetRequired, gpu.Vitals{Recovery: gpu.RecoveryReset}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := nvmltest.NewSimulated(t, "gpus: [{model: a30, count: 2, nvlink: pairs}]")
			uuid := list(t, s)[0].UUID
			if c.call != "" {
				if err := s.Machine.Fault(nvmlsim.Fault{Call: c.call, GPU: 0, Code: c.code}); err != nil {
					t.Fatal(err)
				}
			}
			got, err := s.Vitals(uuid)
			if !errors.Is(err, c.err) {
				t.Errorf("%v, want %v", err, c.err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestVitalsInMIGMode checks that links which are off in MIG mode aren't down, and
// that the row remapper is unknown while there are instances.
func TestVitalsInMIGMode(t *testing.T) {
	s := nvmltest.NewSimulated(t, "2xh100-80gb")
	uuid := list(t, s)[0].UUID // reads the links
	if err := s.SetMIGMode(uuid, true); err != nil {
		t.Fatal(err)
	}
	if err := s.Machine.ChangeGPU(0, func(g *nvmlsim.GPUState) error { g.NVLinksDown = []int{0, 1}; return nil }); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateInstance(first(t, s)); err != nil {
		t.Fatal(err)
	}
	want := gpu.Vitals{Recovery: gpu.RecoveryNone, SRAMThresholdExceeded: new(false)}
	got, err := s.Vitals(uuid)
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// TestLinksToAGPUInMIGMode checks that links which lead directly to a GPU in MIG mode
// aren't down, whoever has switched the mode, and that others are.
func TestLinksToAGPUInMIGMode(t *testing.T) {
	s := nvmltest.NewSimulated(t, "{gpus: [{model: h100-nvl, nvlink: mesh, count: 3}]}")
	gpus := list(t, s) // reads the links
	other := nvmltest.OpenSimulated(s.Machine)
	if err := s.Machine.ChangeGPU(1, func(g *nvmlsim.GPUState) error { g.NVLinksDown = []int{0}; return nil }); err != nil {
		t.Fatal(err)
	}
	expect := func(what string, up []int, down ...int) {
		t.Helper()
		v, err := s.Vitals(gpus[1].UUID)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(map[string][]int{"up": up, "down": down}, map[string][]int{"up": v.NVLinksUp, "down": v.NVLinksDown}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	// In this mesh, even links of GPU 1 lead to GPU 2, and odd ones to GPU 0.
	all, toTheOther := []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, []int{2, 4, 6, 8, 10}
	expect("no GPU in MIG mode", all, 0)
	for name, switches := range map[string]func(on bool) error{
		"by this session": func(on bool) error { return s.SetMIGMode(gpus[0].UUID, on) },
		"by another":      func(on bool) error { defer list(t, s); return other.SetMIGMode(gpus[0].UUID, on) },
	} {
		if err := switches(true); err != nil {
			t.Fatal(err)
		}
		expect("MIG mode switched on "+name, toTheOther, 0)
		if err := switches(false); err != nil {
			t.Fatal(err)
		}
		expect("MIG mode switched off "+name, all, 0)
	}
}

// TestVitalsOfAWedgedGPU checks that a GPU which doesn't answer has no vitals,
// while others have theirs.
func TestVitalsOfAWedgedGPU(t *testing.T) {
	s := nvmltest.NewSimulated(t, "2xh100-80gb")
	gpus := list(t, s)
	s.SetLimits(lateAfter)
	if err := s.Machine.ChangeGPU(0, func(g *nvmlsim.GPUState) error { g.Wedged = true; return nil }); err != nil {
		t.Fatal(err)
	}
	if v, err := s.Vitals(gpus[0].UUID); !errors.Is(err, nvml.ErrNotResponding) || v.Recovery != gpu.RecoveryUnsupported {
		t.Errorf("wedged: %+v, %v, want %v", v, err, nvml.ErrNotResponding)
	}
	if _, err := s.Vitals(gpus[1].UUID); err != nil {
		t.Error(err)
	}
	if err := s.Machine.Heal(0); err != nil {
		t.Fatal(err)
	}
	for s.CallsUnderway() > 0 {
		<-time.After(time.Millisecond)
	}
	if _, err := s.Vitals(gpus[0].UUID); err != nil {
		t.Errorf("healed: %v", err)
	}
}

// TestFactsAndVitalsAgree checks that both say the same of a GPU that refuses calls.
func TestFactsAndVitalsAgree(t *testing.T) {
	for name, c := range map[string]struct {
		breaks func(*nvmlsim.Machine) error
		want   gpu.ConditionType
	}{
		"lost": {func(m *nvmlsim.Machine) error { return m.Lose(0) }, gpu.Lost},
		"needs a reset": {func(m *nvmlsim.Machine) error {
			return m.ChangeGPU(0, func(g *nvmlsim.GPUState) error { g.ResetRequired = true; return nil })
		}, gpu.ResetRequired},
	} {
		t.Run(name, func(t *testing.T) {
			s := nvmltest.NewSimulated(t, "2xh100-80gb")
			uuid := list(t, s)[0].UUID
			if err := c.breaks(s.Machine); err != nil {
				t.Fatal(err)
			}
			if all := list(t, s)[0].Conditions; len(all) != 1 || all[0].Type != c.want {
				t.Errorf("the facts have the conditions %v, want %s", all, c.want)
			}
			v, err := s.Vitals(uuid)
			is := gpu.ResetRequired // as the driver's recovery action
			if err != nil {
				is = nvml.ConditionOf(err).Type
			}
			if is != c.want || err == nil && v.Recovery != gpu.RecoveryReset {
				t.Errorf("the vitals say %+v, %v, want %s", v, err, c.want)
			}
		})
	}
}

// TestEventsBesideALostGPU checks that events of the other GPUs arrive while one is lost,
// for which NVML refuses the whole set, that all GPUs are read again then, and that the
// events of the lost GPU arrive again when it answers.
func TestEventsBesideALostGPU(t *testing.T) {
	s := nvmltest.NewSimulated(t, "2xh100-80gb")
	gpus := list(t, s)
	raise := func(gpu int, code uint64) {
		t.Helper()
		if err := s.Machine.RaiseXID(gpu, nvmlsim.XID{Code: code}); err != nil {
			t.Fatal(err)
		}
	}
	got := nvmltest.WatchEvents(t.Context(), s, func() { raise(0, 13) })
	await := func(what string, is func(nvml.Event) bool) {
		t.Helper()
		for e := range got {
			if is(e) {
				return
			}
		}
		t.Fatalf("no more events, want %s", what)
	}
	if err := s.Machine.Lose(0); err != nil {
		t.Fatal(err)
	}
	await("a reading of all GPUs", func(e nvml.Event) bool { return e == nvml.Event{Kind: nvml.EventUnavailable} })
	again := func(on int, code uint64) (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			for ctx.Err() == nil { // it may not be watched yet
				raise(on, code)
				time.Sleep(50 * time.Millisecond)
			}
		}()
		return cancel
	}
	stop := again(1, 31)
	await("XID 31 of the other GPU", func(e nvml.Event) bool { return e.GPU == gpus[1].UUID && e.XID != nil && e.XID.Code == 31 })
	stop()
	if err := s.Machine.Heal(0); err != nil {
		t.Fatal(err)
	}
	defer again(0, 43)()
	await("XID 43 of the GPU that was lost", func(e nvml.Event) bool { return e.GPU == gpus[0].UUID && e.XID != nil && e.XID.Code == 43 })
}

// TestEventOfALostGPU checks that the events with which a GPU falls off the bus
// name the GPU, although it doesn't answer any more.
func TestEventOfALostGPU(t *testing.T) {
	s := nvmltest.NewSimulated(t, "2xh100-80gb")
	uuid := list(t, s)[1].UUID
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got := nvmltest.WatchEvents(ctx, s, func() {
		if err := s.Machine.RaiseXID(1, nvmlsim.XID{Code: 13}); err != nil {
			t.Fatal(err)
		}
	})
	if err := s.Machine.Lose(1); err != nil {
		t.Fatal(err)
	}
	for e := range got {
		if e.GPU != uuid {
			t.Fatalf("event %+v: want GPU %s", e, uuid)
		}
		if e.XID != nil && e.XID.Code == 79 {
			break
		}
	}
}
