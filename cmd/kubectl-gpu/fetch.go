package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/resource/v1alpha3"
	"github.com/tessera-dra/tessera/pkg/view"
)

// pageSize is how many objects one request asks for.
const pageSize = 500

// reader reads objects of the cluster, page by page.
type reader struct {
	config    *rest.Config
	kube      kubernetes.Interface
	resources *draclient.Client
	// notes are sentences about what couldn't be read.
	notes []string
}

func (o *options) reader() (*reader, error) {
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
	return &reader{config: cfg, kube: kube, resources: draclient.New(kube)}, nil
}

// pages calls list for each page.
func pages(list func(metav1.ListOptions) (next string, err error)) error {
	o := metav1.ListOptions{Limit: pageSize}
	for {
		next, err := list(o)
		if err != nil || next == "" {
			return err
		}
		o.Continue = next
	}
}

// forgive notes that a resource can't be read, and what is missing therefore, if the
// reason is that the user may not or that the cluster doesn't have it.
func (r *reader) forgive(err error, resource, missing string) error {
	switch {
	case apierrors.IsForbidden(err):
		r.notes = append(r.notes, fmt.Sprintf("You may not list %s: %s. Ask for the verb list on them.", resource, missing))
	case apierrors.IsNotFound(err):
		r.notes = append(r.notes, fmt.Sprintf("The cluster has no %s: %s. Is Tessera installed there?", resource, missing))
	case err != nil:
		return fmt.Errorf("list %s: %w", resource, err)
	}
	return nil
}

func (r *reader) slices(ctx context.Context, selector string) (out []resourceapi.ResourceSlice, err error) {
	err = pages(func(o metav1.ListOptions) (string, error) {
		o.FieldSelector = selector
		l, err := r.resources.ResourceSlices().List(ctx, o)
		if err != nil {
			return "", err
		}
		out = append(out, l.Items...)
		return l.Continue, nil
	})
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("the API server doesn't serve resource.k8s.io: Dynamic Resource Allocation is off, or Kubernetes is older than 1.31 (%w)", err)
	}
	return out, r.forgive(err, "resourceslices.resource.k8s.io", "which devices are offered, and what else fits, isn't known")
}

// taintRules are those that the API server serves: up to Kubernetes 1.36 it has none by
// default.
func (r *reader) taintRules(ctx context.Context) (out []resourceapi.DeviceTaintRule, err error) {
	err = pages(func(o metav1.ListOptions) (string, error) {
		l, err := r.resources.DeviceTaintRules().List(ctx, o)
		if err != nil {
			return "", err
		}
		out = append(out, l.Items...)
		return l.Continue, nil
	})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return out, r.forgive(err, "devicetaintrules.resource.k8s.io", "taints that such rules add to devices are ignored")
}

// claims are those of all namespaces, or, if the user may not list them, of one. It
// reports whether they are all.
func (r *reader) claims(ctx context.Context, namespace string) (out []resourceapi.ResourceClaim, all bool, err error) {
	list := func(namespace string) error {
		out = nil
		return pages(func(o metav1.ListOptions) (string, error) {
			l, err := r.resources.ResourceClaims(namespace).List(ctx, o)
			if err != nil {
				return "", err
			}
			out = append(out, l.Items...)
			return l.Continue, nil
		})
	}
	err = list("")
	if !apierrors.IsForbidden(err) {
		return out, err == nil, r.forgive(err, "resourceclaims.resource.k8s.io", "who has which device isn't known")
	}
	if err := list(namespace); err != nil {
		return nil, false, r.forgive(err, fmt.Sprintf("resourceclaims.resource.k8s.io in namespace %s", namespace), "who has which device, and what else fits, isn't known")
	}
	r.notes = append(r.notes, fmt.Sprintf("You may not list resourceclaims.resource.k8s.io of all namespaces: only claims of namespace %s are shown, and what else fits isn't known. "+
		"Ask for the verb list on them in all namespaces.", namespace))
	return out, false, nil
}

func (r *reader) classes(ctx context.Context) (out []resourceapi.DeviceClass, err error) {
	err = pages(func(o metav1.ListOptions) (string, error) {
		l, err := r.resources.DeviceClasses().List(ctx, o)
		if err != nil {
			return "", err
		}
		out = append(out, l.Items...)
		return l.Continue, nil
	})
	return out, r.forgive(err, "deviceclasses.resource.k8s.io", "which devices a class selects isn't known")
}

