// Package kinds reads the kinds of objects that decisions depend on: GPUInventories, and whether
// one that is missing was deleted or has gone with its definition; and Nodes, of which only the
// metadata is read.
package kinds

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// The custom resources, as their definitions name them.
const (
	Inventories     = "gpuinventories"
	SharingPolicies = "sharingpolicies"
)

// A missing object of a kind means that somebody deleted it only if the kind's
// definition has been there for a while.
var (
	// ErrGone: the definition is missing or being deleted.
	ErrGone = errors.New("its CustomResourceDefinition is missing or being deleted, and with it all objects of the kind; nothing is changed " +
		"until it is back: install the chart with crds.install=true, and then apply the SharingPolicies again")
	// ErrNew: the definition is younger than ReportWithin.
	ErrNew = fmt.Errorf("its CustomResourceDefinition is younger than %s, and its objects may not be back yet; nothing is changed until then: "+
		"the plugins write GPUInventories by themselves, but SharingPolicies have to be applied again", ReportWithin)
)

// ReportWithin is how long the plugins of all nodes take to write their inventories
// after the definition was installed, at most: each notices it within 30 s, which is
// the longest pause of a watch that fails.
const ReportWithin = 2 * time.Minute

// Definitions reads CustomResourceDefinitions.
type Definitions struct {
	Server client.Reader // not a cache
	Clock  clock.PassiveClock
}

// Served returns since when the server has had the definition of the custom resource. The error
// is ErrGone or ErrNew where an object that is missing, and was created at that time (zero: never
// seen), may have gone with its definition. While a definition is being deleted, its objects go
// first, and its deletionTimestamp is set.
func (d Definitions) Served(ctx context.Context, resource string, created time.Time) (since time.Time, err error) {
	definition := &metav1.PartialObjectMetadata{}
	definition.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	name := resource + "." + v1alpha1.GroupVersion.Group
	err = d.Server.Get(ctx, client.ObjectKey{Name: name}, definition)
	since = definition.CreationTimestamp.Time
	switch {
	case apierrors.IsNotFound(err), err == nil && definition.DeletionTimestamp != nil:
		return since, fmt.Errorf("%s: %w", name, ErrGone)
	case err != nil:
		return since, fmt.Errorf("read CustomResourceDefinition %s: %w", name, err)
	case created.IsZero() || !created.Before(since):
		return since, nil // it isn't known to have been there before the definition
	case d.Clock.Since(since) < ReportWithin:
		return since, fmt.Errorf("%s: %w", name, ErrNew)
	}
	return since, nil
}
