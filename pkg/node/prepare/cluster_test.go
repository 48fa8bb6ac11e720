package prepare

import (
	"errors"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tessera-dra/tessera/pkg/node/holding"
)

func TestClusterLook(t *testing.T) {
	old := holding.Record{ClaimUID: "old", Namespace: "default", Name: "old", Holdings: []holding.Holding{{Device: "gpu-0"}}}
	now := metav1.NewTime(time.Unix(1, 0))
	claim := func(change func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "old", UID: "old"}}
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: "gpu.nvidia.com", Pool: "node-a", Device: "gpu-0"}},
		}}
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "trainer", UID: "pod-uid"}}
		change(c)
		return c
	}
	as := func(*resourceapi.ResourceClaim) {}
	for name, tc := range map[string]struct {
		objects []runtime.Object
		want    standing
	}{
		"deleted":         {nil, standing{awaitsUnprepare: true, reason: "the claim was deleted"}},
		"created again":   {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.UID = "another" })}, standing{awaitsUnprepare: true, reason: "the claim was deleted"}},
		"being deleted":   {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.DeletionTimestamp, c.Finalizers = &now, []string{"x"} })}, standing{awaitsUnprepare: true, reason: "the claim is being deleted"}},
		"deallocated":     {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil })}, standing{awaitsUnprepare: true, reason: "the claim was deallocated"}},
		"allocated again": {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Device = "gpu-1" })}, standing{awaitsUnprepare: true, reason: "the claim was allocated other devices"}},
		"on another node": {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Pool = "node-b" })}, standing{awaitsUnprepare: true, reason: "the claim was allocated other devices"}},
		"unused":          {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil })}, standing{awaitsUnprepare: true, reason: "no pod uses the claim any more"}},
		"in use":          {[]runtime.Object{claim(as)}, standing{reason: "pod default/trainer uses it"}},
		"in use by something else": {[]runtime.Object{claim(func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor[0].Resource = "podgroups" })},
			standing{reason: "podgroups trainer uses it"}},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset(tc.objects...)
			p := &Preparer{cfg: Config{Cluster: client.ResourceV1(), Driver: "gpu.nvidia.com", Pool: "node-a"}}
			got, err := p.readStanding(t.Context(), old)
			if err != nil {
				t.Fatal(err)
			}
			if got != tc.want {
				t.Errorf("got %+v, want %+v", got, tc.want)
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
		p := &Preparer{cfg: Config{Cluster: client.ResourceV1()}}
		if _, err := p.readStanding(t.Context(), old); !errors.Is(err, away) {
			t.Errorf("got %v, want %v", err, away)
		}
	})
}