func (r *reader) nodes(ctx context.Context) (out []corev1.Node, err error) {
	err = pages(func(o metav1.ListOptions) (string, error) {
		l, err := r.kube.CoreV1().Nodes().List(ctx, o)
		if err != nil {
			return "", err
		}
		out = append(out, l.Items...)
		return l.Continue, nil
	})
	return out, r.forgive(err, "nodes", "labels and taints of nodes are ignored")
}

func (r *reader) pods(ctx context.Context, namespace string) (out []corev1.Pod, err error) {
	err = pages(func(o metav1.ListOptions) (string, error) {
		l, err := r.kube.CoreV1().Pods(namespace).List(ctx, o)
		if err != nil {
			return "", err
		}
		out = append(out, l.Items...)
		return l.Continue, nil
	})
	return out, r.forgive(err, "pods", "the phases of pods aren't shown")
}

// custom lists objects of one of Tessera's own kinds.
func custom[T any](ctx context.Context, r *reader, plural string) (out []T, err error) {
	path := "/apis/" + v1alpha1.GroupVersion.String() + "/" + plural
	err = pages(func(o metav1.ListOptions) (string, error) {
		var l struct {
			Metadata metav1.ListMeta `json:"metadata"`
			Items    []T             `json:"items"`
		}
		q := r.kube.CoreV1().RESTClient().Get().AbsPath(path).Param("limit", fmt.Sprint(o.Limit))
		if o.Continue != "" {
			q = q.Param("continue", o.Continue)
		}
		raw, err := q.DoRaw(ctx)
		if err != nil {
			return "", err
		}
		if err := json.Unmarshal(raw, &l); err != nil {
			return "", fmt.Errorf("read %s: %w", plural, err)
		}
		out = append(out, l.Items...)
		return l.Metadata.Continue, nil
	})
	return out, err
}

// model reads all that the model is made of. Pods are read only if their phases are
// wanted. Without all claims nothing is known of what fits.
func (r *reader) model(ctx context.Context, namespace string, phases bool) (view.Cluster, error) {
	var o view.Objects
	var err error
	if o.Slices, err = r.slices(ctx, resourceapi.ResourceSliceSelectorDriver+"="+gpu.DriverName); err != nil {
		return view.Cluster{}, err
	}
	if o.TaintRules, err = r.taintRules(ctx); err != nil {
		return view.Cluster{}, err
	}
	var all bool
	if o.Claims, all, err = r.claims(ctx, namespace); err != nil {
		return view.Cluster{}, err
	}
	o.Inventories, err = custom[v1alpha1.GPUInventory](ctx, r, "gpuinventories")
	if err := r.forgive(err, "gpuinventories.gpu.tessera.dev", "conditions of GPUs and problems of nodes aren't shown"); err != nil {
		return view.Cluster{}, err
	}
	o.Policies, err = custom[v1alpha1.SharingPolicy](ctx, r, "sharingpolicies")
	if err := r.forgive(err, "sharingpolicies.gpu.tessera.dev", "the policies of GPUs aren't shown"); err != nil {
		return view.Cluster{}, err
	}
	if phases {
		if o.Pods, err = r.pods(ctx, ""); err != nil {
			return view.Cluster{}, err
		}
	}
	c := view.Build(o)
	if !all {
		for i := range c.Nodes {
			for k := range c.Nodes[i].GPUs {
				c.Nodes[i].GPUs[k].Fits = nil
			}
		}
	}
	return c, nil
}

// tell writes the notes, each once.
func (r *reader) tell(w io.Writer) {
	for _, n := range slices.Compact(r.notes) {
		fmt.Fprintln(w, "note: "+n)
	}
}

// allocatorVersion is the Kubernetes whose allocator judges: that of go.mod.
const allocatorVersion = "1.37"

// noteVersion notes that the cluster's scheduler is of another version.
func (r *reader) noteVersion() {
	v, err := r.kube.Discovery().ServerVersion()
	if err != nil {
		return // it is for a note only
	}
	minor := strings.Join(strings.SplitN(strings.TrimPrefix(v.GitVersion, "v"), ".", 3)[:2], ".")
	if minor != allocatorVersion {
		r.notes = append(r.notes, fmt.Sprintf("This is the judgement of the allocator of Kubernetes %s; the cluster's is %s, and older schedulers may find less (docs/allocators.md).", allocatorVersion, minor))
	}
}
