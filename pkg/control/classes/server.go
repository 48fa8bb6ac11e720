package classes

import (
	"context"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"github.com/tessera-dra/tessera/pkg/control/publish"
)

const (
	kind        = "DeviceClass"
	clusterRole = "ClusterRole"
)

// server reads and writes DeviceClasses in the newest version of resource.k8s.io
// that the API server has. The version may change while the program runs.
type server struct {
	discovery discovery.ServerResourcesInterface
	client    dynamic.Interface

	mu      sync.Mutex
	watched string // the version that the informer reads; empty: not known
}

// current asks the API server for its version, and returns the classes in it.
func (s *server) current() (dynamic.ResourceInterface, schema.GroupVersion, error) {
	version, err := publish.FindAPIVersion(s.discovery)
	if err != nil {
		return nil, schema.GroupVersion{}, err
	}
	group := schema.GroupVersion{Group: resourceapi.GroupName, Version: version}
	return s.in(group), group, nil
}

func (s *server) in(v schema.GroupVersion) dynamic.ResourceInterface {
	return s.client.Resource(v.WithResource("deviceclasses"))
}

// toWatch returns the classes in the version that the informer reads.
func (s *server) toWatch() (dynamic.ResourceInterface, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watched != "" {
		return s.in(schema.GroupVersion{Group: resourceapi.GroupName, Version: s.watched}), nil
	}
	classes, version, err := s.current()
	s.watched = version.Version
	return classes, err
}

// sawGone makes the next read ask for the version again, if the error says that
// the server doesn't have it any more.
func (s *server) sawGone(err error) {
	if apierrors.IsNotFound(err) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.watched = ""
	}
}

// informer returns a cache of all DeviceClasses that isn't running yet.
func (s *server) informer() cache.SharedIndexInformer {
	return cache.NewSharedIndexInformer(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			classes, err := s.toWatch()
			if err != nil {
				return nil, err
			}
			list, err := classes.List(ctx, o)
			s.sawGone(err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			classes, err := s.toWatch()
			if err != nil {
				return nil, err
			}
			w, err := classes.Watch(ctx, o)
			s.sawGone(err)
			return w, err
		},
	}, &unstructured.Unstructured{}, 0, cache.Indexers{})
}
