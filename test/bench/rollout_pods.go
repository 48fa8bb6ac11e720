package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
)

// pluginStart is how long a plugin takes from its start until it is registered.
const pluginStart = 3 * time.Second

// playedPods are the pods of a DaemonSet on nodes without machines. The benchmark does in
// place of scheduler and kubelets what there is to do for each.
type playedPods struct {
	watched[*seenPods]
	kube  kubernetes.Interface
	tasks chan *corev1.Pod
}

// seenPods counts the pods that were seen, by their image.
type seenPods struct {
	nodes int
	pods  map[string]seenPod // by name
	there map[string]int
	ready map[string]int
	least int // ready pods of all images
}

type seenPod struct {
	image string
	ready bool
}

// playPods follows and plays the pods until ctx ends.
func playPods(ctx context.Context, running *sync.WaitGroup, kube kubernetes.Interface, nodes int) (*playedPods, error) {
	events, err := watchtools.NewRetryWatcherWithContext(ctx, "1", &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return kube.CoreV1().Pods("default").Watch(ctx, o)
		},
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return kube.CoreV1().Pods("default").List(ctx, o)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("watch pods: %w", err)
	}
	p := &playedPods{kube: kube, tasks: make(chan *corev1.Pod, 10*nodes), watched: watched[*seenPods]{
		timeout: timeout + time.Duration(nodes)*timeoutPerNode,
		seen:    &seenPods{nodes: nodes, pods: map[string]seenPod{}, there: map[string]int{}, ready: map[string]int{}},
	}}
	running.Go(func() {
		follow(&p.watched, events, "pods", func(t watch.EventType, pod *corev1.Pod, _ time.Duration) {
			p.seen.add(t, pod)
			if t != watch.Deleted {
				p.tasks <- pod
			}
		})
	})
	for range atOnce {
		running.Go(func() {
			for {
				select {
				case pod := <-p.tasks:
					if err := p.play(ctx, pod); err != nil && ctx.Err() == nil {
						p.mu.Change(func() { p.err = err })
					}
				case <-ctx.Done():
					return
				}
			}
		})
	}
	return p, nil
}

// play does what comes next for a pod: it binds it, makes it ready a while later, or ends it.
func (p *playedPods) play(ctx context.Context, pod *corev1.Pod) (err error) {
	pods := p.kube.CoreV1().Pods(pod.Namespace)
	switch {
	case pod.DeletionTimestamp != nil:
		err = pods.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0)), Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
	case pod.Spec.NodeName == "":
		terms := pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		err = pods.Bind(ctx, &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Name: pod.Name, UID: pod.UID},
			Target:     corev1.ObjectReference{Kind: "Node", Name: terms[0].MatchFields[0].Values[0]},
		}, metav1.CreateOptions{})
	case pod.Status.Phase == corev1.PodPending && imageOf(pod) != badImage:
		time.AfterFunc(pluginStart, func() {
			pod = pod.DeepCopy()
			pod.Status.Phase = corev1.PodRunning
			pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()})
			_, err := pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
			if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && ctx.Err() == nil {
				p.mu.Change(func() { p.err = err })
			}
		})
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // changed since; its event is on its way
	}
	return err
}

func imageOf(pod *corev1.Pod) string { return pod.Spec.Containers[0].Image }

func (s *seenPods) add(t watch.EventType, pod *corev1.Pod) {
	before, was := s.pods[pod.Name]
	s.count(before, was, -1)
	delete(s.pods, pod.Name)
	if t != watch.Deleted {
		now := seenPod{image: imageOf(pod)}
		for _, c := range pod.Status.Conditions {
			now.ready = now.ready || c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && pod.DeletionTimestamp == nil
		}
		s.pods[pod.Name] = now
		s.count(now, true, 1)
	}
	s.least = min(s.least, s.allReady())
}

func (s *seenPods) count(p seenPod, is bool, n int) {
	if is {
		s.there[p.image] += n
	}
	if p.ready {
		s.ready[p.image] += n
	}
}

func (s *seenPods) allReady() (n int) {
	for _, ready := range s.ready {
		n += ready
	}
	return n
}

// begin starts to count how many nodes are without a ready plugin.
func (p *playedPods) begin() { p.mu.Change(func() { p.seen.least = p.seen.allReady() }) }

// worst returns how many pods of an image there are, and how many nodes have been without a
// ready plugin at once since begin.
func (p *playedPods) worst(image string) (there, unavailable int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen.there[image], p.seen.nodes - p.seen.least
}
