package allocators

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// Server is an API server as the controller sees it.
type Server struct {
	offer.Server
	// Form in which counters are published; NoCounters without offer.Server's Counters.
	Form publish.Counters
}

// Withdraw returns the server without the ability that isn't used on a node after a double
// allocation.
func (s Server) Withdraw() Server {
	s.Counters, s.Form = false, publish.NoCounters
	return s
}

// Cluster has one node, a controller that publishes the node's GPUs, and a
// scheduler that allocates them to claims.
type Cluster struct {
	Node      gpu.Node
	Plans     map[gpu.UUID]v1alpha1.Plan
	Server    Server
	Allocator Allocator
	// Order in which the scheduler's informer returns slices; nil for that of Pool.
	Order *rand.Rand
	// Claims that are allocated, by name.
	Claims map[string]*resourceapi.ResourceClaim

	// stored are the slices that the API server has, by name.
	stored map[string]*resourceapi.ResourceSlice
	// writes that the controller has decided on and not yet done.
	writes []write
}

// write puts a slice, or deletes the one of the name.
type write struct {
	put    *resourceapi.ResourceSlice
	delete string
}

// Offer returns the GPUs with the devices that the controller would publish now.
func (c *Cluster) Offer() []offer.GPU {
	return offer.Build(c.Node, c.Plans, c.allocatedNames(), c.Server.Server)
}

// Publish decides on the writes, and does all of them.
func (c *Cluster) Publish() {
	c.Decide()
	c.Write(len(c.writes))
}

// Decide has the controller plan its writes, by the current allocations and the
// stored slices. Earlier writes that aren't done yet are dropped, as after a failed
// write.
func (c *Cluster) Decide() {
	owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: c.Node.Name, UID: "1"}
	want := publish.Pool(owner, c.Offer(), c.Server.Form)
	var stored []*resourceapi.ResourceSlice
	generation := int64(0)
	for _, s := range c.stored {
		stored = append(stored, s)
		generation = max(generation, s.Spec.Pool.Generation)
	}
	c.writes = nil
	if publish.Equal(stored, want) {
		return
	}
	names := make(map[string]bool)
	for i := range want {
		want[i].Spec.Pool.Generation = generation + 1
		names[want[i].Name] = true
		c.writes = append(c.writes, write{put: &want[i]})
	}
	for _, name := range slices.Sorted(maps.Keys(c.stored)) {
		if !names[name] {
			c.writes = append(c.writes, write{delete: name})
		}
	}
}

// Pending returns the number of writes that are decided on and not done.
func (c *Cluster) Pending() int { return len(c.writes) }

// Write does the next writes.
func (c *Cluster) Write(n int) {
	for _, w := range c.writes[:n] {
		if w.put == nil {
			delete(c.stored, w.delete)
			continue
		}
		if c.stored == nil {
			c.stored = make(map[string]*resourceapi.ResourceSlice)
		}
		c.stored[w.put.Name] = w.put
	}
	c.writes = c.writes[n:]
}

// Slices as the scheduler's informer returns them.
func (c *Cluster) Slices() []*resourceapi.ResourceSlice {
	var out []*resourceapi.ResourceSlice
	for _, name := range slices.Sorted(maps.Keys(c.stored)) {
		out = append(out, c.stored[name])
	}
	if c.Order != nil {
		c.Order.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	}
	return out
}

// Ask has the scheduler allocate a claim, and returns its devices; none if it has
// to wait.
func (c *Cluster) Ask(ctx context.Context, name string, requests ...Request) ([]resourceapi.DeviceRequestAllocationResult, error) {
	claim := newClaim(name, requests...)
	allocation, err := c.Allocator.Allocate(ctx, Question{Node: c.Node.Name, Slices: c.Slices(), Allocated: c.allocated(), Claim: claim})
	if err != nil || allocation == nil {
		return nil, err
	}
	claim.Status.Allocation = allocation
	if c.Claims == nil {
		c.Claims = make(map[string]*resourceapi.ResourceClaim)
	}
	if c.Claims[name] != nil {
		return nil, fmt.Errorf("there is a claim %s already", name)
	}
	c.Claims[name] = claim
	return allocation.Devices.Results, nil
}

// allocated lists the results of all claims, in the order of their names.
func (c *Cluster) allocated() []resourceapi.DeviceRequestAllocationResult {
	var out []resourceapi.DeviceRequestAllocationResult
	for _, name := range slices.Sorted(maps.Keys(c.Claims)) {
		out = append(out, c.Claims[name].Status.Allocation.Devices.Results...)
	}
	return out
}

func (c *Cluster) allocatedNames() []gpu.DeviceName {
	var out []gpu.DeviceName
	for _, r := range c.allocated() {
		out = append(out, gpu.DeviceName(r.Device))
	}
	return out
}
