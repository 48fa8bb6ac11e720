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
	rules     *ruleClient
	// notes are sentences about what couldn't be read, and unread the names of these resources.
	notes, unread []string
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
	resources := draclient.New(kube)
	rules := &ruleClient{current: resources.DeviceTaintRules(), alpha: kube.ResourceV1alpha3().DeviceTaintRules()}
	return &reader{config: cfg, kube: kube, resources: resources, rules: rules}, nil
}

// list reads all objects of a kind, page by page.
func list[L interface{ GetContinue() string }, T any](ctx context.Context, call func(context.Context, metav1.ListOptions) (L, error), items func(L) []T) ([]T, error) {
	var out []T
	o := metav1.ListOptions{Limit: pageSize}
	for {
		page, err := call(ctx, o)
		if err != nil {
			return nil, err
		}
		out = append(out, items(page)...)
		if o.Continue = page.GetContinue(); o.Continue == "" {
			return out, nil
		}
	}
}

// forgive notes that a resource can't be read, and what is missing therefore, if the
// reason is that the user may not or that the cluster doesn't have it.
func (r *reader) forgive(err error, resource, missing string) error {
	if err != nil {
		r.unread = append(r.unread, resource)
	}
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

// slices are those of a driver, or all for "".
func (r *reader) slices(ctx context.Context, driver string) ([]resourceapi.ResourceSlice, error) {
	out, err := list(ctx, func(ctx context.Context, o metav1.ListOptions) (*resourceapi.ResourceSliceList, error) {
		if driver != "" {
			o.FieldSelector = resourceapi.ResourceSliceSelectorDriver + "=" + driver
		}
		return r.resources.ResourceSlices().List(ctx, o)
	}, func(l *resourceapi.ResourceSliceList) []resourceapi.ResourceSlice { return l.Items })
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("the API server doesn't serve resource.k8s.io: Dynamic Resource Allocation is off, or Kubernetes is older than 1.31 (%w)", err)
	}
	return out, r.forgive(err, "resourceslices.resource.k8s.io", "which devices are offered, and what else fits, isn't known")
}

// taintRules are those that the API server serves: up to Kubernetes 1.36 it has none by
// default.
func (r *reader) taintRules(ctx context.Context) ([]resourceapi.DeviceTaintRule, error) {
	out, err := list(ctx, r.rules.List, func(l *resourceapi.DeviceTaintRuleList) []resourceapi.DeviceTaintRule { return l.Items })
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return out, r.forgive(err, "devicetaintrules.resource.k8s.io", "taints that such rules add to devices are ignored")
}

// claims are those of all namespaces, or, if the user may not list them, of one. It
// reports whether they are all.
func (r *reader) claims(ctx context.Context, namespace string) (out []resourceapi.ResourceClaim, all bool, err error) {
	of := func(namespace string) ([]resourceapi.ResourceClaim, error) {
		return list(ctx, r.resources.ResourceClaims(namespace).List, func(l *resourceapi.ResourceClaimList) []resourceapi.ResourceClaim { return l.Items })
	}
	out, err = of("")
	if !apierrors.IsForbidden(err) {
		return out, err == nil, r.forgive(err, "resourceclaims.resource.k8s.io", "who has which device isn't known")
	}
	if out, err = of(namespace); err != nil {
		return nil, false, r.forgive(err, fmt.Sprintf("resourceclaims.resource.k8s.io in namespace %s", namespace), "who has which device, and what else fits, isn't known")
	}
	r.notes = append(r.notes, fmt.Sprintf("You may not list resourceclaims.resource.k8s.io of all namespaces: only claims of namespace %s are shown, and what else fits isn't known. "+
		"Ask for the verb list on them in all namespaces.", namespace))
	return out, false, nil
}

func (r *reader) classes(ctx context.Context) ([]resourceapi.DeviceClass, error) {
	out, err := list(ctx, r.resources.DeviceClasses().List, func(l *resourceapi.DeviceClassList) []resourceapi.DeviceClass { return l.Items })
	return out, r.forgive(err, "deviceclasses.resource.k8s.io", "which devices a class selects isn't known")
}

