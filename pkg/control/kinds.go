package control

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
	inventories     = "gpuinventories"
	sharingPolicies = "sharingpolicies"
)

// A missing object of a kind means that somebody deleted it only if the kind's
// definition has been there for a while.
var (
	// errKindGone: the definition is missing or being deleted.
	errKindGone = errors.New("its CustomResourceDefinition is missing or being deleted, and with it all objects of the kind; nothing is changed " +
		"until it is back: install the chart with crds.install=true, and then apply the SharingPolicies again")
	// errKindNew: the definition is younger than reportWithin.
	errKindNew = fmt.Errorf("its CustomResourceDefinition is younger than %s, and its objects may not be back yet; nothing is changed until then: "+
		"the plugins write GPUInventories by themselves, but SharingPolicies have to be applied again", reportWithin)
)

// reportWithin is how long the plugins of all nodes take to write their inventories
// after the definition was installed, at most: each notices it within 30 s, which is
// the longest pause of a watch that fails.
const reportWithin = 2 * time.Minute

// kinds reports what the server serves.
type kinds interface {
	// served returns since when the server has had the definition of the custom
	// resource. The error is errKindGone or errKindNew where an object that is missing,
	// and was created at that time (zero: never seen), may have gone with its definition.
	served(ctx context.Context, resource string, created time.Time) (since time.Time, err error)
}

// definitions reads CustomResourceDefinitions.
type definitions struct {
	live  client.Reader
	clock clock.PassiveClock
}

// served implements kinds. While a definition is being deleted, its objects go
// first, and its deletionTimestamp is set.
func (d definitions) served(ctx context.Context, resource string, created time.Time) (time.Time, error) {
	definition := &metav1.PartialObjectMetadata{}
	definition.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	name := resource + "." + v1alpha1.GroupVersion.Group
	err := d.live.Get(ctx, client.ObjectKey{Name: name}, definition)
	since := definition.CreationTimestamp.Time
	switch {
	case apierrors.IsNotFound(err), err == nil && definition.DeletionTimestamp != nil:
		return since, fmt.Errorf("%s: %w", name, errKindGone)
	case err != nil:
		return since, fmt.Errorf("read CustomResourceDefinition %s: %w", name, err)
	case created.IsZero() || !created.Before(since):
		return since, nil // it isn't known to have been there before the definition
	case d.clock.Since(since) < reportWithin:
		return since, fmt.Errorf("%s: %w", name, errKindNew)
	}
	return since, nil
}
