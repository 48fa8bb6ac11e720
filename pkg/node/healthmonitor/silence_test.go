package healthmonitor

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/node/usage"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/pkg/pacetest"
)

// TestReadingsOfSilentGPUsAreRare: GPUs that don't answer lead to one reading of the facts, and
// one when they answer again; and the facts count as outdated while they don't say so.
func TestReadingsOfSilentGPUsAreRare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		machine, gpus := nvmltest.NewSimulated(t, "2xl4").Machine, nvmltest.NewSilence()
		session, err := nvml.NewOpener().Init(gpus.Library(machine), "simulated")
		if err != nil {
			t.Fatal(err)
		}
		all, err := session.GPUs()
		if err != nil {
			t.Fatal(err)
		}
		j, err := journal.Open(t.TempDir(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer j.Close()
		known := facts.New("node-0")
		known.Found(gpu.Node{Name: "node-0", GPUs: all})
		m := New(Config{NodeName: "node-0", Journal: j, Facts: known, Sharing: sharing.New(sharing.Config{Journal: j}), Readings: usage.NewReadings(known, nil, false), Events: noEvents{}})
		m.SetHardware(&Hardware{Session: session})
		logger, lines := pacetest.Logger(t)
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			m.doTasks(ctx)
		}()
		readings := func(within time.Duration) (n int) {
			for over := time.Now().Add(within); time.Now().Before(over); {
				if known.AwaitRequest(ctx, time.Until(over)) {
					n++
					known.BeginReading()
					known.Found(gpu.Node{Name: "node-0", GPUs: all})
				}
			}
			return n
		}
		if n := readings(time.Minute); n != 0 || lines() != 0 || known.Outdated(2*answersEvery) != nil {
			t.Errorf("while all answer: %d readings, %d lines, outdated: %v", n, lines(), known.Outdated(2*answersEvery))
		}
		gpus.Begin()
		if n := readings(3 * time.Minute); n == 0 || n > len(all) || lines() != n {
			t.Errorf("while they are silent: %d readings and %d lines, want one for each GPU at most", n, lines())
		}
		if known.Outdated(2*answersEvery) == nil {
			t.Error("the facts don't say that GPUs are silent, and count as true")
		}
		logged := lines()
		gpus.End()
		if n := readings(time.Minute); n == 0 || n > len(all) || lines() != logged+n {
			t.Errorf("when they answer again: %d readings and %d more lines", n, lines()-logged)
		}
		if err := known.Outdated(2 * answersEvery); err != nil {
			t.Errorf("when they answer again: %v", err)
		}
		cancel()
		<-ended
		synctest.Wait()
		if err := session.Close(); err != nil {
			t.Error(err)
		}
	})
}
