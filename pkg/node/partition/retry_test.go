package partition_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/pacetest"
)

// TestFailuresAreRetriedSeldom: an operation of the hardware that fails each time is
// attempted and logged a few times a minute, although a policy changes every second.
func TestFailuresAreRetriedSeldom(t *testing.T) {
	for _, failing := range []string{"look", "destroy", "mode"} {
		t.Run(failing, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, newHardware())
				logger, lines := pacetest.Logger(t)
				ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
				done := make(chan struct{})
				go func() {
					defer close(done)
					n.Run(ctx)
				}()
				p := part(gpu0, "1g.18gb", 0)
				n.prepare(t, p)
				n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: time.Second})
				n.unprepare(t, p)
				n.hw.mu.Lock()
				n.hw.fault = func(call string, _ gpu.UUID) error {
					if call == failing {
						return errors.New("it is in use by another client")
					}
					return nil
				}
				n.hw.mu.Unlock()
				before := n.hw.count(failing)
				pacetest.Minutes(t, func() int { return n.hw.count(failing) - before }, lines, func() {
					for second := range 60 {
						time.Sleep(time.Second)
						n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: time.Duration(second%2) * time.Second})
					}
				}, pacetest.Bound{Attempts: 9, Lines: 9}, pacetest.Bound{Attempts: 3, Lines: 3}, pacetest.Bound{Attempts: 3, Lines: 3})
				cancel()
				<-done
			})
		})
	}
}
