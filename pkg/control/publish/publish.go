package publish

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/tools/cache"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"github.com/tessera-dra/tessera/pkg/control/pages"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// nodeIndex finds a node's slices in the cache.
const nodeIndex = "node"

// Found are the slices of this driver that are published for one node.
type Found struct {
	// Ours are those that a Publisher wrote.
	Ours []*resourceapi.ResourceSlice
	// Foreign are those of another program with the same driver name. Schedulers
	// can't distinguish them from ours.
	Foreign []*resourceapi.ResourceSlice
}

func (f *Found) add(s *resourceapi.ResourceSlice) {
	if s.Labels[ManagedByLabel] == ManagedBy {
		f.Ours = append(f.Ours, s)
		return
	}
	f.Foreign = append(f.Foreign, s)
}

// Publisher reads and writes the slices of this driver.
type Publisher struct {
	client   resourceclient.ResourceSliceInterface
	api      *draclient.Client
	versions discovery.ServerVersionInterfaceWithContext
	informer cache.SharedIndexInformer
	watches  chan struct{}

	// Release, which may be empty, becomes the ReleaseAnnotation of slices that are written.
	Release string
}

// New returns a publisher whose Informer isn't running yet.
func New(client *draclient.Client, versions discovery.ServerVersionInterface) (*Publisher, error) {
	p := &Publisher{
		client: client.ResourceSlices(), versions: discovery.ToServerVersionInterfaceWithContext(versions),
		api: client, watches: make(chan struct{}, 1),
	}
	trimSlice := func(obj any) (any, error) {
		if s, ok := obj.(*resourceapi.ResourceSlice); ok {
			trim(s)
		}
		return obj, nil
	}
	var err error
	p.informer, err = pages.NewInformer(client, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return p.client.List(ctx, ofDriver(o))
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return p.watch(ctx, ofDriver(o))
		},
	}, &resourceapi.ResourceSlice{}, trimSlice, cache.Indexers{nodeIndex: func(obj any) ([]string, error) {
		s, ok := obj.(*resourceapi.ResourceSlice)
		if !ok || s.Spec.NodeName == nil {
			return nil, nil
		}
		return []string{*s.Spec.NodeName}, nil
	}})
	if err != nil {
		return nil, err
	}
	return p, nil
}

// watch starts a watch, and notes that it did.
func (p *Publisher) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	w, err := p.client.Watch(ctx, o)
	if err == nil {
		select {
		case p.watches <- struct{}{}:
		default: // one is waiting there
		}
	}
	return w, err
}

// Watches receives a value each time the informer starts a watch. A restarted or
// replaced API server ends its watches, so each new one may be of another server.
func (p *Publisher) Watches() <-chan struct{} { return p.watches }

// Informer of the driver's slices. Whoever runs the publisher runs it.
func (p *Publisher) Informer() cache.SharedIndexInformer { return p.informer }

// Cached returns a node's slices as the cache has them: without devices and counters,
// with a digest of these that Equal compares. Offers knows their devices' names. They
// are shared: don't change them. The cache lags behind: replace what Live returns.
func (p *Publisher) Cached(node string) (Found, error) {
	var out Found
	objs, err := p.informer.GetIndexer().ByIndex(nodeIndex, node)
	if err != nil {
		return out, fmt.Errorf("read the ResourceSlice cache for node %s: %w", node, err)
	}
	for _, obj := range objs {
		if s, ok := obj.(*resourceapi.ResourceSlice); ok {
			out.add(s)
		}
	}
	return out, nil
}

// Published returns all slices of this driver that the cache has, as Cached returns them.
// It is an error while the cache is being filled.
func (p *Publisher) Published() ([]*resourceapi.ResourceSlice, error) {
	if !p.informer.HasSynced() {
		return nil, errors.New("the cache of ResourceSlices isn't filled yet")
	}
	var out []*resourceapi.ResourceSlice
	for _, obj := range p.informer.GetStore().List() {
		if s, ok := obj.(*resourceapi.ResourceSlice); ok {
			out = append(out, s)
		}
	}
	return out, nil
}

