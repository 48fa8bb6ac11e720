package driver

import (
	"strconv"
	"testing"

	"k8s.io/klog/v2/ktesting"

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
	if err := f.Opener.OpenAhead(); err != nil {
		t.Fatal(err)
	}
	raise(t, 31)
	f.start(t)
	eventually(t, f, "the XID from before the Follower", func() bool { return f.xids(t, 31) == 1 })
	_, ctx := ktesting.NewTestContext(t)
	f.StopListening(ctx)
	raise(t, 13)
	f.stop()
	if n := f.xids(t, 13); n > 0 {
		t.Errorf("%d events after StopListening", n)
	}
}

// xids returns how many XIDs with the code the first GPU has had.
func (f *fixture) xids(t *testing.T, code int) (n int) {
	t.Helper()
	families, err := f.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["code"] == strconv.Itoa(code) && labels["uuid"] == installed.Machine.GPUs[0].UUID {
				n += int(m.GetCounter().GetValue())
			}
		}
	}
	return n
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
	f.awaitHardware(t)
}
