package plan

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestOffersOfPolicies replaces a policy by another, and deletes it.
func TestOffersOfPolicies(t *testing.T) {
	r := prometheus.NewRegistry()
	m := newMetrics(r)
	offer := func(policy string, devices int) Account {
		return Account{offered: map[offerKey]int{{gpu.TypeMPS, policy}: devices}}
	}
	m.record(Account{}, offer("quarters", 4))
	m.record(Account{}, offer("quarters", 8))
	m.record(offer("quarters", 4), offer("halves", 2))
	if got, want := controltest.Metrics(t, r), "devices_offered policy=halves type=mps 2\ndevices_offered policy=quarters type=mps 8\n"; got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
	m.record(offer("quarters", 8), Account{})
	if n := testutil.CollectAndCount(m.offered); n != 1 {
		t.Errorf("%d series, want 1: no GPU is under the policy quarters any more", n)
	}
}
