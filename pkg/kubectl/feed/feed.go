package feed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// Note is a sentence on objects that can't be read, or not as they change, or that are
// ignored.
type Note struct {
	Resource string `json:"resource"`
	// Verb that the user lacks; empty where that isn't the reason.
	Verb string `json:"verb,omitempty"`
	Text string `json:"text"`
}

// feed keeps the objects of a resource, and knows which rights are missing for that.
// It is the ListerWatcher of its informer, which lists again after a watch that ended
// or was refused: after a pause that grows to a minute.
type feed struct {
	Resource
	// fallback is the namespace to read where all namespaces may not be read.
	fallback string
	informer cache.SharedIndexInformer
	// changed is called after the status has changed.
	changed func()

	mu       sync.Mutex
	answered bool // the first list succeeded or failed
	narrow   bool // only the fallback namespace may be read
	list     error
	watch    error
}

// newFeed makes a feed. Its objects are indexed by node if of, which returns the nodes of an
// object, isn't nil; touched gets the nodes of each object that changed.
func newFeed(r Resource, fallback string, of func(any) []string, touched func(nodes []string), changed func()) (*feed, error) {
	f := &feed{Resource: r, fallback: fallback, changed: changed}
	indexers := cache.Indexers{}
	if of != nil {
		indexers[byNode] = func(obj any) ([]string, error) { return of(obj), nil }
	}
	f.informer = cache.NewSharedIndexInformerWithOptions(f, r.Example, cache.SharedIndexInformerOptions{Indexers: indexers})
	err := f.informer.SetTransform(func(obj any) (any, error) {
		if m, ok := obj.(metav1.Object); ok {
			m.SetManagedFields(nil)
		}
		return obj, nil
	})
	if err == nil {
		// The page shows errors; the default handler would log each attempt.
		err = f.informer.SetWatchErrorHandlerWithContext(func(context.Context, *cache.Reflector, error) {})
	}
	touch := func(obj any) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		if of == nil {
			touched(nil)
		} else if nodes := of(obj); len(nodes) > 0 {
			touched(nodes)
		}
	}
	if err == nil {
		_, err = f.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    touch,
			UpdateFunc: func(old, obj any) { touch(old); touch(obj) },
			DeleteFunc: touch,
		})
	}
	if err != nil {
		return nil, fmt.Errorf("prepare to read %s: %w", r.Name, err)
	}
	return f, nil
}

// byNode is the index of objects by node.
const byNode = "node"

// IsWatchListSemanticsUnSupported makes the informer list, and then watch: the two are
// different rights.
func (f *feed) IsWatchListSemanticsUnSupported() bool { return true }

// List implements cache.ListerWatcher.
func (f *feed) List(o metav1.ListOptions) (runtime.Object, error) {
	return f.ListWithContext(context.Background(), o)
}

// Watch implements cache.ListerWatcher.
func (f *feed) Watch(o metav1.ListOptions) (watch.Interface, error) {
	return f.WatchWithContext(context.Background(), o)
}

// ListWithContext lists the objects of all namespaces, or else of one.
func (f *feed) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	list, err := f.Resource.List(ctx, "", o)
	narrow := f.Namespaced && apierrors.IsForbidden(err)
	if narrow {
		o.ResourceVersion, o.ResourceVersionMatch = "", ""
		list, err = f.Resource.List(ctx, f.fallback, o)
	}
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return list, err // the informer lists again at once
	}
	f.set(func() { f.answered, f.narrow, f.list = true, narrow, err })
	return list, err
}

// WatchWithContext watches the objects that were listed.
func (f *feed) WatchWithContext(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	f.mu.Lock()
	namespace := ""
	if f.narrow {
		namespace = f.fallback
	}
	f.mu.Unlock()
	w, err := f.Resource.Watch(ctx, namespace, o)
	f.set(func() { f.watch = err })
	return w, err
}

// set changes the status.
func (f *feed) set(change func()) {
	f.mu.Lock()
	before := f.key()
	change()
	after := f.key()
	f.mu.Unlock()
	if before != after {
		f.changed()
	}
}

// key is equal for equal statuses.
func (f *feed) key() string {
	return fmt.Sprint(f.answered, f.narrow, f.list, f.watch)
}

// ready reports whether the objects that can be read are there.
func (f *feed) ready() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.answered && (f.list != nil || f.informer.HasSynced())
}

// complete reports whether all objects of the cluster are there.
func (f *feed) complete() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.list == nil && !f.narrow || apierrors.IsNotFound(f.list)
}

// note names the objects or rights that are missing, or objects that are ignored; false
// if there are none.
func (f *feed) note() (Note, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := Note{Resource: f.Name}
	switch {
	case !f.answered:
		return n, false
	case apierrors.IsForbidden(f.list):
		n.Verb = "list"
		n.Text = fmt.Sprintf("You may not list %s: %s. Ask for the verbs list and watch on them.", f.Name, f.Missing)
	case apierrors.IsNotFound(f.list):
		n.Text = f.Absent
	case f.list != nil:
		n.Resource, n.Text = f.failed(f.list)
	case f.narrow:
		n.Verb = "list"
		n.Text = fmt.Sprintf("You may list %s only in namespace %s: without those of other namespaces, %s. Ask for the verbs list and watch on them in all namespaces.",
			f.Name, f.fallback, f.Missing)
	case apierrors.IsForbidden(f.watch):
		n.Verb = "watch"
		n.Text = fmt.Sprintf("You may not watch %s: they are read again about once a minute. Ask for the verb watch on them.", f.Name)
	case f.watch != nil:
		n.Resource, n.Text = f.failed(f.watch)
	case f.WhyIgnored != nil:
		for _, obj := range sortByName(f.informer.GetIndexer().List()) {
			n.Text = strings.TrimSpace(n.Text + " " + f.WhyIgnored(obj))
		}
	}
	return n, n.Text != ""
}

// failed describes an error other than missing rights. It returns the resource only if the
// error is about it, and not about the server as a whole.
func (f *feed) failed(err error) (resource, text string) {
	var refused apierrors.APIStatus
	var connection *url.Error
	switch {
	case apierrors.IsUnauthorized(err):
		return "", "The API server doesn't accept your credentials any more: what is shown is old. Log in again, and start the command again."
	case errors.As(err, &refused):
		return f.Name, fmt.Sprintf("%s can't be read, and what is shown of them may be old: %v", f.Name, err)
	case errors.As(err, &connection):
		err = connection.Err
	}
	return "", fmt.Sprintf("The API server can't be reached, and what is shown may be old: %v", err)
}

// items returns the objects, in the order of their names; none of a feed that is nil.
func items[T any](f *feed) []T {
	if f == nil {
		return nil
	}
	return ordered[T](f.informer.GetIndexer().List())
}

// on returns those of a node.
func on[T any](f *feed, node string) []T {
	if f == nil {
		return nil
	}
	found, err := f.informer.GetIndexer().ByIndex(byNode, node)
	if err != nil {
		return nil // feeds without an index have no objects of nodes
	}
	return ordered[T](found)
}

func ordered[T any](objects []any) []T {
	out := make([]T, 0, len(objects))
	for _, obj := range sortByName(objects) {
		if o, ok := obj.(*T); ok {
			out = append(out, *o)
		}
	}
	return out
}

// sortByName sorts objects, which caches list in any order.
func sortByName(objects []any) []any {
	slices.SortFunc(objects, func(a, b any) int { return cmp.Compare(key(a), key(b)) })
	return objects
}

func key(obj any) string {
	if m, ok := obj.(metav1.Object); ok {
		return m.GetNamespace() + "/" + m.GetName()
	}
	return ""
}
