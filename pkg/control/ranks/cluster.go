package ranks

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	podresource "k8s.io/component-helpers/resource"

	"github.com/tessera-dra/tessera/pkg/control/pages"
)

// Cluster caches of Nodes and pods what ranks follow from.
type Cluster struct {
	// Nodes and Pods must run. Events of pods lead to nothing: free CPU only decides which of
	// several unused nodes joins the reserve.
	Nodes, Pods cache.SharedIndexInformer
	// CPU is what the pods have asked for.
	CPU *CPU
}

// bound selects pods that have a node and haven't ended.
const bound = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"

// Watch returns a Cluster whose informers don't run yet. Of the labels of Nodes, it keeps one.
func Watch(kube kubernetes.Interface, poolLabel string) (*Cluster, error) {
	nodes, pods := kube.CoreV1().Nodes(), kube.CoreV1().Pods(metav1.NamespaceAll)
	c := &Cluster{CPU: &CPU{milli: make(map[string]int64)}}
	var err error
	c.Nodes, err = pages.NewInformer(kube, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return nodes.List(ctx, o) },
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return nodes.Watch(ctx, o)
		},
	}, &corev1.Node{}, func(obj any) (any, error) { return trimNode(obj, poolLabel), nil }, cache.Indexers{})
	if err != nil {
		return nil, err
	}
	c.Pods, err = pages.NewInformer(kube, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = bound
			return pods.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = bound
			return pods.Watch(ctx, o)
		},
	}, &corev1.Pod{}, trimPod, cache.Indexers{})
	if err != nil {
		return nil, err
	}
	if _, err := c.Pods.AddEventHandler(c.CPU.handler()); err != nil {
		return nil, fmt.Errorf("count what pods ask for: %w", err)
	}
	return c, nil
}

// trimNode returns a Node with only its identity, one label, its taints, whether pods may come, and
// its CPU.
func trimNode(obj any, label string) any {
	n, ok := obj.(*corev1.Node)
	if !ok {
		return obj
	}
	small := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, DeletionTimestamp: n.DeletionTimestamp}}
	if value, has := n.Labels[label]; has {
		small.Labels = map[string]string{label: value}
	}
	small.Spec.Taints, small.Spec.Unschedulable = n.Spec.Taints, n.Spec.Unschedulable
	small.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: *n.Status.Allocatable.Cpu()}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			small.Status.Conditions = []corev1.NodeCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return small
}

// trimPod returns a pod with only its identity, its node, and the CPU that it asks for.
func trimPod(obj any) (any, error) {
	p, ok := obj.(*corev1.Pod)
	if !ok {
		return obj, nil
	}
	small := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion}}
	small.Spec.NodeName = p.Spec.NodeName
	if milli := asked(p); milli > 0 {
		cpu := corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(milli, resource.DecimalSI)}
		small.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: cpu}}}
	}
	return small, nil
}

// asked returns the CPU that a pod asks for, in thousandths.
func asked(p *corev1.Pod) int64 {
	requests := podresource.PodRequests(p, podresource.PodResourcesOptions{})
	return requests.Cpu().MilliValue()
}

// CPU sums up by node what pods have asked for.
type CPU struct {
	mu    sync.Mutex
	milli map[string]int64
}

func (c *CPU) used(node string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.milli[node]
}

func (c *CPU) handler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(now any) { c.add(now, 1) },
		UpdateFunc: func(before, now any) { c.add(before, -1); c.add(now, 1) },
		DeleteFunc: func(before any) {
			if gone, ok := before.(cache.DeletedFinalStateUnknown); ok {
				before = gone.Obj
			}
			c.add(before, -1)
		},
	}
}

func (c *CPU) add(obj any, times int64) {
	p, ok := obj.(*corev1.Pod)
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.milli[p.Spec.NodeName] += times * asked(p)
	if c.milli[p.Spec.NodeName] == 0 {
		delete(c.milli, p.Spec.NodeName)
	}
}
