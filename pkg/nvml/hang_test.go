package nvml_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// lateAfter is long enough for a working call on a busy machine.
const lateAfter = 2 * time.Second

// hangs returns a session on a machine with three GPUs, and the GPUs as it has
// read them. Then it sets a fault: no call for the first GPU returns.
func hangs(t *testing.T) (*nvmltest.Simulated, []gpu.GPU) {
	t.Helper()
	t.Parallel()
	s := nvmltest.NewSimulated(t, "3xh100-80gb")
	s.SetLimits(lateAfter)
	before, err := s.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Machine.Fault(nvmlsim.Fault{Call: "*", GPU: 0, Hang: true}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { endHang(t, s) })
	return s, before
}

// endHang returns when all calls have returned.
func endHang(t *testing.T, s *nvmltest.Simulated) {
	t.Helper()
	if err := s.Machine.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	for len(s.Probe()) > 0 {
		<-time.After(10 * time.Millisecond)
	}
}

// withHung returns the expected list of GPUs while the first GPU doesn't respond;
// the condition's message isn't compared.
func withHung(gpus []gpu.GPU) []gpu.GPU {
	gpus = slices.Clone(gpus)
	gpus[0].Conditions = []gpu.Condition{{Type: gpu.NotResponding}}
	return gpus
}

func list(t *testing.T, s *nvmltest.Simulated) []gpu.GPU {
	t.Helper()
	gpus, err := s.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	for i := range gpus {
		for j := range gpus[i].Conditions {
			gpus[i].Conditions[j].Message = ""
		}
	}
	return gpus
}

// TestHungGPUBlocksNoOther checks that calls for other GPUs work while calls
// for one never return, and that calls for that one fail, at once after the
// first.
func TestHungGPUBlocksNoOther(t *testing.T) {
	s, before := hangs(t)
	hung, fine := before[0].UUID, before[2]
	for _, c := range []struct {
		name string
		call func(gpu.UUID) error
	}{
		{"compute mode", func(u gpu.UUID) error { _, err := s.ComputeMode(u); return err }},
		{"set compute mode", func(u gpu.UUID) error { return s.SetComputeMode(u, nvml.ComputeDefault) }},
		{"usage", func(u gpu.UUID) error { _, err := s.Usage(u, time.Second); return err }},
		{"MIG", func(u gpu.UUID) error { _, err := s.MIG(u); return err }},
		{"minor", func(u gpu.UUID) error { _, err := s.Minor(u); return err }},
		{"mode on", func(u gpu.UUID) error { return s.SetMIGMode(u, true) }},
		{"mode off", func(u gpu.UUID) error { return s.SetMIGMode(u, false) }},
	} {
		if err := c.call(hung); !errors.Is(err, nvml.ErrNotResponding) {
			t.Errorf("%s of the hung GPU: %v, want %v", c.name, err, nvml.ErrNotResponding)
		}
		if err := c.call(fine.UUID); err != nil {
			t.Errorf("%s of another GPU: %v", c.name, err)
		}
	}
	if n := s.CallsUnderway(); n != 1 {
		t.Errorf("%d calls are under way, want the first", n)
	}
	if diff := cmp.Diff(withHung(before), list(t, s)); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{string(hung)}, s.Probe()); diff != "" {
		t.Errorf("what doesn't respond (-want +got):\n%s", diff)
	}
}

// TestHangEnds checks that the GPU works as before after its calls have
// returned.
func TestHangEnds(t *testing.T) {
	s, before := hangs(t)
	if late := s.Probe(); !slices.Equal(late, []string{string(before[0].UUID)}) {
		t.Fatalf("%v don't respond, want the hung GPU", late)
	}
	endHang(t, s)
	if diff := cmp.Diff(before, list(t, s)); diff != "" {
		t.Errorf("GPUs (-before +after):\n%s", diff)
	}
}

// TestSessionOpenedWhileGPUHangs checks that the other GPUs are read, and that
// the hanging one is listed if Remember has named it.
func TestSessionOpenedWhileGPUHangs(t *testing.T) {
	first, before := hangs(t)
	s := nvmltest.OpenSimulated(first.Machine)
	s.SetLimits(lateAfter)
	if diff := cmp.Diff(before[1:], list(t, s)); diff != "" {
		t.Errorf("GPUs, one unknown (-want +got):\n%s", diff)
	}
	if _, err := s.MIG(before[0].UUID); !errors.Is(err, nvml.ErrNotResponding) {
		t.Errorf("MIG of a GPU that hasn't been identified: %v, want %v", err, nvml.ErrNotResponding)
	}
	s.Remember(before, true)
	if diff := cmp.Diff(withHung(before), list(t, s)); diff != "" {
		t.Errorf("GPUs, all remembered (-want +got):\n%s", diff)
	}
	if late := s.Probe(); !slices.Equal(late, []string{"GPU 0"}) {
		t.Errorf("%v don't respond, want the GPU by its index", late)
	}
	endHang(t, s)
	if diff := cmp.Diff(before, list(t, s)); diff != "" {
		t.Errorf("GPUs, when the hang has ended (-want +got):\n%s", diff)
	}
}

