package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"github.com/tessera-dra/tessera/pkg/notify"
)

// patience is how long a change of one node may take, and of each further one.
// Nothing is that slow unless it is broken.
const patience, patienceEach = 3 * time.Minute, 2 * time.Second

// sliceWatch follows the driver's slices as the API server shows them.
type sliceWatch struct {
	patience time.Duration

	mu   notify.Mutex
	seen seenSlices
	last time.Duration // when it last saw a change
	err  error
}

// seenSlices has the slices that a sliceWatch has seen, and counts.
type seenSlices struct {
	slices map[string]*resourcev1.ResourceSlice
	writes map[string]int
	// tainted has the GPUs with a tainted device, and since when.
	tainted map[paperGPU]time.Duration
}

// paperGPU names a GPU by node and index.
type paperGPU struct {
	node  string
	index int64
}

// watchSlices follows the slices that are selected until ctx ends.
func watchSlices(ctx context.Context, running *sync.WaitGroup, kube kubernetes.Interface, selected metav1.ListOptions) (*sliceWatch, error) {
	list, err := kube.ResourceV1().ResourceSlices().List(ctx, selected)
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	w := &sliceWatch{patience: patience, seen: seenSlices{slices: map[string]*resourcev1.ResourceSlice{}, writes: map[string]int{}, tainted: map[paperGPU]time.Duration{}}}
	for i := range list.Items {
		w.seen.slices[list.Items[i].Name] = &list.Items[i]
	}
	selected.ResourceVersion = list.ResourceVersion
	events, err := kube.ResourceV1().ResourceSlices().Watch(ctx, selected)
	if err != nil {
		return nil, fmt.Errorf("watch ResourceSlices: %w", err)
	}
	running.Go(func() {
		defer events.Stop()
		for e := range events.ResultChan() {
			at := monotonic()
			s, ok := e.Object.(*resourcev1.ResourceSlice)
			w.mu.Change(func() {
				if !ok {
					w.err = fmt.Errorf("watch ResourceSlices: %v", e.Object)
					return
				}
				w.last = at
				w.seen.add(e.Type, s, at)
			})
		}
		w.mu.Change(func() { w.err = errors.Join(w.err, errors.New("the watch of ResourceSlices ended")) })
	})
	return w, nil
}

func (s *seenSlices) add(t watch.EventType, slice *resourcev1.ResourceSlice, at time.Duration) {
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
		g := paperGPU{*slice.Spec.NodeName, *index}
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

// await waits until what was seen is as wanted, or something has failed.
func (w *sliceWatch) await(ctx context.Context, failed <-chan error, ok func(seenSlices) bool) error {
	ctx, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	for {
		w.mu.Lock()
		done, err, changed := ok(w.seen), w.err, w.mu.Changed()
		w.mu.Unlock()
		if done || err != nil {
			return err
		}
		select {
		case <-changed:
		case err := <-failed:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
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
	return w.last
}

// monotonic is the time of the kernel log.
func monotonic() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err) // every Linux has this clock
	}
	return time.Duration(now.Nano())
}
