package publish

import (
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
)

// Server is what was found out about the API server, once, at start.
type Server struct {
	// Version of resource.k8s.io that is spoken with it.
	Version string
}

// ErrNoResourceAPI says that the server has no resource.k8s.io version that
// this driver speaks.
var ErrNoResourceAPI = errors.New("the API server serves none of resource.k8s.io v1, v1beta2, v1beta1: " +
	"Dynamic Resource Allocation is on by default from Kubernetes 1.34; on 1.32 and 1.33 the feature gate DynamicResourceAllocation " +
	"and --runtime-config=resource.k8s.io/v1beta1=true turn it on; older ones don't do")

// FindServer asks the API server which version of resource.k8s.io it serves,
// newest first: v1, v1beta2, v1beta1. It returns ErrNoResourceAPI where there
// is none of them.
func FindServer(d discovery.ServerResourcesInterface) (Server, error) {
	for _, version := range []string{"v1", "v1beta2", "v1beta1"} {
		list, err := d.ServerResourcesForGroupVersion(resourceapi.GroupName + "/" + version)
		switch {
		case err == nil && slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == "resourceslices" }):
			return Server{Version: version}, nil
		case err != nil && !apierrors.IsNotFound(err):
			return Server{}, fmt.Errorf("ask the API server for resource.k8s.io/%s: %w", version, err)
		}
	}
	return Server{}, ErrNoResourceAPI
}
