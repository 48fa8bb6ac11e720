// Package feed follows a cluster's GPUs by watches with the rights of the user: it keeps the
// data of the page of kubectl gpu web, and of kubectl gpu slots --watch, up to date. It
// writes nothing to the cluster.
package feed

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// SourceOptions are about the cluster and the user.
type SourceOptions struct {
	// Cluster is the cluster's name on the page.
	Cluster string
	// Namespace to read where the user may not read all namespaces.
	Namespace string
	// OnNotes, if it isn't nil, is called with the notes of the page each time they may
	// have changed, by one goroutine.
	OnNotes func([]Note)
	// PoolLabels are labels of nodes that name their pools, the preferred first.
	PoolLabels []string
}

// Source reads the cluster, and keeps the page's data up to date.
type Source struct {
	options SourceOptions
	board   *board

	slices, claims, inventories, policies, rules, nodes, pods *feed

	wake  chan struct{} // holds one: something is to be done
	mu    sync.Mutex
	dirty sets.Set[string] // nodes to derive again
	all   bool             // all nodes are
}

// gather is how long changes are collected before the page gets them.
const gather = 200 * time.Millisecond

// NewSource makes a source, which Run starts.
func NewSource(r Resources, o SourceOptions) (*Source, error) {
	s := &Source{options: o, board: newBoard(), wake: make(chan struct{}, 1), dirty: sets.New[string]()}
	for _, x := range []struct {
		feed **feed
		Resource
		of func(any) []string
	}{
		{&s.slices, r.Slices, nodeOfSlice},
		{&s.claims, r.Claims, nodesOfClaim},
		{&s.inventories, r.Inventories, nameOf},
		{&s.policies, r.Policies, nodesOfPolicy},
		{&s.rules, r.TaintRules, nil},
		{&s.nodes, r.Nodes, nameOf},
		{&s.pods, r.PendingPods, nodeOfPod},
	} {
		if x.Name == "" {
			continue
		}
		f, err := newFeed(x.Resource, o.Namespace, x.of, s.touch, s.touchAll)
		if err != nil {
			return nil, err
		}
		*x.feed = f
	}
	return s, nil
}

func (s *Source) feeds() []*feed {
	all := []*feed{s.slices, s.claims, s.inventories, s.policies, s.rules, s.nodes, s.pods}
	return slices.DeleteFunc(all, func(f *feed) bool { return f == nil })
}

func nodeOfSlice(obj any) []string {
	if o, ok := obj.(*resourceapi.ResourceSlice); ok && o.Spec.NodeName != nil {
		return []string{*o.Spec.NodeName}
	}
	return nil
}

// nodesOfClaim are those whose GPUs the claim has: a pool has its node's name.
func nodesOfClaim(obj any) []string {
	o, ok := obj.(*resourceapi.ResourceClaim)
	if !ok || o.Status.Allocation == nil {
		return nil
	}
	out := sets.New[string]()
	for _, r := range o.Status.Allocation.Devices.Results {
		if r.Driver == gpu.DriverName {
			out.Insert(r.Pool)
		}
	}
	return sets.List(out)
}

// noNode stands, among the names of nodes, for the part of the page that isn't of one.
const noNode = ""

// nodesOfPolicy are those that its status lists.
func nodesOfPolicy(obj any) []string {
	out := []string{noNode}
	if o, ok := obj.(*v1alpha1.SharingPolicy); ok {
		for _, n := range o.Status.Served {
			out = append(out, n.Node)
		}
	}
	return out
}

// nodeOfPod is its node, or the cluster for a pod without one, which may wait.
func nodeOfPod(obj any) []string {
	if o, ok := obj.(*corev1.Pod); ok {
		return []string{o.Spec.NodeName}
	}
	return nil
}

func nameOf(obj any) []string {
	switch o := obj.(type) {
	case *v1alpha1.GPUInventory:
		return []string{o.Name}
	case *corev1.Node:
		return []string{o.Name}
	}
	return nil
}

// touch notes that nodes are to be derived again, nil for all.
func (s *Source) touch(nodes []string) {
	s.mu.Lock()
	s.dirty.Insert(nodes...)
	s.all = s.all || nodes == nil
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *Source) touchAll() { s.touch(nil) }