// TestEventsWhileGPUHangs checks that events of another GPU arrive during a
// hang, and events of the hanging GPU after it.
func TestEventsWhileGPUHangs(t *testing.T) {
	first, before := hangs(t)
	s := nvmltest.OpenSimulated(first.Machine)
	s.SetLimits(lateAfter)
	await := func(position int) {
		t.Helper()
		got := make(chan nvml.Event, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			e, _ := s.WaitEvent(ctx)
			got <- e
		}()
		defer cancel()
		for {
			if err := s.Machine.RaiseXID(position, nvmlsim.XID{Code: 13}); err != nil {
				t.Fatal(err)
			}
			select {
			case e := <-got:
				wantXID(t, e, before[position].UUID)
				return
			case <-time.After(100 * time.Millisecond): // the GPU may not have been registered yet
			}
		}
	}
	await(1)
	endHang(t, s)
	if _, err := s.GPUs(); err != nil { // identifies the GPU
		t.Fatal(err)
	}
	await(0)
}

// TestCloseWhileGPUHangs checks that Close doesn't wait for a hanging call.
func TestCloseWhileGPUHangs(t *testing.T) {
	first, _ := hangs(t)
	s := nvmltest.OpenSimulated(first.Machine)
	s.SetLimits(lateAfter)
	if _, err := s.GPUs(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); !errors.Is(err, nvml.ErrNotResponding) {
		t.Errorf("close: %v, want %v", err, nvml.ErrNotResponding)
	}
}

// TestLostBeforeOpened checks that a GPU that is lost when the session begins
// is listed if Remember has named it.
func TestLostBeforeOpened(t *testing.T) {
	first := nvmltest.NewSimulated(t, "2xh100-80gb")
	before := list(t, first)
	if err := first.Machine.Lose(0); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		gpus      []gpu.GPU
		mayBeGone bool
	}{
		"of this boot":            {gpus: before},
		"of another boot":         {gpus: before, mayBeGone: true},
		"only by its UUID":        {gpus: []gpu.GPU{{UUID: before[0].UUID, Index: -1}}},
		"one more, that was gone": {gpus: append([]gpu.GPU{{UUID: "GPU-gone", Index: 7}}, before...), mayBeGone: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := nvmltest.OpenSimulated(first.Machine)
			s.Remember(tc.gpus, tc.mayBeGone)
			type listed struct {
				UUID  gpu.UUID
				Wrong []gpu.ConditionType
			}
			var got []listed
			for _, g := range list(t, s) {
				l := listed{UUID: g.UUID}
				for _, c := range g.Conditions {
					l.Wrong = append(l.Wrong, c.Type)
				}
				got = append(got, l)
			}
			want := []listed{{before[0].UUID, []gpu.ConditionType{gpu.Lost}}, {UUID: before[1].UUID}}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("GPUs (-want +got):\n%s", diff)
			}
		})
	}
}

// TestForget checks that a GPU can be forgotten only if NVML lists neither it nor one that may
// be it.
func TestForget(t *testing.T) {
	first := nvmltest.NewSimulated(t, "2xh100-80gb")
	before := list(t, first)
	s := nvmltest.OpenSimulated(first.Machine)
	gone := gpu.GPU{UUID: "GPU-gone", Index: 2}
	s.Remember([]gpu.GPU{gone}, false)
	lost := gone
	lost.Conditions = []gpu.Condition{{Type: gpu.Lost}}
	if diff := cmp.Diff(append(slices.Clone(before), lost), list(t, s)); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if err := s.Forget(before[0].UUID); err == nil {
		t.Error("a GPU that is there was forgotten")
	}
	if err := first.Machine.Lose(0); err != nil {
		t.Fatal(err)
	}
	if err := s.Forget(gone.UUID); err == nil {
		t.Error("a GPU was forgotten while NVML lists one that can't be identified")
	}
	if err := first.Machine.Heal(0); err != nil {
		t.Fatal(err)
	}
	if err := s.Forget(gone.UUID); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(before, list(t, s)); diff != "" {
		t.Errorf("GPUs, when one was forgotten (-want +got):\n%s", diff)
	}
}

