package controltest

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// NewAPI is an API server in memory. It has the definitions of the custom resources, older than
// anything else.
func NewAPI(t testing.TB, objects ...client.Object) client.WithWatch {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1alpha1.AddToScheme, corev1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	api := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithStatusSubresource(&v1alpha1.GPUInventory{}, &v1alpha1.SharingPolicy{}).WithReturnManagedFields().Build()
	for _, resource := range []string{"gpuinventories", "sharingpolicies"} {
		if err := api.Create(t.Context(), definition(resource)); err != nil {
			t.Fatal(err)
		}
	}
	return api
}

// Define installs the definition of a custom resource again.
func Define(t testing.TB, api client.Client, resource string, now time.Time) {
	t.Helper()
	if err := client.IgnoreNotFound(api.Delete(t.Context(), definition(resource))); err != nil {
		t.Fatal(err)
	}
	d := definition(resource)
	d.SetCreationTimestamp(metav1.NewTime(now))
	if err := api.Create(t.Context(), d); err != nil {
		t.Fatal(err)
	}
}

// Undefine removes the definition of a custom resource. The objects stay.
func Undefine(t testing.TB, api client.Client, resource string) {
	t.Helper()
	if err := api.Delete(t.Context(), definition(resource)); err != nil {
		t.Fatal(err)
	}
}

func definition(resource string) *metav1.PartialObjectMetadata {
	d := &metav1.PartialObjectMetadata{}
	d.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	d.SetName(resource + "." + v1alpha1.GroupVersion.Group)
	return d
}

// ErrFull is the error of a server that refuses writes.
var ErrFull = errors.New("the server is full")

// FailingWrites returns the server with all writes refused.
func FailingWrites(api client.WithWatch) client.Client {
	return interceptor.NewClient(api, interceptor.Funcs{
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return ErrFull
		},
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			return ErrFull
		},
		SubResourceUpdate: func(context.Context, client.Client, string, client.Object, ...client.SubResourceUpdateOption) error {
			return ErrFull
		},
		SubResourcePatch: func(context.Context, client.Client, string, client.Object, client.Patch, ...client.SubResourcePatchOption) error {
			return ErrFull
		},
	})
}
