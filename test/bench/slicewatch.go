package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

// sliceWatch follows the driver's slices as the API server shows them.
type sliceWatch struct{ watched[*seenSlices] }

// seenSlices has the slices that a sliceWatch has seen, and counts.
type seenSlices struct {
	slices map[string]*resourcev1.ResourceSlice
	writes map[string]int
	last   time.Duration // when a slice last changed
	// tainted has the GPUs with a tainted device, and since when.
	tainted map[simulatedGPU]time.Duration
}

// simulatedGPU names a GPU by node and index.
type simulatedGPU struct {
	node  string
	index int64
}

// watchSlices follows the slices that are selected until ctx ends.
func watchSlices(ctx context.Context, running *sync.WaitGroup, kube kubernetes.Interface, selected metav1.ListOptions) (*sliceWatch, error) {
	list, err := kube.ResourceV1().ResourceSlices().List(ctx, selected)
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	w := &sliceWatch{watched[*seenSlices]{timeout: timeout, seen: &seenSlices{
		slices: map[string]*resourcev1.ResourceSlice{}, writes: map[string]int{}, tainted: map[simulatedGPU]time.Duration{},
	}}}
	for i := range list.Items {
		w.seen.slices[list.Items[i].Name] = &list.Items[i]
	}
	selected.ResourceVersion = list.ResourceVersion
	events, err := kube.ResourceV1().ResourceSlices().Watch(ctx, selected)
	if err != nil {
		return nil, fmt.Errorf("watch ResourceSlices: %w", err)
	}
	running.Go(func() { follow(&w.watched, events, "ResourceSlices", w.seen.add) })
	return w, nil
}

func (s *seenSlices) add(t watch.EventType, slice *resourcev1.ResourceSlice, at time.Duration) {
	s.last = at
	s.writes[slice.Name]++
	if t == watch.Deleted {
		delete(s.slices, slice.Name)
		return
	}
	s.slices[slice.Name] = slice
	if slice.Spec.NodeName == nil {
		return
	}
	for _, d := range slice.Spec.Devices {
		index := d.Attributes["index"].IntValue
		if index == nil {
			continue
		}
		g := simulatedGPU{*slice.Spec.NodeName, *index}
		_, before := s.tainted[g]
		switch tainted := len(d.Taints) > 0; {
		case tainted && !before:
			s.tainted[g] = at
		case !tainted:
			delete(s.tainted, g)
		}
	}
}

// complete reports whether the pools of so many nodes are published.
func (s *seenSlices) complete(nodes int) bool {
	missing := map[string]int64{}
	for _, slice := range s.slices {
		pool := slice.Spec.Pool
		if _, ok := missing[pool.Name]; !ok {
			missing[pool.Name] = pool.ResourceSliceCount
		}
		missing[pool.Name]--
	}
	return len(missing) == nodes && !slices.ContainsFunc(slices.Collect(maps.Values(missing)), func(n int64) bool { return n != 0 })
}

// reset forgets the writes that were seen, and returns how many slices there are.
func (w *sliceWatch) reset() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.seen.writes)
	return len(w.seen.slices)
}

// writes returns how often the slice was written that was written most often, how many
// were written at all, and how many more than once.
func (w *sliceWatch) writes() (most, written, again int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.seen.writes {
		most = max(most, n)
		if n > 1 {
			again++
		}
	}
	return most, len(w.seen.writes), again
}

func (w *sliceWatch) lastChange() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen.last
}
