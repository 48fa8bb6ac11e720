package node

import (
	"context"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// warnings writes events about claims, pods and the node's GPUInventory.
type warnings struct {
	nodeName    string
	client      kubernetes.Interface
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

// newWarnings returns warnings that wait for run. Events are combined only if their messages
// are the same, because messages name the GPU.
func newWarnings(client kubernetes.Interface, nodeName string) *warnings {
	b := record.NewBroadcasterWithCorrelatorOptions(record.CorrelatorOptions{
		BurstSize: eventBurst, QPS: eventsPerSecond,
		KeyFunc: func(e *corev1.Event) (aggregate, local string) {
			aggregate, local = record.EventAggregatorByReasonFunc(e)
			return aggregate + local, local
		},
	})
	return &warnings{
		nodeName: nodeName, client: client, broadcaster: b,
		recorder: b.NewRecorder(scheme.Scheme, corev1.EventSource{Component: userAgent, Host: nodeName}),
	}
}

// run sends events until ctx ends.
func (w *warnings) run(ctx context.Context) error {
	w.broadcaster.StartRecordingToSink(&corev1client.EventSinkImpl{Interface: w.client.CoreV1().Events("")})
	<-ctx.Done()
	w.broadcaster.Shutdown()
	return nil
}

// event writes an event. It doesn't block.
func (w *warnings) event(about corev1.ObjectReference, eventType, reason, message string) {
	w.recorder.Event(&about, eventType, reason, message)
}

// warnHolder writes a warning about the claim of a record. It doesn't block.
func (w *warnings) warnHolder(r holding.Record, reason, message string) {
	w.recorder.Event(&corev1.ObjectReference{
		APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim", Namespace: r.Namespace, Name: r.Name, UID: types.UID(r.ClaimUID),
	}, corev1.EventTypeWarning, reason, message)
}

// OnPod writes a warning about a pod. It doesn't block.
func (w *warnings) OnPod(p healthmonitor.Pod, reason, message string) {
	w.recorder.Event(&corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID),
	}, corev1.EventTypeWarning, reason, message)
}

// OnNode writes an event about the node's GPUInventory. It doesn't block.
func (w *warnings) OnNode(eventType, reason, message string) {
	uid, _ := w.inventory.Load().(types.UID)
	w.recorder.Event(&corev1.ObjectReference{
		APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUInventory", Name: w.nodeName, UID: uid,
	}, eventType, reason, message)
}
