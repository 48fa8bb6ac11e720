// Package pages has informers list objects in pages, where they list at all: API servers
// from Kubernetes 1.34 on stream the objects one by one. An informer's own list comes from
// the server's watch cache, which ignores the limit and answers with all objects in one
// piece: of large objects that is many times as much as the informer keeps of them.
package pages

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// size of a page. In memory, a slice is up to 180 KiB before it is trimmed.
const size = 100

// NewInformer returns an informer of objects such as example, which isn't running yet: it lists
// in pages, and keeps of each object what trim leaves. server is the client that of asks, which
// says whether the server can stream lists.
func NewInformer(server any, of *cache.ListWatch, example runtime.Object, trim cache.TransformFunc, indexers cache.Indexers) (cache.SharedIndexInformer, error) {
	informer := cache.NewSharedIndexInformer(Paged(cache.ToListWatcherWithWatchListSemantics(of, server), trim), example, 0, indexers)
	if err := informer.SetTransform(trim); err != nil {
		return nil, fmt.Errorf("set up the cache of %T: %w", example, err)
	}
	return informer, nil
}

// Paged returns a ListerWatcher that lists from etcd in pages where the informer sets a limit, as it does when
// it starts, and trims each page before it reads the next. Such a list asks for
// no resource version and has the newest objects: with a limit, a server would return the
// objects as of that version, which it may no longer have. A list without a limit stays
// whole, and as old as the informer allows.
func Paged(of cache.ListerWatcher, trim cache.TransformFunc) cache.ListerWatcher {
	server := cache.ToListerWatcherWithContext(of)
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			if o.Limit != 0 {
				o.ResourceVersion, o.ResourceVersionMatch, o.Limit = "", "", min(o.Limit, size)
			}
			page, err := server.ListWithContext(ctx, o)
			if err != nil {
				return nil, err
			}
			return trimmed(page, trim)
		},
		WatchFuncWithContext: server.WatchWithContext,
	}, of)
}

// trimmed returns a list of the page's objects as trim leaves them, without a reference to
// the page.
func trimmed(page runtime.Object, trim cache.TransformFunc) (runtime.Object, error) {
	about, err := meta.ListAccessor(page)
	if err != nil {
		return nil, fmt.Errorf("read a list: %w", err)
	}
	items, err := meta.ExtractListWithAlloc(page)
	if err != nil {
		return nil, fmt.Errorf("read a list: %w", err)
	}
	out := &metainternalversion.List{Items: items}
	out.ResourceVersion, out.Continue, out.RemainingItemCount = about.GetResourceVersion(), about.GetContinue(), about.GetRemainingItemCount()
	for i, item := range items {
		small, err := trim(item)
		if err != nil {
			return nil, err
		}
		object, ok := small.(runtime.Object)
		if !ok {
			return nil, fmt.Errorf("trim a %T: %T is no object", item, small)
		}
		items[i] = object
	}
	return out, nil
}
