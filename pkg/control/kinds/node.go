package kinds

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Node is the kind of Nodes.
func Node() schema.GroupVersionKind { return schema.GroupVersionKind{Version: "v1", Kind: "Node"} }

// NodeMetadata is a Node of which the metadata alone is read.
func NodeMetadata() *metav1.PartialObjectMetadata {
	node := &metav1.PartialObjectMetadata{}
	node.SetGroupVersionKind(Node())
	return node
}

// LabelManager is the field manager of the labels of Nodes that the controller writes: it changes
// and removes only labels that this manager owns.
const LabelManager = "tessera-node-labels"

// HasOurLabels reports whether the controller owns labels of a Node.
func HasOurLabels(node client.Object) bool {
	return slices.ContainsFunc(node.GetManagedFields(), func(m metav1.ManagedFieldsEntry) bool { return m.Manager == LabelManager })
}

// Request is the request to reconcile what belongs to a node.
func Request(node string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: node}}
}
