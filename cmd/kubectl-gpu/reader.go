package main

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
	"github.com/tessera-dra/tessera/cmd/kubectl-gpu/web"
	"github.com/tessera-dra/tessera/pkg/resource/v1alpha3"
)

// pageSize is how many objects one request asks for.
const pageSize = 500

// reader reads objects of the cluster for a command.
type reader struct {
	missing   missing
	kube      kubernetes.Interface
	own       rest.Interface // of Tessera's own kinds
	resources *draclient.Client
	rules     *ruleClient
	// notes are sentences for the user, such as those about what couldn't be read.
	notes  []string
	unread []unread
}

func (o *options) reader(lacks missing) (*reader, error) {
	cfg, err := o.flags.ToRESTConfig()
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
	return &reader{missing: lacks, kube: kube, own: own, resources: resources, rules: rules}, nil
}

// list reads all objects of a resource, page by page.
func list[T any](ctx context.Context, from web.Resource, namespace string, o metav1.ListOptions) ([]T, error) {
	var out []T
	o.Limit = pageSize
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
func read[T any](ctx context.Context, r *reader, from web.Resource) ([]T, error) {
	out, err := list[T](ctx, from, "", metav1.ListOptions{})
	return out, r.tolerateUnread(err, from.Name)
}

// slices are those that the field selector means.
func (r *reader) slices(ctx context.Context, selector string) ([]resourceapi.ResourceSlice, error) {
	from := r.sliceResource(selector)
	out, err := list[resourceapi.ResourceSlice](ctx, from, "", metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("the %s (%w)", noDRA, err)
	}
	return out, r.tolerateUnread(err, from.Name)
}

// taintRules are those that the API server serves: up to Kubernetes 1.36 it has none by
// default.
func (r *reader) taintRules(ctx context.Context) ([]resourceapi.DeviceTaintRule, error) {
	from := r.ruleResource()
	out, err := list[resourceapi.DeviceTaintRule](ctx, from, "", metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	for i := range out {
		if text := whyIgnored(&out[i]); text != "" {
			r.note("%s", text)
		}
	}
	return out, r.tolerateUnread(err, from.Name)
}

// claims are those of all namespaces, or, if the user may not list them, of one. Then, or
// if none could be listed, there may be more.
func (r *reader) claims(ctx context.Context, namespace string) (out []resourceapi.ResourceClaim, more bool, err error) {
	from := r.claimResource()
	out, err = list[resourceapi.ResourceClaim](ctx, from, "", metav1.ListOptions{})
	if !apierrors.IsForbidden(err) {
		return out, err != nil, r.tolerateUnread(err, from.Name)
	}
	if out, err = list[resourceapi.ResourceClaim](ctx, from, namespace, metav1.ListOptions{}); err != nil {
		return nil, true, r.tolerateUnread(err, from.Name)
	}
	r.addUnread(unread{
		resource: from.Name, reason: fmt.Sprintf("You may list %s only in namespace %s", from.Name, namespace), but: "without those of other namespaces, ",
		do: inAllNamespaces,
	})
	return out, true, nil
}

func (r *reader) classes(ctx context.Context) ([]resourceapi.DeviceClass, error) {
	return read[resourceapi.DeviceClass](ctx, r, r.classResource())
}

func (r *reader) nodes(ctx context.Context) ([]corev1.Node, error) {
	return read[corev1.Node](ctx, r, r.nodeResource())
}

func (r *reader) pods(ctx context.Context) ([]corev1.Pod, error) {
	return read[corev1.Pod](ctx, r, r.podResource(""))
}

// inventories and policies are of Tessera's own kinds.
func (r *reader) inventories(ctx context.Context) ([]v1alpha1.GPUInventory, error) {
	return read[v1alpha1.GPUInventory](ctx, r, r.inventoryResource())
}

func (r *reader) policies(ctx context.Context) ([]v1alpha1.SharingPolicy, error) {
	return read[v1alpha1.SharingPolicy](ctx, r, r.policyResource())
}

// note adds a sentence for the user, once.
func (r *reader) note(format string, args ...any) {
	if text := oneLine(fmt.Sprintf(format, args...)); !slices.Contains(r.notes, text) {
		r.notes = append(r.notes, text)
	}
}

// printNotes writes the notes.
func (r *reader) printNotes(w io.Writer) {
	for _, n := range r.notes {
		fmt.Fprintln(w, "note: "+n)
	}
}
