// Package feedtest has clusters without an API server, for tests of the page: their
// objects are published and allocated by the code that does it in real ones.
package feedtest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	fcache "k8s.io/client-go/tools/cache/testing"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
	"github.com/tessera-dra/tessera/test/allocators"
)

// Cluster serves objects by lists and watches.
type Cluster struct {
	Slices, Claims, Inventories, Policies, TaintRules, Nodes, Pods *fcache.FakeControllerSource

	names  map[string]bool // of claims
	mu     sync.Mutex
	denied map[string]bool // "list pods", and "list pods in" for one namespace too
}

// New makes an empty cluster.
func New() *Cluster {
	s := fcache.NewFakeControllerSource
	return &Cluster{Slices: s(), Claims: s(), Inventories: s(), Policies: s(), TaintRules: s(), Nodes: s(), Pods: s(), denied: make(map[string]bool), names: make(map[string]bool)}
}

// Deny takes rights away: "list pods" in all namespaces, "list pods in" in one,
// "watch nodes".
func (c *Cluster) Deny(rights ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range rights {
		c.denied[r] = true
	}
}

// Allow gives them back.
func (c *Cluster) Allow(right string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.denied, right)
}

func (c *Cluster) check(verb, plural, namespace string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	right := verb + " " + plural
	if namespace != "" {
		right += " in"
	}
	if c.denied[right] {
		return apierrors.NewForbidden(schema.GroupResource{Resource: plural}, "", nil)
	}
	return nil
}

// Resources are for feed.NewSource.
func (c *Cluster) Resources() feed.Resources {
	of := func(plural string, s *fcache.FakeControllerSource, r feed.Resource) feed.Resource {
		r.Name, r.Missing = plural, plural+" aren't shown"
		r.List = func(_ context.Context, namespace string, o metav1.ListOptions) (runtime.Object, error) {
			if err := c.check("list", plural, namespace); err != nil {
				return nil, err
			}
			return s.List(o)
		}
		r.Watch = func(_ context.Context, namespace string, o metav1.ListOptions) (watch.Interface, error) {
			if err := c.check("watch", plural, namespace); err != nil {
				return nil, err
			}
			w, err := s.Watch(o)
			if err != nil {
				return nil, err
			}
			return watch.Filter(w, func(e watch.Event) (watch.Event, bool) {
				e.Object = e.Object.DeepCopyObject() // receivers change it
				return e, true
			}), nil
		}
		return r
	}
	return feed.Resources{
		Slices:      of("resourceslices", c.Slices, feed.Resource{Example: &resourceapi.ResourceSlice{}}),
		Claims:      of("resourceclaims", c.Claims, feed.Resource{Example: &resourceapi.ResourceClaim{}, Namespaced: true}),
		Inventories: of("gpuinventories", c.Inventories, feed.Resource{Example: &v1alpha1.GPUInventory{}}),
		Policies:    of("sharingpolicies", c.Policies, feed.Resource{Example: &v1alpha1.SharingPolicy{}}),
		TaintRules:  of("devicetaintrules", c.TaintRules, feed.Resource{Example: &resourceapi.DeviceTaintRule{}, WhyIgnored: whyIgnored}),
		Nodes:       of("nodes", c.Nodes, feed.Resource{Example: &corev1.Node{}}),
		PendingPods: of("pods", c.Pods, feed.Resource{Example: &corev1.Pod{}, Namespaced: true}),
	}
}

// whyIgnored is a sentence on a rule whose name begins with "ignored".
func whyIgnored(obj any) string {
	if r, ok := obj.(*resourceapi.DeviceTaintRule); ok && strings.HasPrefix(r.Name, "ignored") {
		return "Rule " + r.Name + " is ignored."
	}
	return ""
}

