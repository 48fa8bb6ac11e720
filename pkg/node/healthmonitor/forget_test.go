package healthmonitor

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// TestForgetHealthyGPUs checks that a plugin that ends leaves only records of GPUs with which
// something is wrong, also if an admin has ended the condition.
func TestForgetHealthyGPUs(t *testing.T) {
	j, err := journal.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	at := time.Unix(1000, 0)
	sick := health.State{Causes: []health.Cause{{Type: gpu.ResetRequired, Source: health.FromRecoveryAction, Since: at}}}
	accepted, err := sick.End(health.Ending{Type: gpu.ResetRequired, By: "ann", Why: "tested it", At: at}, at)
	if err != nil {
		t.Fatal(err)
	}
	for uuid, s := range map[gpu.UUID]health.State{
		"sick": sick.BeginReset(at), "accepted": accepted,
		"reset": health.State{}.BeginReset(at).EndReset(at, nil, false),
		"flaps": {Flaps: []health.Flap{{Type: gpu.Lost, Ended: at, Times: 3}}}, "ended": {Ended: accepted.Ended},
	} {
		if err := j.PutHealth(holding.Health{GPU: uuid, State: s}); err != nil {
			t.Fatal(err)
		}
	}
	if err := ForgetHealthy(j); err != nil {
		t.Fatal(err)
	}
	left := map[gpu.UUID]bool{}
	for _, h := range j.AllHealth() {
		left[h.GPU] = true
	}
	if diff := cmp.Diff(map[gpu.UUID]bool{"sick": true, "accepted": true}, left); diff != "" {
		t.Errorf("records that are left (-want +got):\n%s", diff)
	}
}
