package plan

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
)

func TestSelectorsAreCompiledOnce(t *testing.T) {
	spec := v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), GPUSelector: `device.driver == "gpu.nvidia.com"`}
	api := controltest.NewAPI(t, controltest.Policy("a", spec), controltest.Policy("b", spec))
	b := &rulebook{client: api}
	first, err := b.load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if again, _ := b.load(t.Context()); again != first {
		t.Error("the rules were compiled again although nothing changed")
	}
	if err := api.Create(t.Context(), controltest.Policy("c", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()})); err != nil {
		t.Fatal(err)
	}
	second, err := b.load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(second.Accepted) != 3 || second.Accepted[0].Selector != first.Accepted[0].Selector {
		t.Error("a selector was compiled again")
	}
}

// TestServerIsAskedWithoutALock checks that a slow answer about a policy's kind doesn't delay
// the nodes.
func TestServerIsAskedWithoutALock(t *testing.T) {
	api, asked := controltest.NewAPI(t, controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()})), 0
	book := &rulebook{client: api}
	book.definitions.Server = interceptor.NewClient(api, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			asked++
			if !book.mu.TryLock() {
				return errors.New("the lock is held")
			}
			book.mu.Unlock()
			return c.Get(ctx, key, o, opts...)
		},
	})
	if _, err := book.load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := api.Delete(t.Context(), controltest.Policy("p", v1alpha1.SharingPolicySpec{})); err != nil {
		t.Fatal(err)
	}
	if _, err := book.load(t.Context()); err != nil || asked != 1 {
		t.Errorf("asked %d times about a missing policy: %v", asked, err)
	}
}

// TestPoliciesAreNamedWhenKindsAreInstalledAgain checks that GPUs keep their plans
// until there was time to apply the policies again, and that the log then names
// those that are gone.
func TestPoliciesAreNamedWhenKindsAreInstalledAgain(t *testing.T) {
	api, clock := controltest.NewAPI(t, controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()})), testingclock.NewFakeClock(time.Unix(2000, 0))
	book := &rulebook{client: api, definitions: kinds.Definitions{Server: api, Clock: clock}}
	if _, err := book.load(t.Context()); err != nil {
		t.Fatal(err)
	}
	controltest.Define(t, api, kinds.SharingPolicies, clock.Now())
	if err := api.Delete(t.Context(), controltest.Policy("p", v1alpha1.SharingPolicySpec{})); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	clock.Step(kinds.ReportWithin - time.Second)
	if _, err := book.load(ctx); !errors.Is(err, kinds.ErrNew) || log.Len() > 0 {
		t.Fatalf("got %v, want that the kind is new; log: %s", err, &log)
	}
	clock.Step(time.Second)
	for range 2 {
		if r, err := book.load(ctx); err != nil || len(r.Accepted) > 0 {
			t.Errorf("got %v, %v", r.Accepted, err)
		}
	}
	if n := strings.Count(log.String(), `policies=["p"]`); n != 1 {
		t.Errorf("the policy is named %d times in: %s", n, &log)
	}
}