// TestMinorOfAGPUThatFails checks that a GPU which doesn't answer is listed with the
// device node that it had last, after a switch of its MIG mode.
func TestMinorOfAGPUThatFails(t *testing.T) {
	s := nvmltest.NewSimulated(t, "minorsMove: true\ngpus: [{model: h100-80gb}]")
	before := list(t, s)[0]
	if err := s.SetMIGMode(before.UUID, true); err != nil {
		t.Fatal(err)
	}
	now, err := s.Minor(before.UUID)
	if err != nil || now == before.Minor {
		t.Fatalf("minor number %d, %v after the mode was switched; want another than %d", now, err, before.Minor)
	}
	if err := s.Machine.Fault(nvmlsim.Fault{Call: "DeviceGetMinorNumber", GPU: 0, Code: nvmlsim.Unknown}); err != nil {
		t.Fatal(err)
	}
	if got := list(t, s)[0]; got.Minor != now || len(got.Conditions) != 1 {
		t.Errorf("listed with minor number %d and conditions %v, want %d and one", got.Minor, got.Conditions, now)
	}
}

// TestDriverHangs checks that sessions which are opened one after the other while
// the whole driver hangs have one call under way together.
func TestDriverHangs(t *testing.T) {
	for _, call := range []string{"Init", "SystemGetDriverVersion"} {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			m := nvmltest.NewSimulated(t, "h100-80gb").Machine
			if err := m.Fault(nvmlsim.Fault{Call: call, GPU: nvmlsim.AnyGPU, Hang: true}); err != nil {
				t.Fatal(err)
			}
			o := nvml.NewOpener()
			o.SetLimits(lateAfter)
			open := func() error {
				s, err := nvmltest.OpenSimulatedBy(o, m)
				if err == nil {
					_, err = s.Driver()
				}
				return err
			}
			for range 3 {
				if err := open(); !errors.Is(err, nvml.ErrNotResponding) {
					t.Errorf("open: %v, want %v", err, nvml.ErrNotResponding)
				}
			}
			if n := o.CallsUnderway(); n != 1 {
				t.Errorf("%d calls are under way, want the first", n)
			}
			if err := m.ClearFaults(); err != nil {
				t.Fatal(err)
			}
			for o.CallsUnderway() > 0 {
				<-time.After(10 * time.Millisecond)
			}
			if err := open(); err != nil {
				t.Errorf("open, when the hang has ended: %v", err)
			}
		})
	}
}

// TestGPUWithoutEvents checks that a GPU which has no events is asked for them once.
func TestGPUWithoutEvents(t *testing.T) {
	s := nvmltest.NewSimulated(t, "2xh100-80gb")
	none := nvmlsim.Fault{Call: "DeviceGetSupportedEventTypes", GPU: 0, Code: nvmlsim.NotSupported, Count: 10}
	if err := s.Machine.Fault(none); err != nil {
		t.Fatal(err)
	}
	uuid := list(t, s)[1].UUID
	got := make(chan nvml.Event)
	ctx, cancel := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	waiting.Go(func() {
		for {
			e, err := s.WaitEvent(ctx)
			if err != nil {
				close(got)
				return
			}
			got <- e
		}
	})
	defer waiting.Wait()
	defer cancel()
	for seen := 0; seen < 3; {
		if err := s.Machine.RaiseXID(1, nvmlsim.XID{Code: 13}); err != nil {
			t.Fatal(err)
		}
		select {
		case e := <-got:
			wantXID(t, e, uuid)
			seen++
		case <-time.After(100 * time.Millisecond): // it may not have been watched yet
		}
	}
	none.Count--
	if diff := cmp.Diff([]nvmlsim.Fault{none}, s.Machine.State().Faults); diff != "" {
		t.Errorf("what is left of the fault (-want +got):\n%s", diff)
	}
	cancel()
	for range got { // until it has ended
	}
}

// wantXID checks that an event is XID 13 of a GPU.
func wantXID(t *testing.T, e nvml.Event, uuid gpu.UUID) {
	t.Helper()
	if e.GPU != uuid || e.Kind != nvml.EventXID || e.XID == nil || e.XID.GPU != uuid || e.XID.Code != 13 {
		t.Errorf("event %+v, want XID 13 of GPU %s", e, uuid)
	}
}
