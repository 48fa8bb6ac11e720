package plan

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/server"
)

// TestAccountOfEditedPolicy edits a policy while it is judged. Whether a node was decided on again
// meanwhile or not, the judgement has the decision by the new form, and leaves it in force: a
// claim's device that is no longer planned goes with the claim.
func TestAccountOfEditedPolicy(t *testing.T) {
	for name, decided := range map[string]bool{"decided again": true, "not yet": false} {
		t.Run(name, func(t *testing.T) {
			ctx, clock, metrics := t.Context(), testingclock.NewFakeClock(time.Unix(2000, 0)), prometheus.NewRegistry()
			node := controltest.NodeWith("n", "", controltest.L4(0))
			policy := controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.MPS(4)})
			api, claims := controltest.NewAPI(t, append(node, policy)...), controltest.NewClaims(t)
			asked := server.New(&controltest.Server{Form: publish.SplitCounters}, clock)
			p := New(api, claims.Index, asked, kinds.Definitions{Server: api, Clock: clock}, metrics)
			inv := node[1].(*v1alpha1.GPUInventory)
			claims.Have("n", controltest.Devices{"ns/c": {"gpu-00000000-mps4-0"}})
			common, err := p.Common(ctx)
			if err != nil {
				t.Fatal(err)
			}
			policy.Spec.Plan, policy.Generation = controltest.Exclusive(), 2
			if err := api.Update(ctx, policy); err != nil {
				t.Fatal(err)
			}
			if decided {
				in, err := p.Input(ctx, inv)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := p.Decide(ctx, inv, in); err != nil {
					t.Fatal(err)
				}
			}
			a, err := p.Account(ctx, common, inv)
			if err != nil {
				t.Fatal(err)
			}
			if len(a.leftovers()) != 1 {
				t.Errorf("GPUs %+v, want one leftover", a.GPUs)
			}
			if !p.DependsOnClaims("n") {
				t.Error("the end of the claim would change nothing")
			}
			if got, want := controltest.Metrics(t, metrics), "devices_offered policy=p type=mps 1\n"; got != want {
				t.Errorf("metrics:\n%swant:\n%s", got, want)
			}
		})
	}
}
