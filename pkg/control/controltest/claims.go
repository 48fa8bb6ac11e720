package controltest

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"github.com/tessera-dra/tessera/pkg/control/claims"
)

// Claims is an index of claims whose informer doesn't run: tests say what it has.
type Claims struct {
	*claims.Index
	t testing.TB
}

// NewClaims returns an index without claims.
func NewClaims(t testing.TB) Claims {
	t.Helper()
	index, err := claims.New(draclient.New(fake.NewClientset()))
	if err != nil {
		t.Fatal(err)
	}
	return Claims{index, t}
}

// Devices are those that claims have, by namespace/name of the claim.
type Devices map[string][]string

// Have replaces the claims by those that have devices of a node.
func (c Claims) Have(pool string, devices Devices) {
	c.t.Helper()
	var all []*resourceapi.ResourceClaim
	for name, names := range devices {
		claim := Claim(pool, names...)
		claim.Namespace, claim.Name, _ = strings.Cut(name, "/")
		all = append(all, claim)
	}
	c.Are(all...)
}

// Are replaces the claims.
func (c Claims) Are(all ...*resourceapi.ResourceClaim) {
	c.t.Helper()
	var objects []any
	for _, claim := range all {
		trimmed, err := claims.Trim(claim)
		if err != nil {
			c.t.Fatal(err)
		}
		objects = append(objects, trimmed)
	}
	if err := c.Informer.GetStore().Replace(objects, ""); err != nil {
		c.t.Fatal(err)
	}
}

// Claim is a claim that has devices of a node.
func Claim(pool string, devices ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: pool + "-claim", UID: "u", Annotations: map[string]string{"large": "thing"}}}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for _, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Driver: "gpu.nvidia.com", Pool: pool, Device: d, Request: "r"})
	}
	return c
}