// Run reads the cluster until the context ends.
func (s *Source) Run(ctx context.Context) {
	var group sync.WaitGroup
	defer group.Wait()
	for _, f := range s.feeds() {
		group.Go(func() { f.informer.RunWithContext(ctx) })
	}
	for started := false; ; {
		started = s.derive(started)
		select {
		case <-time.After(gather):
		case <-ctx.Done():
			return
		}
		if !started {
			continue // an informer doesn't say when it has synced
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return
		}
	}
}

// derive puts changed data on the board, and reports whether everything has been read
// once. Before, the board has only the names of the resources that are being read.
func (s *Source) derive(started bool) bool {
	head := Cluster{Name: s.options.Cluster}
	for _, f := range s.feeds() {
		if !started && !f.ready() {
			head.Reading = append(head.Reading, f.Name)
		}
		if n, ok := f.note(); ok && !slices.ContainsFunc(head.Notes, func(m Note) bool { return m.Text == n.Text }) {
			head.Notes = append(head.Notes, n)
		}
	}
	changed := make(map[string]nodeJSON)
	if len(head.Reading) == 0 {
		for _, name := range s.takeDirty() {
			changed[name] = s.node(name)
		}
		head.Waiting = view.Waiting(items[corev1.Pod](s.pods))
		head.Policies = view.Policies(items[v1alpha1.SharingPolicy](s.policies))
	}
	if s.options.OnNotes != nil {
		s.options.OnNotes(head.Notes)
	}
	read := len(head.Reading) == 0
	s.board.put(Encode(head), changed, read)
	return read
}

// takeDirty returns the names of the nodes to derive again.
func (s *Source) takeDirty() []string {
	s.mu.Lock()
	dirty, all := s.dirty, s.all
	s.dirty, s.all = sets.New[string](), false
	s.mu.Unlock()
	if all {
		for _, f := range []*feed{s.slices, s.claims, s.inventories} {
			dirty.Insert(f.informer.GetIndexer().ListIndexFuncValues(byNode)...)
		}
	}
	dirty.Delete(noNode)
	return slices.Sorted(maps.Keys(dirty))
}

// Cluster is the part of the page's data that isn't of one node.
type Cluster struct {
	Name string `json:"name"`
	// Reading are the resources that haven't been read yet.
	Reading []string `json:"reading,omitempty"`
	// Notes name the resources that can't be read.
	Notes    []Note            `json:"notes,omitempty"`
	Waiting  []view.WaitingPod `json:"waiting,omitempty"`
	Policies []view.Policy     `json:"policies,omitempty"`
}

// node derives a node's part of the page; none if it has no GPUs and no news. PodGroups are
// shown as such: most of their pods aren't pending, and so not read.
func (s *Source) node(name string) nodeJSON {
	o := view.Objects{
		Slices: on[resourceapi.ResourceSlice](s.slices, name), Claims: on[resourceapi.ResourceClaim](s.claims, name),
		Inventories: on[v1alpha1.GPUInventory](s.inventories, name), Policies: on[v1alpha1.SharingPolicy](s.policies, name),
		TaintRules: items[resourceapi.DeviceTaintRule](s.rules), Pods: slices.DeleteFunc(on[corev1.Pod](s.pods, name), inGroup),
		SomeClaims: !s.claims.complete(), Nodes: on[corev1.Node](s.nodes, name),
	}
	built := view.Build(o).Nodes
	i := slices.IndexFunc(built, func(n view.Node) bool { return n.Name == name })
	if i < 0 {
		return nodeJSON{}
	}
	n := built[i]
	var labels map[string]string
	for _, of := range o.Nodes {
		labels = of.Labels
	}
	page := view.Page(n, view.Pool(n, labels, s.options.PoolLabels))
	return nodeJSON{Encode(page), Encode(page.Outline())}
}

func inGroup(p corev1.Pod) bool { return p.Spec.SchedulingGroup != nil }

// Encode returns the JSON of a value of this program.
func Encode(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("encode %T: %v", v, err)) // types of this program, all of which have a JSON
	}
	return raw
}
