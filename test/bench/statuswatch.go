package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tessera-dra/tessera/pkg/notify"
)

// statusWatch follows the health of the devices in a pod's status.
type statusWatch struct {
	mu   notify.Mutex
	seen map[string]seenHealth // by device name
	err  error
}

// seenHealth is the health of a device, and since when it is that.
type seenHealth struct {
	health corev1.ResourceHealthStatus
	since  time.Duration
}

// watchStatus follows a running pod until ctx ends.
func watchStatus(ctx context.Context, running *sync.WaitGroup, kube kubernetes.Interface, pod string) (*statusWatch, error) {
	events, err := watchPod(ctx, kube, pod)
	if err != nil {
		return nil, err
	}
	w := &statusWatch{seen: map[string]seenHealth{}}
	running.Go(func() {
		defer events.Stop()
		for e := range events.ResultChan() {
			at := monotonic()
			p, ok := e.Object.(*corev1.Pod)
			w.mu.Change(func() {
				if !ok {
					w.err = fmt.Errorf("watch pod %s: %v", pod, e.Object)
					return
				}
				w.add(p, at)
			})
		}
		w.mu.Change(func() { w.err = errors.Join(w.err, fmt.Errorf("the watch of pod %s ended", pod)) })
	})
	return w, nil
}

func (w *statusWatch) add(p *corev1.Pod, at time.Duration) {
	for _, c := range p.Status.ContainerStatuses {
		for _, claim := range c.AllocatedResourcesStatus {
			for _, r := range claim.Resources {
				id := string(r.ResourceID)
				name := id[strings.LastIndex(id, "-gpu-")+1:] // of a CDI device: claim's UID, device
				if w.seen[name].health != r.Health {
					w.seen[name] = seenHealth{r.Health, at}
				}
			}
		}
	}
}

// await waits until the health of the devices is as wanted.
func (w *statusWatch) await(ctx context.Context, ok func(map[string]seenHealth) bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
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
		case <-ctx.Done():
			return fmt.Errorf("%w; last seen: %v", ctx.Err(), w.seen)
		}
	}
}

func (w *statusWatch) since(device string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen[device].since
}