// Objects are those that the model is made of.
func (c *Cluster) Objects() view.Objects {
	return view.Objects{
		Slices: all[resourceapi.ResourceSlice](c.Slices), Claims: all[resourceapi.ResourceClaim](c.Claims), Pods: all[corev1.Pod](c.Pods),
		Inventories: all[v1alpha1.GPUInventory](c.Inventories), Policies: all[v1alpha1.SharingPolicy](c.Policies),
		TaintRules: all[resourceapi.DeviceTaintRule](c.TaintRules),
	}
}

func all[T any](s *fcache.FakeControllerSource) []T {
	var out []T
	for _, obj := range s.Items {
		if o, ok := obj.(any).(*T); ok {
			out = append(out, *o)
		}
	}
	return out
}

// Machine is a node with GPUs, and the claims on it.
type Machine struct {
	*allocators.Cluster

	claims []*resourceapi.ResourceClaim
	copies int
}

// NewMachine makes a node of n GPUs of a model, with a plan for each.
func NewMachine(model string, n int, plan func(i int) v1alpha1.Plan) (*Machine, error) {
	node, err := offertest.Node(model, n)
	if err != nil {
		return nil, fmt.Errorf("simulate a node: %w", err)
	}
	plans := make(map[gpu.UUID]v1alpha1.Plan)
	for i, g := range node.GPUs {
		plans[g.UUID] = plan(i)
	}
	m := &Machine{Cluster: &allocators.Cluster{
		Node: node, Plans: plans, Allocator: allocators.NewLibrary(),
		Server: allocators.Server{Server: offer.Server{Counters: true, Multiple: true, Charged: true, MaxTainted: 64}, Form: publish.SplitCounters},
	}}
	m.Publish()
	return m, nil
}

// Claim has the scheduler's allocator give a pod a device; the pod is "" for a claim that
// no pod uses. A claim that nothing fits is an error.
func (m *Machine) Claim(namespace, name, pod string, r allocators.Request) error {
	got, err := m.Ask(context.Background(), name, r)
	if err == nil && len(got) == 0 {
		err = fmt.Errorf("nothing of %s fits", r)
	}
	if err != nil {
		return fmt.Errorf("claim %s: %w", name, err)
	}
	c := m.Claims[name]
	c.Namespace = namespace
	if pod != "" {
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod, UID: types.UID("pod " + pod)}}
	}
	m.claims = append(m.claims, c)
	return nil
}

// Add adds the machine to the cluster, as a node of the name with the labels. The node's
// name becomes part of those of claims and pods that there are already.
func (c *Cluster) Add(m *Machine, name string, labels map[string]string) {
	if m.copies == 0 {
		m.Publish() // for the conditions that its GPUs have got
	}
	inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: name}}
	node := m.Node
	node.Name = name
	inventory.SetFacts(&inv.Status, node)
	inv.Status.DriverVersion = "580.159.04"
	c.Inventories.Add(inv)
	c.Nodes.Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}})
	for i, s := range m.Slices() {
		s = s.DeepCopy()
		s.Name, s.Spec.NodeName, s.Spec.Pool.Name = fmt.Sprintf("%s-%d", name, i), &name, name
		c.Slices.Add(s)
	}
	for _, claim := range m.claims {
		claim = claim.DeepCopy()
		claim.UID = types.UID(name + "/" + claim.Name)
		for i := range claim.Status.Allocation.Devices.Results {
			claim.Status.Allocation.Devices.Results[i].Pool = name
		}
		if c.names[claim.Namespace+"/"+claim.Name] {
			claim.Name += "-" + name
			for i := range claim.Status.ReservedFor {
				by := &claim.Status.ReservedFor[i]
				by.Name += "-" + name
				by.UID += types.UID(name)
			}
		}
		c.names[claim.Namespace+"/"+claim.Name] = true
		c.Claims.Add(claim)
	}
	m.copies++
}

// Wait adds a pod that waits for devices.
func (c *Cluster) Wait(namespace, name, wants, message string, since time.Duration) {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(time.Now().Add(-since))}}
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: wants}}
	p.Status.Phase = corev1.PodPending
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: message}}
	c.Pods.Add(p)
}
