package report

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

const (
	inventoryResource = "gpuinventories"
	nodeResource      = "nodes"
)

func inventoryClient(cfg *rest.Config) (rest.Interface, error) {
	return client(cfg, "/apis", v1alpha1.GroupVersion, v1alpha1.AddToScheme)
}

func nodeClient(cfg *rest.Config) (rest.Interface, error) {
	return client(cfg, "/api", corev1.SchemeGroupVersion, corev1.AddToScheme)
}

// client speaks one API group, so that no more types than needed are linked
// in and none are discovered.
func client(cfg *rest.Config, path string, gv schema.GroupVersion, add func(*runtime.Scheme) error) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, fmt.Errorf("register types of %s: %w", gv, err)
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	cfg = rest.CopyConfig(cfg)
	cfg.APIPath, cfg.GroupVersion = path, &gv
	cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c, err := rest.RESTClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("client for %s: %w", gv, err)
	}
	return c, nil
}

// watchOne watches the one object of a name.
func watchOne(c rest.Interface, resource, name string) *cache.ListWatch {
	return cache.NewListWatchFromClient(c, resource, "", fields.OneTermEqualSelector(metav1.ObjectNameField, name))
}
