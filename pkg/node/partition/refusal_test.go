package partition_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// refusals has calls of the hardware fail: each of them the first times, or, if times is
// negative, each time.
func (h *hardware) refusals(times int, err error, calls ...string) {
	left := map[string]int{}
	for _, call := range calls {
		left[call] = times
	}
	h.fault = func(call string, _ gpu.UUID) error {
		if left[call] == 0 {
			return nil
		}
		left[call]--
		return err
	}
}

// wantRefusal checks whether the error says that silicon refuses claims, and what it can't do.
func wantRefusal(t *testing.T, err error, action string, silicon ...gpu.Device) {
	t.Helper()
	refused, ok := errors.AsType[*gpu.RefusedError](err)
	if len(silicon) == 0 {
		if err == nil || ok {
			t.Errorf("got %v, want an error that is no refusal", err)
		}
		return
	}
	if !ok {
		t.Errorf("got %v, want a refusal", err)
		return
	}
	if diff := cmp.Diff(silicon, refused.Silicon); diff != "" || refused.Action != action {
		t.Errorf("the GPU can't %q, want %q; silicon (-want +got):\n%s", refused.Action, action, diff)
	}
}

var errUnknown = errors.New("nvmlDeviceCreateGpuInstanceWithPlacement: Unknown Error")

// TestRefusal has the hardware refuse each step of creating a partition.
func TestRefusal(t *testing.T) {
	p := part(gpu0, "3g.71gb", 4)
	for _, call := range []string{"create", "createCompute", "mode"} {
		n := newNode(t, newHardware())
		n.hw.refusals(1, errUnknown, call)
		n.hold(t, p)
		_, err := n.Ensure(t.Context(), p)
		wantRefusal(t, err, "create a 3g.71gb partition", p)
		n.prepare(t, p)
		n.checkThere(t, gpu0, true, p)
	}
}

// TestRefusesOnlyThere checks that the rest of a GPU that refuses a partition works.
func TestRefusesOnlyThere(t *testing.T) {
	n := newNode(t, newHardware())
	before, after := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb", 6)
	n.prepare(t, before)
	n.hw.refusals(1, errUnknown, "create")
	p := part(gpu0, "1g.18gb", 4)
	n.hold(t, p)
	_, err := n.Ensure(t.Context(), p)
	wantRefusal(t, err, "create a 1g.18gb partition", p)
	n.unprepare(t, p)
	n.prepare(t, after)
	n.checkThere(t, gpu0, true, before, after)
}

// TestWhatIsNoRefusal has prepares fail for reasons that aren't the GPU's.
func TestWhatIsNoRefusal(t *testing.T) {
	p, other := part(gpu0, "1g.18gb", 4), part(gpu0, "3g.71gb", 0)
	for name, tc := range map[string]struct {
		prepare func(*testing.T, *node)
		want    error // nil: any
	}{
		"lost":           {func(_ *testing.T, n *node) { n.hw.refusals(-1, nvml.ErrLost, "create") }, nvml.ErrLost},
		"hangs":          {func(_ *testing.T, n *node) { n.hw.refusals(-1, nvml.ErrNotResponding, "create") }, nvml.ErrNotResponding},
		"can't be read":  {func(_ *testing.T, n *node) { n.hw.refusals(-1, errUnknown, "look") }, errUnknown},
		"no permission":  {func(_ *testing.T, n *node) { n.hw.refusals(-1, nvml.ErrNoPermission, "mode") }, nvml.ErrNoPermission},
		"no driver":      {func(_ *testing.T, n *node) { n.SetHardware(nil) }, gpu.ErrNoDriver},
		"driver unloads": {func(_ *testing.T, n *node) { n.hw.refusals(-1, nvml.ErrDriverNotLoaded, "create") }, nvml.ErrDriverNotLoaded},
		"a claim that leaves may have the engines": {func(t *testing.T, n *node) {
			n.prepare(t, other)
			n.journal.AdvancePhase(uid(other), holding.Unpreparing)
			n.hw.refusals(-1, nvml.ErrInsufficientResources, "create")
		}, partition.ErrHeld},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newHardware())
			tc.prepare(t, n)
			n.hold(t, p)
			_, err := n.Ensure(t.Context(), p)
			wantRefusal(t, err, "")
			if !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
}

// TestRefusalInTheEnd checks that an answer after the end of the call is no refusal: nobody may
// have waited for it.
func TestRefusalInTheEnd(t *testing.T) {
	n := newNode(t, newHardware())
	p := part(gpu0, "1g.18gb", 4)
	n.hold(t, p)
	ctx, cancel := context.WithCancel(t.Context())
	n.hw.fault = func(call string, _ gpu.UUID) error {
		if call != "create" {
			return nil
		}
		cancel()
		return errUnknown
	}
	_, err := n.Ensure(ctx, p)
	wantRefusal(t, err, "")
	wantError(t, err, "Unknown Error")
}

// TestWholeIsRefused has a GPU not be usable whole.
func TestWholeIsRefused(t *testing.T) {
	p := part(gpu0, "1g.18gb", 4)
	warm := func(t *testing.T, n *node) {
		t.Helper()
		n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: time.Hour})
		n.prepare(t, p)
		n.unprepare(t, p)
	}
	for name, prepare := range map[string]func(*testing.T, *node){
		"others' partition": func(_ *testing.T, n *node) { n.hw.foreign(p, true) },
		"others' mode": func(_ *testing.T, n *node) {
			n.hw.outside(gpu0, func(g *simulated) { g.mig.Enabled, g.mig.Pending = true, true })
		},
		"an idle partition stays": func(t *testing.T, n *node) { warm(t, n); n.hw.refusals(-1, errUnknown, "destroy") },
		"the mode stays":          func(t *testing.T, n *node) { warm(t, n); n.hw.refusals(-1, nvml.ErrInUse, "mode") },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newHardware())
			prepare(t, n)
			wantRefusal(t, n.ClearMIG(t.Context(), gpu0), "be used whole", gpu.Whole{GPU: gpu0})
		})
	}
	n := newNode(t, newHardware())
	n.prepare(t, p)
	err := n.ClearMIG(t.Context(), gpu0)
	if wantRefusal(t, err, ""); !errors.Is(err, partition.ErrHeld) {
		t.Errorf("a claim has a part of the GPU: %v", err)
	}
}
