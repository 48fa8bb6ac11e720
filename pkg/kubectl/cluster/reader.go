// Package cluster reads the cluster for the commands of kubectl gpu, with the rights of
// their user: what the user may not read is noted, and the commands show the rest. It also
// has the options of all commands.
package cluster

import (
	"context"
	"fmt"
	"io"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	resourcev1alpha3 "k8s.io/api/resource/v1alpha3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/resource/v1alpha3"
)

// PageSize is how many objects one request asks for.
const PageSize = 500

// Reader reads objects of the cluster for a command. It isn't safe for concurrent use.
type Reader struct {
	missing Missing
	Kube    kubernetes.Interface
	Own     rest.Interface // of Tessera's own kinds
	DRA     *draclient.Client
	Rules   *ruleClient
	// Notes are sentences for the user, such as those about what couldn't be read.
	Notes  []string
	unread []unread
}

// Reader makes a reader for a command whose output lacks these parts if it can't read all.
func (o *Options) Reader(lacks Missing) (*Reader, error) {
	cfg, err := o.Flags.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	cfg.QPS, cfg.Burst = 50, 100
	cfg.Wrap(v1alpha3.Transport)
	kube, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	alpha, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	own, err := ownClient(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	resources := draclient.New(kube)
	rules := &ruleClient{current: resources.DeviceTaintRules(), alpha: alpha.Resource(resourcev1alpha3.SchemeGroupVersion.WithResource("devicetaintrules"))}
	return &Reader{missing: lacks, Kube: kube, Own: own, DRA: resources, Rules: rules}, nil
}

// list reads all objects of a resource, page by page.
func list[T any](ctx context.Context, from feed.Resource, namespace string, o metav1.ListOptions) ([]T, error) {
	var out []T
	o.Limit = PageSize
	for {
		page, err := from.List(ctx, namespace, o)
		if err != nil {
			return nil, err
		}
		err = meta.EachListItem(page, func(obj runtime.Object) error {
			if item, ok := obj.(any).(*T); ok {
				out = append(out, *item)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		m, err := meta.ListAccessor(page)
		if err != nil {
			return nil, err
		}
		if o.Continue = m.GetContinue(); o.Continue == "" {
			return out, nil
		}
	}
}

// read reads the objects of a resource; none if it can't be read, which is noted.
func read[T any](ctx context.Context, r *Reader, from feed.Resource) ([]T, error) {
	out, err := list[T](ctx, from, "", metav1.ListOptions{})
	return out, r.TolerateUnread(err, from.Name)
}

// Slices are those that the field selector means.
func (r *Reader) Slices(ctx context.Context, selector string) ([]resourceapi.ResourceSlice, error) {
	from := r.sliceResource(selector)
	out, err := list[resourceapi.ResourceSlice](ctx, from, "", metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("the %s (%w)", noDRA, err)
	}
	return out, r.TolerateUnread(err, from.Name)
}

// taintRules are those that the API server serves: up to Kubernetes 1.36 it has none by
// default.
func (r *Reader) taintRules(ctx context.Context) ([]resourceapi.DeviceTaintRule, error) {
	from := r.ruleResource()
	out, err := list[resourceapi.DeviceTaintRule](ctx, from, "", metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	for i := range out {
		if text := whyIgnored(&out[i]); text != "" {
			r.Note("%s", text)
		}
	}
	return out, r.TolerateUnread(err, from.Name)
}

// Claims are those of all namespaces, or, if the user may not list them, of one. Then, or
// if none could be listed, there may be more.
func (r *Reader) Claims(ctx context.Context, namespace string) (out []resourceapi.ResourceClaim, more bool, err error) {
	from := r.claimResource()
	out, err = list[resourceapi.ResourceClaim](ctx, from, "", metav1.ListOptions{})
	if !apierrors.IsForbidden(err) {
		return out, err != nil, r.TolerateUnread(err, from.Name)
	}
	if out, err = list[resourceapi.ResourceClaim](ctx, from, namespace, metav1.ListOptions{}); err != nil {
		return nil, true, r.TolerateUnread(err, from.Name)
	}
	r.addUnread(unread{
		resource: from.Name, reason: fmt.Sprintf("You may list %s only in namespace %s", from.Name, namespace), but: "without those of other namespaces, ",
		do: inAllNamespaces,
	})
	return out, true, nil
}

func (r *Reader) classes(ctx context.Context) ([]resourceapi.DeviceClass, error) {
	return read[resourceapi.DeviceClass](ctx, r, r.classResource())
}

// Nodes are all of the cluster.
func (r *Reader) Nodes(ctx context.Context) ([]corev1.Node, error) {
	return read[corev1.Node](ctx, r, r.nodeResource())
}

func (r *Reader) pods(ctx context.Context) ([]corev1.Pod, error) {
	return read[corev1.Pod](ctx, r, r.podResource(""))
}

// Inventories are the GPUInventories.
func (r *Reader) Inventories(ctx context.Context) ([]v1alpha1.GPUInventory, error) {
	return read[v1alpha1.GPUInventory](ctx, r, r.inventoryResource())
}

// Inventory is the GPUInventory of a node.
func (r *Reader) Inventory(ctx context.Context, node string) (*v1alpha1.GPUInventory, error) {
	return r.inventories().Get(ctx, node, metav1.GetOptions{})
}

// Policies are the SharingPolicies.
func (r *Reader) Policies(ctx context.Context) ([]v1alpha1.SharingPolicy, error) {
	return read[v1alpha1.SharingPolicy](ctx, r, r.policyResource())
}

// Note adds a sentence for the user, once.
func (r *Reader) Note(format string, args ...any) {
	if text := terminal.OneLine(fmt.Sprintf(format, args...)); !slices.Contains(r.Notes, text) {
		r.Notes = append(r.Notes, text)
	}
}

// PrintNotes writes the notes.
func (r *Reader) PrintNotes(w io.Writer) {
	for _, n := range r.Notes {
		fmt.Fprintln(w, "note: "+n)
	}
}
