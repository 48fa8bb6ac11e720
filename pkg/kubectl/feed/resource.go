package feed

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// Resource is how one kind of objects is read, and a sentence for the case that it can't
// be.
type Resource struct {
	// Name is the plural, with the group: "gpuinventories.gpu.tessera.dev".
	Name string
	// Example is an object of the kind.
	Example runtime.Object
	// Missing names the information that the page lacks without the objects.
	Missing string
	// Absent explains that the server doesn't have the resource; empty: that is as good as
	// having none.
	Absent string
	// Namespaced: who may not list the objects of all namespaces may list those of one.
	Namespaced bool
	// WhyIgnored, if it isn't nil, returns a sentence for the user on an object that is
	// ignored; empty: it isn't.
	WhyIgnored func(obj any) string
	List       func(ctx context.Context, namespace string, o metav1.ListOptions) (runtime.Object, error)
	Watch      func(ctx context.Context, namespace string, o metav1.ListOptions) (watch.Interface, error)
}

// Resources are those that a page of the cluster is made of. Those without a name aren't
// read.
type Resources struct {
	Slices, Claims, Inventories, Policies, TaintRules, Nodes Resource
	// PendingPods are pods of the phase Pending.
	PendingPods Resource
}
