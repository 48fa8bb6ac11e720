package control

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// The custom resources, as their definitions name them.
const (
	inventories     = "gpuinventories"
	sharingPolicies = "sharingpolicies"
)

// errKindGone says that the definition of a kind is missing or being deleted, so
// that a missing object of the kind doesn't mean that somebody deleted it.
var errKindGone = errors.New("its CustomResourceDefinition is missing or being deleted, and with it all objects of the kind; " +
	"nothing is changed until it is back: install the chart with crds.install=true")

// kinds reports what the server serves.
type kinds interface {
	// served returns an errKindGone unless the server has the custom resource, and
	// isn't about to delete it.
	served(ctx context.Context, resource string) error
}

// definitions reads CustomResourceDefinitions.
type definitions struct {
	live client.Reader
}

// served implements kinds. While a definition is being deleted, its objects go
// first, and its deletionTimestamp is set.
func (d definitions) served(ctx context.Context, resource string) error {
	definition := &metav1.PartialObjectMetadata{}
	definition.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	name := resource + "." + v1alpha1.GroupVersion.Group
	err := d.live.Get(ctx, client.ObjectKey{Name: name}, definition)
	switch {
	case apierrors.IsNotFound(err), err == nil && definition.DeletionTimestamp != nil:
		return fmt.Errorf("%s: %w", name, errKindGone)
	case err != nil:
		return fmt.Errorf("read CustomResourceDefinition %s: %w", name, err)
	}
	return nil
}
