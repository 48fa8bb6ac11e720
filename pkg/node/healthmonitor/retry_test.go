package healthmonitor_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/pacetest"
)

// TestFailuresAreRetriedSeldom: a GPU whose reading fails each time, or whose health can't be
// stored, is read every few seconds although its facts change every second, and that is
// logged when it begins.
func TestFailuresAreRetriedSeldom(t *testing.T) {
	for name, begin := range map[string]func(*testing.T, *node){
		"vitals can't be read": func(_ *testing.T, n *node) { n.set(gpu0, gpu.RecoveryNone, errors.New("unknown error")) },
		"GPU is lost":          func(_ *testing.T, n *node) { n.set(gpu0, gpu.RecoveryNone, nvml.ErrLost) },
		"GPU doesn't respond":  func(_ *testing.T, n *node) { n.set(gpu0, gpu.RecoveryNone, nvml.ErrNotResponding) },
		"health can't be stored": func(t *testing.T, n *node) {
			dir := filepath.Join(n.dir, "health")
			if err := errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			n.set(gpu0, gpu.RecoveryReset, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, n *node) {
				begin(t, n)
				n.monitor.SawEvent(gpu0)
				readings := func() int {
					n.mu.Lock()
					defer n.mu.Unlock()
					return n.readings[gpu0]
				}
				lines := func() int { return len(n.logger.GetSink().(ktesting.Underlier).GetBuffer().Data()) }
				before, logged := readings(), lines()
				const most = 17 // a reading every 4 seconds, and the first one
				pacetest.Minutes(t, func() int { return readings() - before }, func() int { return lines() - logged }, func() {
					for second := range 60 {
						time.Sleep(time.Second)
						n.facts.Found(gpu.Node{Name: "node-0", GPUs: []gpu.GPU{{UUID: gpu0, MemoryBytes: int64(second % 2)}, {UUID: gpu1, Index: 1}}})
					}
				}, pacetest.Bound{Attempts: most, Lines: 3}, pacetest.Bound{Attempts: most}, pacetest.Bound{Attempts: most})
			})
		})
	}
}
