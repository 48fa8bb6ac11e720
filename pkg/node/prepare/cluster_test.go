package prepare_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/prepare/preparetest"
)

func TestClusterLook(t *testing.T) {
	now := metav1.NewTime(time.Unix(1, 0))
	claim := func(change func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
		c := newClaim("old", result("gpu", 0))
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "trainer", UID: "pod-uid"}}
		change(c)
		return c
	}
	as := func(*resourceapi.ResourceClaim) {}
	for name, tc := range map[string]struct {
		objects []runtime.Object
		want    prepare.Standing
	}{
		"deleted":         {nil, prepare.Standing{AwaitsUnprepare: true, Reason: "the claim was deleted"}},
		"created again":   {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.UID = "another" })}, prepare.Standing{AwaitsUnprepare: true, Reason: "the claim was deleted"}},
		"being deleted":   {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.DeletionTimestamp, c.Finalizers = &now, []string{"x"} })}, prepare.Standing{AwaitsUnprepare: true, Reason: "the claim is being deleted"}},
		"deallocated":     {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil })}, prepare.Standing{AwaitsUnprepare: true, Reason: "the claim was deallocated"}},
		"allocated again": {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0] = result("gpu", 1) })}, prepare.Standing{AwaitsUnprepare: true, Reason: "the claim was allocated other devices"}},
		"on another node": {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Pool = "node-b" })}, prepare.Standing{AwaitsUnprepare: true, Reason: "the claim was allocated other devices"}},
		"unused":          {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil })}, prepare.Standing{AwaitsUnprepare: true, Reason: "no pod uses the claim any more"}},
		"in use":          {[]runtime.Object{claim(as)}, prepare.Standing{Reason: "pod default/trainer uses it"}},
		"in use by something else": {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor[0].Resource = "podgroups" })},
			prepare.Standing{Reason: "podgroups trainer uses it"}},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset(tc.objects...)
			c := prepare.NewCluster(client.ResourceV1(), driver, pool)
			got, err := c.Look(testContext(t), prepare.Holder{UID: "old", Namespace: "default", Name: "old", Devices: []gpu.DeviceName{preparetest.Device(0)}})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			for _, a := range client.Actions() {
				if a.GetResource().Resource != "resourceclaims" {
					t.Errorf("%s %s: the plugin may get claims and nothing else", a.GetVerb(), a.GetResource().Resource)
				}
			}
		})
	}
	t.Run("API server away", func(t *testing.T) {
		client := fake.NewClientset()
		away := errors.New("connection refused")
		client.PrependReactor("get", "*", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, away })
		c := prepare.NewCluster(client.ResourceV1(), driver, pool)
		if _, err := c.Look(testContext(t), prepare.Holder{UID: "old", Namespace: "default", Name: "old"}); !errors.Is(err, away) {
			t.Errorf("got %v, want %v", err, away)
		}
	})
}
