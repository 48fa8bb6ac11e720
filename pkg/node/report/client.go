package report

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

const inventoryResource = "gpuinventories"

// inventoryClient speaks the API group of GPUInventories alone.
func inventoryClient(cfg *rest.Config) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("register types of %s: %w", v1alpha1.GroupVersion, err)
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	cfg = rest.CopyConfig(cfg)
	cfg.APIPath, cfg.GroupVersion = "/apis", &v1alpha1.GroupVersion
	cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c, err := rest.RESTClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("client for %s: %w", v1alpha1.GroupVersion, err)
	}
	return c, nil
}

// watchOne watches the object of that name. trim, which may be nil, drops what isn't needed. saw is
// called with the object at first and after each change, gone after its deletion.
func watchOne[T runtime.Object](c rest.Interface, resource, name string, example T, trim cache.TransformFunc, saw, gone func(T)) cache.Controller {
	typed := func(f func(T)) func(any) {
		return func(obj any) {
			if o, ok := obj.(T); ok {
				f(o)
			}
		}
	}
	seen, deleted := typed(saw), typed(gone)
	_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(c, resource, "", fields.OneTermEqualSelector(metav1.ObjectNameField, name)),
		ObjectType:    example,
		Transform:     trim,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    seen,
			UpdateFunc: func(_, obj any) { seen(obj) },
			DeleteFunc: func(obj any) {
				if last, ok := obj.(cache.DeletedFinalStateUnknown); ok {
					obj = last.Obj
				}
				deleted(obj)
			},
		},
	})
	return controller
}