// Offers reports whether a node's slices offer a device, as the cache has them.
func (p *Publisher) Offers(node string, device gpu.DeviceName) bool {
	cached, err := p.Cached(node)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(cached.Ours, func(s *resourceapi.ResourceSlice) bool { return offers(s, string(device)) })
}

// Live returns a node's slices as the server has them now.
func (p *Publisher) Live(ctx context.Context, node string) (Found, error) {
	var out Found
	o := ofDriver(metav1.ListOptions{})
	o.FieldSelector += "," + fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorNodeName, node).String()
	list, err := p.client.List(ctx, o)
	if err != nil {
		return out, fmt.Errorf("list the ResourceSlices of node %s: %w", node, err)
	}
	for i := range list.Items {
		out.add(&list.Items[i])
	}
	return out, nil
}

// Write makes current, a node's live slices, into want: creates and updates
// under a new generation, then deletes the remaining old slices. Until all of
// the new generation is there the pool is incomplete; schedulers from 1.35 on
// allocate nothing from it, older ones allocate from the slices that are there.
// Slices that only another release has written keep their generation.
//
// An error leaves a pool that isn't Complete; calling again with fresh live
// slices repairs it. It is a DroppedFieldsError where the server stored something
// else than was sent, which trying again doesn't mend; where that is only the
// ReleaseAnnotation, the pool is whole.
func (p *Publisher) Write(ctx context.Context, current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) error {
	next := generation(current)
	if !Equal(current, want) {
		next++
	}
	have := byName(current)
	var unmarked string
	for i := range want {
		s := want[i].DeepCopy()
		if p.Release != "" {
			s.Annotations = map[string]string{ReleaseAnnotation: p.Release}
		}
		s.Spec.Pool.Generation = next
		stored, err := p.put(ctx, have[s.Name], s)
		if err != nil {
			return fmt.Errorf("write ResourceSlice %s: %w", s.Name, err)
		}
		if stored.Spec.Pool.Generation != next || !same(stored, s) {
			return &DroppedFieldsError{Slice: s.Name}
		}
		if stored.Annotations[ReleaseAnnotation] != p.Release {
			unmarked = s.Name // what schedulers read is there: the pool is made whole
		}
	}
	if err := p.Delete(ctx, superseded(current, want)); err != nil || unmarked == "" {
		return err
	}
	return &DroppedFieldsError{Slice: unmarked}
}

// DroppedFieldsError says that the server silently dropped or changed something
// of a slice: in its spec, its owner, our label or the ReleaseAnnotation.
type DroppedFieldsError struct {
	Slice string
}

func (e *DroppedFieldsError) Error() string {
	return fmt.Sprintf("the API server changed ResourceSlice %s when storing it; look for mutating admission webhooks "+
		"or policies on resourceslices, and for feature gates that are off", e.Slice)
}

func (p *Publisher) put(ctx context.Context, have, want *resourceapi.ResourceSlice) (*resourceapi.ResourceSlice, error) {
	if have == nil {
		return p.client.Create(ctx, want, metav1.CreateOptions{})
	}
	want.ResourceVersion = have.ResourceVersion
	return p.client.Update(ctx, want, metav1.UpdateOptions{})
}

// Delete removes slices. A slice that is gone, or that was created again with
// the same name, is skipped without an error. All are tried.
func (p *Publisher) Delete(ctx context.Context, current []*resourceapi.ResourceSlice) error {
	var errs []error
	for _, s := range current {
		err := p.client.Delete(ctx, s.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(s.UID))})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("delete ResourceSlice %s: %w", s.Name, err))
		}
	}
	return errors.Join(errs...)
}

// ofDriver restricts a list or watch to the slices of this driver's name.
func ofDriver(o metav1.ListOptions) metav1.ListOptions {
	o.FieldSelector = fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorDriver, gpu.DriverName).String()
	return o
}
