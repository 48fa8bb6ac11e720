package control

import (
	"context"
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// After an upgrade of the API server the caches are filled again one after the
// other: policies are judged again while the cache still has their statuses from
// before the last write.
func TestStatusIsWrittenAfterAConflict(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(nodeWith("a", "", h100(0)), sharing("p", v1alpha1.SharingPolicySpec{Plan: exclusive()}))...)
	conflicts := 1
	stale, ok := f.api.(client.WithWatch)
	if !ok {
		t.Fatal("the client can't be intercepted")
	}
	f.policies.client = interceptor.NewClient(stale, interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			if conflicts--; conflicts >= 0 {
				return apierrors.NewConflict(schema.GroupResource{Resource: "sharingpolicies"}, o.GetName(), errors.New("the object has been modified"))
			}
			return c.SubResource(sub).Update(ctx, o, opts...)
		},
	})
	got, err := f.policies.Reconcile(t.Context(), reconcile.Request{})
	if err != nil || got.RequeueAfter <= 0 {
		t.Fatalf("got %+v, %v; want that it is tried again, without an error", got, err)
	}
	if status := f.statuses(t)["p"]; status.GPUs != 1 {
		t.Errorf("got %+v", status)
	}
}
