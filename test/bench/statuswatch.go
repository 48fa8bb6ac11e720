package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

// statusWatch follows the health of the devices in a pod's status, by device name.
type statusWatch struct{ watched[map[string]seenHealth] }

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
	w := &statusWatch{watched[map[string]seenHealth]{timeout: timeout, seen: map[string]seenHealth{}}}
	running.Go(func() { follow(&w.watched, events, "pod "+pod, w.add) })
	return w, nil
}

func (w *statusWatch) add(_ watch.EventType, p *corev1.Pod, at time.Duration) {
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
	if err := w.watched.await(ctx, ok); err != nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		return fmt.Errorf("%w; last seen: %v", err, w.seen)
	}
	return nil
}

func (w *statusWatch) since(device string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen[device].since
}
