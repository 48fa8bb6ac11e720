package nvml_test

import (
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestReadDuringAChange checks that a GPU whose MIG mode is switched for longer than a reading
// may take counts neither as late nor as broken: other calls for it wait, and calls for all
// GPUs leave it out.
func TestReadDuringAChange(t *testing.T) {
	t.Parallel()
	s := nvmltest.NewSimulated(t, "3xh100-80gb")
	before, part := list(t, s), first(t, s)
	uuid := part.GPU
	s.SetReadLimit(lateAfter)
	if err := s.Machine.Fault(nvmlsim.Fault{Call: "DeviceSetMigMode", GPU: 0, Hang: true}); err != nil {
		t.Fatal(err)
	}
	var calls sync.WaitGroup
	call := func(what string, f func() error) {
		calls.Go(func() {
			if err := f(); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		})
	}
	call("switch", func() error { return s.SetMIGMode(uuid, true) })
	for s.CallsUnderway() == 0 {
		<-time.After(10 * time.Millisecond)
	}
	checkSilent := func() {
		t.Helper()
		if silent := s.Probe(); len(silent) > 0 {
			t.Errorf("%v don't respond", silent)
		}
	}
	checkSilent()
	during, err := s.List()
	if diff := cmp.Diff(before, during.GPUs); diff != "" || err != nil {
		t.Errorf("GPUs, %v (-before +during):\n%s", err, diff)
	}
	if diff := cmp.Diff([]gpu.UUID{uuid}, during.Unread); diff != "" {
		t.Errorf("GPUs that were not read (-want +got):\n%s", diff)
	}
	call("vitals", func() error { _, err := s.Vitals(uuid); return err })
	call("usage", func() error { _, err := s.Usage(uuid, time.Second); return err })
	call("MIG", func() error { _, err := s.MIG(uuid); return err })
	call("compute mode", func() error { _, err := s.ComputeMode(uuid); return err })
	call("minor", func() error { _, err := s.Minor(uuid); return err })
	call("create", func() error { _, err := s.CreateInstance(part); return err })
	if _, err := s.Vitals(before[1].UUID); err != nil {
		t.Errorf("vitals of another GPU: %v", err)
	}
	checkSilent()
	if n := s.CallsUnderway(); n != 1 {
		t.Errorf("%d calls are in the driver, want the switch", n)
	}
	call("GPUs", func() error { _, err := s.GPUs(); return err })
	if err := s.Machine.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	calls.Wait()
	now := list(t, s)
	if mig := now[0].MIG; !mig.Enabled || len(mig.Instances) != 1 {
		t.Errorf("after the changes: %+v", mig)
	}
	if diff := cmp.Diff(before[1:], now[1:]); diff != "" {
		t.Errorf("other GPUs (-before +after):\n%s", diff)
	}
}

// TestEndUsageDuringAChange checks that whoever frees what readings keep is told that this wasn't
// done because the GPU is being changed.
func TestEndUsageDuringAChange(t *testing.T) {
	t.Parallel()
	s := nvmltest.NewSimulated(t, "1xh100-80gb")
	uuid := first(t, s).GPU
	if err := s.Machine.Fault(nvmlsim.Fault{Call: "DeviceSetMigMode", GPU: 0, Hang: true}); err != nil {
		t.Fatal(err)
	}
	changed := make(chan error, 1)
	go func() { changed <- s.SetMIGMode(uuid, true) }()
	for s.EndUsage(uuid) {
		time.Sleep(time.Millisecond) // until the change has begun
	}
	if err := s.Machine.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	if err := <-changed; err != nil {
		t.Fatal(err)
	}
	if !s.EndUsage(uuid) {
		t.Error("nothing was freed after the change")
	}
}
