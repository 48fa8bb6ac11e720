// Package events writes Kubernetes events about claims, their pods and the node's GPUInventory.
package events

import (
	"context"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Events takes in events, which Run sends. Its methods may be called concurrently; none but Run
// blocks.
type Events struct {
	nodeName    string
	broadcaster record.EventBroadcaster
	recorder    record.EventRecorder
	// inventory is the UID of the node's GPUInventory; empty: not seen yet.
	inventory atomic.Value
}

const (
	// eventBurst is how many events about one object may come together: all GPUs of a node
	// are one object, its GPUInventory, and each of 16 may have a few.
	eventBurst = 200
	// eventsPerSecond is how many more may follow.
	eventsPerSecond = 1. / 6
)

// New returns the events of a component on a node. They are combined only if their messages are
// the same, because messages name the GPU.
func New(component, nodeName string) *Events {
	b := record.NewBroadcasterWithCorrelatorOptions(record.CorrelatorOptions{
		BurstSize: eventBurst, QPS: eventsPerSecond,
		KeyFunc: func(e *corev1.Event) (aggregate, local string) {
			aggregate, local = record.EventAggregatorByReasonFunc(e)
			return aggregate + local, local
		},
	})
	return &Events{
		nodeName: nodeName, broadcaster: b,
		recorder: b.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component, Host: nodeName}),
	}
}

// Run sends events to the API server until ctx ends; it returns nil then.
func (e *Events) Run(ctx context.Context, server record.EventSink) error {
	e.broadcaster.StartRecordingToSink(server)
	<-ctx.Done()
	e.broadcaster.Shutdown()
	return nil
}

// SetInventory sets which GPUInventory OnNode is about.
func (e *Events) SetInventory(uid types.UID) { e.inventory.Store(uid) }

// WarnClaim writes a warning about a claim.
func (e *Events) WarnClaim(c kubeletplugin.NamespacedObject, reason, message string) {
	e.recorder.Event(&corev1.ObjectReference{
		APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim", Namespace: c.Namespace, Name: c.Name, UID: c.UID,
	}, corev1.EventTypeWarning, reason, message)
}

// WarnClaimOf writes a warning about the claim of a record.
func (e *Events) WarnClaimOf(r holding.Record, reason, message string) {
	e.WarnClaim(kubeletplugin.NamespacedObject{
		NamespacedName: types.NamespacedName{Namespace: r.Namespace, Name: r.Name}, UID: types.UID(r.ClaimUID),
	}, reason, message)
}

// WarnPod writes a warning about a pod.
func (e *Events) WarnPod(namespace string, p holding.Pod, reason, message string) {
	e.onPod(namespace, p, corev1.EventTypeWarning, reason, message)
}

// NotePod writes an event that is no warning about a pod.
func (e *Events) NotePod(namespace string, p holding.Pod, reason, message string) {
	e.onPod(namespace, p, corev1.EventTypeNormal, reason, message)
}

func (e *Events) onPod(namespace string, p holding.Pod, eventType, reason, message string) {
	e.recorder.Event(&corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: namespace, Name: p.Name, UID: types.UID(p.UID),
	}, eventType, reason, message)
}

// OnNode writes an event about the node's GPUInventory.
func (e *Events) OnNode(eventType, reason, message string) {
	uid, _ := e.inventory.Load().(types.UID)
	e.recorder.Event(&corev1.ObjectReference{
		APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUInventory", Name: e.nodeName, UID: uid,
	}, eventType, reason, message)
}
