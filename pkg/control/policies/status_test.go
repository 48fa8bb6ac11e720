package policies

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// After an upgrade of the API server the caches are filled again one after the
// other: policies are judged again while the cache still has their statuses from
// before the last write.
func TestStatusIsWrittenAfterAConflict(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("a", "", controltest.H100(0)), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	conflicts := 1
	f.policies.Client = interceptor.NewClient(f.api, interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			if conflicts--; conflicts >= 0 {
				return apierrors.NewConflict(schema.GroupResource{Resource: "sharingpolicies"}, o.GetName(), errors.New("the object has been modified"))
			}
			return c.SubResource(sub).Update(ctx, o, opts...)
		},
	})
	if _, err := f.policies.Reconcile(t.Context(), reconcile.Request{}); err != nil {
		t.Fatalf("got %v, want no error: what the cache lacks comes as an event", err)
	}
	if status := f.statuses(t)["p"]; status.GPUs != 1 {
		t.Errorf("got %+v", status)
	}
}

// A server that answers late, as while it is upgraded, doesn't delay the next judgement
// by a multiple of that.
func TestStatusIsWrittenSoonAfterASlowAnswer(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("a", "", controltest.H100(0)), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	now := testingclock.NewFakeClock(time.Unix(1000, 0))
	f.policies.Clock = now
	f.policies.Client = interceptor.NewClient(f.api, interceptor.Funcs{
		SubResourceUpdate: func(context.Context, client.Client, string, client.Object, ...client.SubResourceUpdateOption) error {
			now.Step(30 * time.Second)
			return errors.New("no answer")
		},
	})
	if _, err := f.policies.Reconcile(t.Context(), reconcile.Request{}); err == nil {
		t.Fatal("no error")
	}
	f.policies.Client = f.api
	now.Step(5 * time.Second)
	if status := f.statuses(t)["p"]; status.GPUs != 1 {
		t.Errorf("got %+v", status)
	}
}

// TestProblemsAreToldInEvents checks that a plan that can't be carried out causes one
// event, and nodes that aren't published yet cause none.
func TestProblemsAreToldInEvents(t *testing.T) {
	f := newFleet(t, publish.NoCounters, append(controltest.NodeWith("a", "", controltest.H100(0), controltest.H100(1)), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Partitioned()}))...)
	f.hidden = []string{"a"}
	f.statuses(t)
	if got := f.warnings(); got != nil {
		t.Errorf("told %q of a node that isn't published", got)
	}
	f.hidden = nil
	for range 3 {
		f.statuses(t)
	}
	f.restart(t)
	f.statuses(t)
	if got := f.warnings(); len(got) != 1 || !strings.HasPrefix(got[0], "Warning Problems ") || !strings.Contains(got[0], "DRAPartitionableDevices") {
		t.Errorf("told %q, want once that there are no counters", got)
	}
}

// TestPoliciesOnAServerThatRefusesToSay checks that, if an ability is unknown, the policies
// that need it have the reason and the remedy in their status, and the others don't.
func TestPoliciesOnAServerThatRefusesToSay(t *testing.T) {
	for name, tc := range map[string]struct {
		plan v1alpha1.Plan
		want string
	}{
		"exclusive": {controltest.Exclusive(), ""},
		"partitions": {controltest.Partitioned(), "It isn't known whether the API server stores shared counters (feature gate DRAPartitionableDevices), so that " +
			"partitions can't be cut on demand; only the whole GPU, or what others made of it, is offered. " +
			"Fix a partitioning in spec.plan.partitioned.layout. It refuses; allow it."},
		"shares by size": {v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}},
			"It isn't known whether the API server stores consumable capacity (feature gate DRAConsumableCapacity), so that " +
				"claims can't say how large a share they want; 4 equal shares are offered. Plan a number of them in spec.plan.mps.shares. It refuses; allow it."},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("a", "", controltest.H100(0)), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: tc.plan}))...)
			f.server.Doubt = "It refuses; allow it."
			var got []string
			for _, p := range f.statuses(t)["p"].Problems {
				got = append(got, p.Message)
			}
			if tc.want == "" && got != nil || tc.want != "" && !slices.Contains(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}
