package pages

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// server lists as API servers do that don't stream: in pages only without a resource
// version.
type server struct {
	objects int

	mu      sync.Mutex
	pages   []int // how many objects each answer had
	watches chan *watch.FakeWatcher
}

func (s *server) list(o metav1.ListOptions) *corev1.ConfigMapList {
	first, last := 0, s.objects
	_, _ = fmt.Sscan(o.Continue, &first)
	out := &corev1.ConfigMapList{ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
	if o.Limit > 0 && o.ResourceVersion == "" && first+int(o.Limit) < last {
		last = first + int(o.Limit)
		out.Continue = fmt.Sprint(last)
	}
	for i := first; i < last; i++ {
		out.Items = append(out.Items, corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i)}, Data: map[string]string{"large": "part"},
		})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pages = append(s.pages, last-first)
	return out
}

// listed waits for a watch, and returns the sizes of the pages before it.
func (s *server) listed() ([]int, *watch.FakeWatcher) {
	w := <-s.watches
	s.mu.Lock()
	defer s.mu.Unlock()
	pages := s.pages
	s.pages = nil
	return pages, w
}

// TestPages: an informer reads all objects in pages, at its start and after its watch is
// too old.
func TestPages(t *testing.T) {
	s := &server{objects: 2*size + 50, watches: make(chan *watch.FakeWatcher)}
	large := func(obj any) bool { return obj.(*corev1.ConfigMap).Data != nil }
	trim := func(obj any) (any, error) {
		if !large(obj) {
			return obj, nil
		}
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: obj.(*corev1.ConfigMap).Name}}, nil
	}
	informer := cache.NewSharedIndexInformer(Paged(&cache.ListWatch{
		ListWithContextFunc: func(_ context.Context, o metav1.ListOptions) (runtime.Object, error) { return s.list(o), nil },
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			if o.SendInitialEvents != nil {
				return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("ListOptions").GroupKind(), "", nil)
			}
			w := watch.NewFake()
			select {
			case s.watches <- w:
			case <-ctx.Done():
			}
			return w, nil
		},
	}, trim), &corev1.ConfigMap{}, 0, cache.Indexers{})
	go informer.RunWithContext(t.Context())
	for _, when := range []string{"start", "expired", "expired again"} {
		pages, w := s.listed()
		if want := []int{size, size, 50}; !slices.Equal(want, pages) {
			t.Errorf("%s: %v objects in the pages, want %v", when, pages, want)
		}
		if !cache.WaitForCacheSync(t.Context().Done(), informer.HasSynced) {
			t.Fatal("not synced")
		}
		all := informer.GetStore().List()
		if len(all) != s.objects {
			t.Errorf("%s: %d objects", when, len(all))
		}
		for _, obj := range all {
			if large(obj) {
				t.Fatalf("%s: %v isn't trimmed", when, obj)
			}
		}
		w.Error(&apierrors.NewResourceExpired("too old").ErrStatus)
	}
}
