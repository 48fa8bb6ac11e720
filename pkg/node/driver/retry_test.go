package driver

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/pkg/pacetest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// manyCalls is the count of a fault that a test doesn't use up.
const manyCalls = 1_000_000

// failAlways makes a call of the machine fail each time, and returns how often it has failed.
func failAlways(t *testing.T, m *nvmlsim.Machine, call string) (failures func() int) {
	t.Helper()
	if err := m.Fault(nvmlsim.Fault{Call: call, GPU: nvmlsim.AnyGPU, Code: nvmlsim.Unknown, Count: manyCalls}); err != nil {
		t.Fatal(err)
	}
	return func() int { return manyCalls - m.State().Faults[0].Count }
}

// TestFailuresAreRetriedSeldom: a driver that can't be opened, or not be read, is tried every
// few seconds, and why is logged once.
func TestFailuresAreRetriedSeldom(t *testing.T) {
	for _, call := range []string{"Init", "SystemGetDriverVersion"} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, err := installed.Hardware()
				if err != nil {
					t.Fatal(err)
				}
				defer m.Close()
				failures := failAlways(t, m, call)
				defer func() { _ = m.ClearFaults() }()
				f := newFixture(t)
				f.build()
				logger, lines := pacetest.Logger(t)
				ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
				ended := make(chan error, 1)
				go func() { ended <- f.Run(ctx) }()
				const most = 14 // one every 5 seconds
				pacetest.Minutes(t, failures, lines, func() { time.Sleep(time.Minute) },
					pacetest.Bound{Attempts: most, Lines: 2}, pacetest.Bound{Attempts: most}, pacetest.Bound{Attempts: most})
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestSignalsOfFailuresAreRare: a wait for events that fails at once each time leads to a few
// readings a minute.
func TestSignalsOfFailuresAreRare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := simulated(t, nil).Machine
		failures := failAlways(t, m, "EventSetWait")
		session, err := nvml.NewOpener().Init(nvmltest.Library(m), "simulated")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := session.List(); err != nil {
			t.Fatal(err)
		}
		f := newFixture(t)
		f.build()
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(2)))
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		ended := f.watchEvents(ctx, session)
		before, logged := failures(), 0
		for minute, most := range []int{6, 2, 2} {
			readings := 0
			for over := time.Now().Add(time.Minute); time.Now().Before(over); {
				if f.Facts.AwaitRequest(ctx, time.Until(over)) {
					readings++
				}
			}
			attempts := failures() - before
			lines := len(logger.GetSink().(ktesting.Underlier).GetBuffer().Data()) - logged
			if attempts > most || readings > most || lines > most || minute == 0 && (attempts == 0 || readings == 0 || lines == 0) {
				t.Errorf("minute %d: %d failures, %d readings and %d log lines, want at most %d", minute, attempts, readings, lines, most)
			}
			before, logged = before+attempts, logged+lines
		}
		cancel()
		<-ended
		synctest.Wait()
		if err := session.Close(); err != nil {
			t.Error(err)
		}
	})
}
