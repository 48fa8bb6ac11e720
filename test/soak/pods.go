package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/tessera-dra/tessera/test/stack"
)

const (
	namespace = "soak"
	// patience is how long a pod may take to run, or to go, before it counts as stuck: the
	// kubelet's pauses grow to two minutes, and a node that lost power takes one.
	patience = 5 * time.Minute
)

// workers is the template of the claims that each worker's pods have. There is room for
// all at the same time, so that a pod that waits waits for something that failed.
var workers = []string{"whole", "whole", "small", "small", "small", "large", "share", "share", "share", "turn", "turn", "turn"}

// pods are pods that come and go.
type pods struct {
	client typedv1.PodInterface
	log    func(format string, args ...any)

	ended, stuck atomic.Int64
}

// run has each worker make one pod after the other, until during ends. Each pod is awaited
// to its end, which ctx cuts short.
func (p *pods) run(ctx, during context.Context, seed uint64) {
	var all sync.WaitGroup
	for i, template := range workers {
		all.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			for n := 0; during.Err() == nil; n++ {
				p.runOne(ctx, fmt.Sprintf("%s-%d-%d", template, i, n), template, random)
			}
		})
	}
	all.Wait()
}

// runOne makes a pod, lets it run for a moment, deletes it, and waits until it is gone. Some
// are deleted before they run, and some by force.
func (p *pods) runOne(ctx context.Context, name, template string, random *rand.Rand) {
	early, force := random.IntN(10) == 0, random.IntN(10) == 0
	grace := int64(1)
	if force {
		grace = 0
	}
	pause := time.Duration(random.IntN(2000)) * time.Millisecond
	pod := stack.Pod(name, template)
	// A node that lost power comes back in seconds.
	pod.Spec.Tolerations = []corev1.Toleration{{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists}, {Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists}}
	p.await(ctx, name, "be created", func(ctx context.Context) (bool, error) {
		_, err := p.client.Create(ctx, pod, metav1.CreateOptions{})
		return err == nil || apierrors.IsAlreadyExists(err), err
	})
	if !early {
		p.await(ctx, name, "run", func(ctx context.Context) (bool, error) {
			got, err := p.client.Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return false, err
			}
			return got.Status.Phase == corev1.PodRunning, fmt.Errorf("it is %s: %v", got.Status.Phase, got.Status.ContainerStatuses)
		})
	}
	sleep(ctx, pause)
	p.await(ctx, name, "be deleted", func(ctx context.Context) (bool, error) {
		err := p.client.Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &grace})
		return err == nil || apierrors.IsNotFound(err), err
	})
	p.await(ctx, name, "be gone", func(ctx context.Context) (bool, error) {
		_, err := p.client.Get(ctx, name, metav1.GetOptions{})
		return apierrors.IsNotFound(err), err
	})
	p.ended.Add(1)
}

// await repeats a step until it is done. A pod for which that takes too long counts as
// stuck, and goes on with the next step. An API server that is away has time to
// come back.
func (p *pods) await(ctx context.Context, name, what string, step func(context.Context) (bool, error)) {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, patience, true, func(ctx context.Context) (done bool, _ error) {
		done, last = step(ctx)
		return done, nil
	})
	if err != nil && ctx.Err() == nil {
		p.stuck.Add(1)
		p.log("STUCK: pod %s was to %s: %v", name, what, last)
	}
}

// sleep waits, unless the context ends before.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
