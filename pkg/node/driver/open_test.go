package driver

import (
	"testing"

	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// raise raises an XID on the first GPU of the fake host.
func raise(t *testing.T, code uint64) {
	t.Helper()
	m, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.RaiseXID(0, nvmlsim.XID{Code: code}); err != nil {
		t.Fatal(err)
	}
}

// TestEventsSinceOpenAhead checks that a Follower passes on the events since OpenAhead, and
// none after StopListening.
func TestEventsSinceOpenAhead(t *testing.T) {
	f := newFixture(t)
	events := make(chan nvml.Event, 10)
	f.OnEvent = func(e nvml.Event) { events <- e }
	if err := f.Opener.OpenAhead(); err != nil {
		t.Fatal(err)
	}
	raise(t, 31)
	f.start(t)
	e := <-events
	if e.XID == nil || e.XID.Code != 31 || e.GPU != gpu.UUID(installed.Machine.GPUs[0].UUID) {
		t.Errorf("event before the Follower: %+v, want XID 31 of the first GPU", e)
	}
	_, ctx := ktesting.NewTestContext(t)
	f.StopListening(ctx)
	raise(t, 13)
	f.stop()
	if len(events) > 0 {
		t.Errorf("event after StopListening: %+v", <-events)
	}
}

// TestDriverGoesAfterOpenAhead checks that a Follower doesn't use a driver that was opened
// ahead and has gone since.
func TestDriverGoesAfterOpenAhead(t *testing.T) {
	f := newFixture(t)
	if err := f.Opener.OpenAhead(); err != nil {
		t.Fatal(err)
	}
	back := moveAside(t, installed.Root)
	f.start(t)
	<-f.Looked()
	if f.Facts.Trouble() == nil {
		t.Error("the Follower has found a driver that is gone")
	}
	back()
	eventually(t, f, "the driver's return", func() bool { return f.Facts.Trouble() == nil })
	<-f.arrivals
}