func (r *reader) nodes(ctx context.Context) ([]corev1.Node, error) {
	out, err := list(ctx, r.kube.CoreV1().Nodes().List, func(l *corev1.NodeList) []corev1.Node { return l.Items })
	return out, r.forgive(err, "nodes", "labels and taints of nodes are ignored")
}

func (r *reader) pods(ctx context.Context, namespace string) ([]corev1.Pod, error) {
	out, err := list(ctx, r.kube.CoreV1().Pods(namespace).List, func(l *corev1.PodList) []corev1.Pod { return l.Items })
	return out, r.forgive(err, "pods", "the phases of pods aren't shown")
}

// inventories and policies are of Tessera's own kinds.
func (r *reader) inventories(ctx context.Context) ([]v1alpha1.GPUInventory, error) {
	out, err := custom[v1alpha1.GPUInventory](ctx, r, "gpuinventories")
	return out, r.forgive(err, "gpuinventories.gpu.tessera.dev", "conditions of GPUs and problems of nodes aren't shown")
}

func (r *reader) policies(ctx context.Context) ([]v1alpha1.SharingPolicy, error) {
	out, err := custom[v1alpha1.SharingPolicy](ctx, r, "sharingpolicies")
	return out, r.forgive(err, "sharingpolicies.gpu.tessera.dev", "the policies of GPUs aren't shown")
}

// customList is a list of one of Tessera's own kinds.
type customList[T any] struct {
	metav1.ListMeta `json:"metadata"`

	Items []T `json:"items"`
}

func custom[T any](ctx context.Context, r *reader, plural string) ([]T, error) {
	return list(ctx, func(ctx context.Context, o metav1.ListOptions) (*customList[T], error) {
		q := r.kube.CoreV1().RESTClient().Get().AbsPath(ownPath(plural)).Param("limit", fmt.Sprint(o.Limit))
		if o.Continue != "" {
			q = q.Param("continue", o.Continue)
		}
		raw, err := q.DoRaw(ctx)
		if err != nil {
			return nil, err
		}
		l := new(customList[T])
		if err := json.Unmarshal(raw, l); err != nil {
			return nil, fmt.Errorf("read %s: %w", plural, err)
		}
		return l, nil
	}, func(l *customList[T]) []T { return l.Items })
}

// ownPath is where the API server has one of Tessera's own kinds.
func ownPath(plural string) string { return "/apis/" + v1alpha1.GroupVersion.String() + "/" + plural }

// objects reads all that the model is made of but pods, and reports whether the claims
// are all.
func (r *reader) objects(ctx context.Context, namespace string) (o view.Objects, all bool, err error) {
	if o.Slices, err = r.slices(ctx, gpu.DriverName); err != nil {
		return o, false, err
	}
	if o.TaintRules, err = r.taintRules(ctx); err != nil {
		return o, false, err
	}
	if o.Claims, all, err = r.claims(ctx, namespace); err != nil {
		return o, false, err
	}
	if o.Inventories, err = r.inventories(ctx); err != nil {
		return o, false, err
	}
	o.Policies, err = r.policies(ctx)
	return o, all, err
}

// model reads the model. Pods are read only if their phases are wanted.
func (r *reader) model(ctx context.Context, namespace string, phases bool) (view.Cluster, error) {
	o, all, err := r.objects(ctx, namespace)
	if err != nil {
		return view.Cluster{}, err
	}
	if phases {
		if o.Pods, err = r.pods(ctx, ""); err != nil {
			return view.Cluster{}, err
		}
	}
	return build(o, all), nil
}

// build makes the model. Without all claims nothing is known of the claims that fit.
func build(o view.Objects, all bool) view.Cluster {
	c := view.Build(o)
	if !all {
		for i := range c.Nodes {
			for k := range c.Nodes[i].GPUs {
				c.Nodes[i].GPUs[k].Fits = nil
			}
		}
	}
	return c
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
		r.notes = append(r.notes, fmt.Sprintf("This is the judgement of the allocator of Kubernetes %s; the cluster's is %s, and older schedulers may find less (%sallocators.md).", allocatorVersion, minor, documents))
	}
}
