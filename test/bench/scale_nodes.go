package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// atOnce is how many requests the benchmark makes at a time, for all nodes together.
const atOnce = 16

// hollowNodes are nodes of H100s, eight each or as sizes says, without machines: Node
// objects and GPUInventories. In place of the nodes' plugins, the benchmark answers the
// controller's publishRequests.
type hollowNodes struct {
	api  client.Client
	gpus gpu.Node
	n    int
	// sizes are the nodes' numbers of GPUs, at most eight, where they differ.
	sizes map[string]int
}

func hollowName(i int) string { return fmt.Sprintf("node-%04d", i) }

// newHollowNodes returns n nodes that don't exist yet, whose publishRequests are
// answered until ctx ends.
func newHollowNodes(ctx context.Context, running *sync.WaitGroup, config *rest.Config, n int) (*hollowNodes, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return nil, err
	}
	api, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	h := &hollowNodes{api: api, n: n}
	if h.gpus, err = offertest.Node("h100-80gb", migGPUs); err != nil {
		return nil, fmt.Errorf("simulate a node: %w", err)
	}
	return h, h.answer(ctx, running, config, scheme)
}

// answer answers publishRequests.
func (h *hollowNodes) answer(ctx context.Context, running *sync.WaitGroup, config *rest.Config, scheme *runtime.Scheme) error {
	c, err := cache.New(config, cache.Options{Scheme: scheme, DefaultTransform: func(obj any) (any, error) {
		if inv, ok := obj.(*v1alpha1.GPUInventory); ok {
			inv.Status.GPUs, inv.ManagedFields = nil, nil
		}
		return obj, nil
	}})
	if err != nil {
		return fmt.Errorf("make a cache: %w", err)
	}
	informer, err := c.GetInformer(ctx, &v1alpha1.GPUInventory{}, cache.BlockUntilSynced(false))
	if err != nil {
		return fmt.Errorf("watch GPUInventories: %w", err)
	}
	requests := make(chan *v1alpha1.GPUInventory, 2*h.n)
	ask := func(obj any) {
		if inv, ok := obj.(*v1alpha1.GPUInventory); ok && inv.Spec.PublishRequest > inv.Status.PublishResponse {
			requests <- inv
		}
	}
	if _, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{AddFunc: ask, UpdateFunc: func(_, obj any) { ask(obj) }}); err != nil {
		return fmt.Errorf("watch GPUInventories: %w", err)
	}
	running.Go(func() { _ = c.Start(ctx) })
	for range atOnce {
		running.Go(func() {
			for {
				select {
				case inv := <-requests:
					// One that fails is asked again: the controller repeats it.
					_ = h.patchStatus(ctx, inv.Name, fmt.Sprintf(`{"status":{"publishResponse":%d}}`, inv.Spec.PublishRequest))
				case <-ctx.Done():
					return
				}
			}
		})
	}
	return nil
}

// each calls f for some nodes, several at a time.
func (h *hollowNodes) each(ctx context.Context, from, to int, f func(context.Context, string) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for i := from; i < to; i++ {
		group.Go(func() error { return f(ctx, hollowName(i)) })
	}
	return group.Wait()
}

// join makes a node, and registers its plugin.
func (h *hollowNodes) join(ctx context.Context, name string) error {
	if err := h.create(ctx, name); err != nil {
		return err
	}
	return h.register(ctx, name)
}

// register reports that the kubelet has registered the node's plugin.
func (h *hollowNodes) register(ctx context.Context, name string) error {
	now, err := metav1.NowMicro().MarshalJSON()
	if err != nil {
		return fmt.Errorf("register the plugin of %s: %w", name, err)
	}
	return h.patchStatus(ctx, name, fmt.Sprintf(`{"status":{"registeredAt":%s}}`, now))
}

// create makes a node as its plugin reports it before the kubelet registers it.
func (h *hollowNodes) create(ctx context.Context, name string) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: hollowLabels(name)}}
	if err := h.api.Create(ctx, node); err != nil {
		return fmt.Errorf("create Node %s: %w", name, err)
	}
	inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "Node", Name: name, UID: node.UID},
	}}}
	if err := h.api.Create(ctx, inv); err != nil {
		return fmt.Errorf("create GPUInventory %s: %w", name, err)
	}
	there := h.gpus
	there.Name = name
	there.GPUs = slices.Clone(h.gpus.GPUs)
	if size, ok := h.sizes[name]; ok {
		there.GPUs = there.GPUs[:size]
	}
	for g := range there.GPUs {
		there.GPUs[g].UUID = gpu.UUID(fmt.Sprintf("GPU-%08x-0000-0000-0000-%012s", g+1, name[len(name)-4:]))
	}
	inventory.SetFacts(&inv.Status, there)
	inv.Status.PluginVersion, inv.Status.BootID = "bench", "boot"
	if err := h.api.Status().Update(ctx, inv); err != nil {
		return fmt.Errorf("write the status of GPUInventory %s: %w", name, err)
	}
	return nil
}

// hollowLabels are as many labels as nodes with GPUs have with Node Feature Discovery,
// GPU Feature Discovery and a cloud provider. One is the node's own.
func hollowLabels(name string) map[string]string {
	const features = 60
	out := map[string]string{"kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "topology.kubernetes.io/zone": "zone-a"}
	for i := range features {
		out[fmt.Sprintf("feature.node.kubernetes.io/cpu-cpuid.FEATURE%02d", i)] = "true"
	}
	return out
}

// delete deletes a node and, in place of the garbage collector, its inventory.
func (h *hollowNodes) delete(ctx context.Context, name string) error {
	for _, o := range []client.Object{&corev1.Node{}, &v1alpha1.GPUInventory{}} {
		o.SetName(name)
		if err := h.api.Delete(ctx, o); err != nil {
			return fmt.Errorf("delete %T %s: %w", o, name, err)
		}
	}
	return nil
}

// setDriver changes the driver version of a node, which all its devices have as an
// attribute, and returns when.
func (h *hollowNodes) setDriver(ctx context.Context, name, version string) (time.Duration, error) {
	start := monotonic()
	return start, h.patchStatus(ctx, name, `{"status":{"driverVersion":`+strconv.Quote(version)+`}}`)
}

func (h *hollowNodes) patchStatus(ctx context.Context, name, patch string) error {
	inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := h.api.Status().Patch(ctx, inv, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
		return fmt.Errorf("change the status of GPUInventory %s: %w", name, err)
	}
	return nil
}
