package claims_test

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
)

func TestClaimsKeepWhatIsNeeded(t *testing.T) {
	mixed := controltest.Claim("a", "gpu-1", "gpu-0")
	others := controltest.Claim("a", "theirs").Status.Allocation.Devices.Results[0]
	others.Driver = "other.example.com"
	admin := controltest.Claim("a", "watched").Status.Allocation.Devices.Results[0]
	admin.AdminAccess = new(true)
	mixed.Status.Allocation.Devices.Results = append(mixed.Status.Allocation.Devices.Results, others, admin)
	unallocated := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "waiting"}}

	server := fake.NewClientset(mixed, controltest.Claim("b", "gpu-7"), unallocated)
	c, err := claims.New(draclient.New(server))
	if err != nil {
		t.Fatal(err)
	}
	go c.Informer.RunWithContext(t.Context())
	if !cache.WaitForCacheSync(t.Context().Done(), c.Informer.HasSynced) {
		t.Fatal("the cache isn't filled")
	}
	for pool, want := range map[string][]claims.Allocation{
		"a": {{Device: "gpu-0", Claim: "ns/a-claim"}, {Device: "gpu-1", Claim: "ns/a-claim"}},
		"b": {{Device: "gpu-7", Claim: "ns/b-claim"}},
		"c": nil,
	} {
		got, err := c.In(pool)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("pool %s: got %v, %v, want %v", pool, got, err, want)
		}
	}
	for _, obj := range c.Informer.GetStore().List() {
		if claim := obj.(*resourceapi.ResourceClaim); claim.Annotations != nil || claim.Name == "waiting" && claim.Status.Allocation != nil {
			t.Errorf("kept %+v", claim)
		}
	}
}
