package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
)

// poolWatch follows the pools of many nodes. Of each slice it keeps a few bytes.
type poolWatch struct{ watched[*seenPools] }

// seenPools has the pools that a poolWatch has seen.
type seenPools struct {
	pools map[string]*seenPool // by node
	// complete is how many pools are complete, by the number of their slices.
	complete map[int64]int
	// writes is how often slices were created, updated or deleted.
	writes int
	last   time.Duration // when a slice last changed
}

// seenPool has the slices of a node's pool.
type seenPool struct {
	slices map[string]seenSlice // by name
	// size is the number of slices if the pool is complete, and 0 otherwise.
	size int64
	// driver is the driver version that all devices of the complete pool have.
	driver string
}

type seenSlice struct {
	generation, count int64
	driver            string // "" if it has no devices
}

// watchPools follows the slices of all nodes until ctx ends.
func watchPools(ctx context.Context, running *sync.WaitGroup, kube kubernetes.Interface) (*poolWatch, error) {
	list, err := kube.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	if len(list.Items) > 0 {
		return nil, fmt.Errorf("watch pools: %d ResourceSlices are there already", len(list.Items))
	}
	events, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return kube.ResourceV1().ResourceSlices().List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return kube.ResourceV1().ResourceSlices().Watch(ctx, o)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("watch ResourceSlices: %w", err)
	}
	w := &poolWatch{watched[*seenPools]{timeout: timeout, seen: &seenPools{pools: map[string]*seenPool{}, complete: map[int64]int{}}}}
	running.Go(func() { follow(&w.watched, events, "ResourceSlices", w.seen.add) })
	return w, nil
}

func (s *seenPools) add(t watch.EventType, slice *resourcev1.ResourceSlice, at time.Duration) {
	if slice.Spec.NodeName == nil {
		return
	}
	s.writes++
	s.last = at
	p := s.pools[*slice.Spec.NodeName]
	if p == nil {
		p = &seenPool{slices: map[string]seenSlice{}}
		s.pools[*slice.Spec.NodeName] = p
	}
	s.complete[p.size]--
	if t == watch.Deleted {
		delete(p.slices, slice.Name)
	} else {
		p.slices[slice.Name] = seenSlice{slice.Spec.Pool.Generation, slice.Spec.Pool.ResourceSliceCount, driverOf(slice)}
	}
	p.judge()
	s.complete[p.size]++
}

// judge sets size and driver.
func (p *seenPool) judge() {
	var newest, there int64
	for _, s := range p.slices {
		newest = max(newest, s.generation)
	}
	p.size, p.driver = 0, ""
	var count int64
	for _, s := range p.slices {
		if s.generation != newest {
			continue
		}
		there, count = there+1, s.count
		switch {
		case s.driver == "" || s.driver == p.driver:
		case p.driver == "":
			p.driver = s.driver
		default:
			return // slices of two reports
		}
	}
	if there == count && int(there) == len(p.slices) {
		p.size = count
	}
}

func driverOf(s *resourcev1.ResourceSlice) string {
	for _, d := range s.Spec.Devices {
		if v := d.Attributes["driverVersion"].VersionValue; v != nil {
			return *v
		}
	}
	return ""
}

// shows reports whether a node's pool is complete, with a driver version.
func (s *seenPools) shows(node, driver string) bool {
	p := s.pools[node]
	return p != nil && p.size > 0 && p.driver == driver
}

// published returns the number of complete pools.
func (s *seenPools) published() (n int) {
	for size, pools := range s.complete {
		if size > 0 {
			n += pools
		}
	}
	return n
}

// names lists the names of a node's slices.
func (w *poolWatch) names(node string) (names []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.seen.pools[node]; p != nil {
		for name := range p.slices {
			names = append(names, name)
		}
	}
	return names
}

func (w *poolWatch) counts() (writes int, last time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen.writes, w.seen.last
}
