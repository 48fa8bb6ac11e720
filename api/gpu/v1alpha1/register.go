package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion of the custom resources in this package.
var GroupVersion = schema.GroupVersion{Group: "gpu.tessera.dev", Version: "v1alpha1"}

// AddToScheme teaches a scheme the types of this package.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&GPUInventory{}, &GPUInventoryList{},
		&SharingPolicy{}, &SharingPolicyList{},
	)
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
