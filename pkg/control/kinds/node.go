package kinds

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Node is the kind of Nodes.
func Node() schema.GroupVersionKind { return schema.GroupVersionKind{Version: "v1", Kind: "Node"} }

// NodeMetadata is a Node of which the metadata alone is read.
func NodeMetadata() *metav1.PartialObjectMetadata {
	node := &metav1.PartialObjectMetadata{}
	node.SetGroupVersionKind(Node())
	return node
}
