package offer_test

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// checkWholeTakesAll checks that the counter of a GPU whose memory isn't known keeps the whole
// GPU apart from its replicas, and these not from each other.
func checkWholeTakesAll(t *testing.T, what string, g offer.GPU) {
	t.Helper()
	all, replicas := g.Counters.Counters["memory"].Value, int64(0)
	for _, d := range g.Devices {
		takes := d.ConsumesCounters[0].Counters["memory"].Value
		if gpu.DeviceName(d.Name).Type() == gpu.TypeGPU {
			if takes.Cmp(all) != 0 {
				t.Errorf("%s: %s takes %s of %s, want all", what, d.Name, takes.String(), all.String())
			}
			continue
		}
		replicas += takes.Value()
		if takes.Sign() <= 0 {
			t.Errorf("%s: %s takes nothing", what, d.Name)
		}
	}
	if replicas > all.Value() {
		t.Errorf("%s: the replicas take %d of %s", what, replicas, all.String())
	}
}
