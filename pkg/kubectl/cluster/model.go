package cluster

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// Objects reads all that the model is made of but pods.
func (r *Reader) Objects(ctx context.Context, namespace string) (o view.Objects, err error) {
	if o.Slices, err = r.Slices(ctx, ofDriver); err != nil {
		return o, err
	}
	if o.TaintRules, err = r.taintRules(ctx); err != nil {
		return o, err
	}
	if o.Claims, o.SomeClaims, err = r.Claims(ctx, namespace); err != nil {
		return o, err
	}
	if o.Inventories, err = r.Inventories(ctx); err != nil {
		return o, err
	}
	o.Policies, err = r.Policies(ctx)
	return o, err
}

// Model reads the model. All pods are read only if their phases are wanted.
func (r *Reader) Model(ctx context.Context, namespace string, phases bool) (view.Cluster, error) {
	o, err := r.Objects(ctx, namespace)
	if err != nil {
		return view.Cluster{}, err
	}
	if len(o.Inventories) > 0 { // only nodes with GPUs have ranks
		if o.Nodes, err = r.Nodes(ctx); err != nil {
			return view.Cluster{}, err
		}
	}
	if phases {
		o.Pods, err = r.pods(ctx)
	} else {
		o.Pods, err = r.GroupPods(ctx, o.Claims)
	}
	if err != nil {
		return view.Cluster{}, err
	}
	return view.Build(o), nil
}

// GroupPods lists the pods of the namespaces in which PodGroups have claims.
func (r *Reader) GroupPods(ctx context.Context, claims []resourceapi.ResourceClaim) ([]corev1.Pod, error) {
	var out []corev1.Pod
	for _, namespace := range fit.GroupNamespaces(claims) {
		pods, err := list[corev1.Pod](ctx, r.podResource(""), namespace, metav1.ListOptions{})
		if apierrors.IsForbidden(err) {
			r.Note("You may not list pods in namespace %s: which pods its PodGroups have isn't known. "+AskForList, namespace)
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list pods in namespace %s: %w", namespace, err)
		}
		out = append(out, pods...)
	}
	return out, nil
}

// State reads the model of the named nodes, or of all: only GPUs that the
// namespace uses if there is one. The reader has notes to tell.
func (o *Options) State(ctx context.Context, lacks Missing, nodes []string, namespace string) (*Reader, view.Cluster, error) {
	r, err := o.Reader(lacks)
	if err != nil {
		return nil, view.Cluster{}, err
	}
	c, err := r.Model(ctx, o.CurrentNamespace(), o.Output != "")
	if err != nil {
		return nil, c, err
	}
	if c, err = only(c, nodes, namespace); err != nil {
		r.PrintNotes(o.ErrOut)
	}
	return r, c, err
}

// Show prints the nodes, or all, as a document, or as show does: with texts of one line. lacks
// says what it lacks if it is made without a part of the cluster.
func (o *Options) Show(ctx context.Context, lacks Missing, nodes []string, show func(view.Cluster) error) error {
	if o.IsDocument() {
		lacks = wholeModel()
	}
	r, c, err := o.State(ctx, lacks, nodes, o.Namespace())
	if err != nil {
		return err
	}
	defer r.PrintNotes(o.ErrOut)
	if o.IsDocument() {
		return terminal.Write(o.Out, o.Output, c)
	}
	terminal.OneLines(&c)
	return show(c)
}

// only leaves out the nodes that aren't named, if any is, and the GPUs that no claim of the
// namespace uses, if one is given.
func only(c view.Cluster, nodes []string, namespace string) (view.Cluster, error) {
	for _, name := range nodes {
		if !slices.ContainsFunc(c.Nodes, func(n view.Node) bool { return n.Name == name }) {
			return c, fmt.Errorf("there is no node %s with GPUs; kubectl gpu map shows all", name)
		}
	}
	out := view.Cluster{Nodes: []view.Node{}}
	for _, n := range c.Nodes {
		if len(nodes) > 0 && !slices.Contains(nodes, n.Name) {
			continue
		}
		if namespace != "" {
			n.GPUs = slices.DeleteFunc(slices.Clone(n.GPUs), func(g view.GPU) bool {
				return !slices.ContainsFunc(g.Uses, func(u view.Use) bool { return u.Claim.Namespace == namespace })
			})
			if len(n.GPUs) == 0 {
				continue
			}
		}
		out.Nodes = append(out.Nodes, n)
	}
	return out, nil
}

// NodeNames are the names of nodes with GPUs, for a shell to complete; none if they can't be
// read.
func (o *Options) NodeNames(ctx context.Context) []string {
	r, err := o.Reader(nil)
	if err != nil {
		return nil
	}
	return names(r.Inventories(ctx))
}

// PolicyNames are the names of SharingPolicies, for a shell to complete; none if they can't
// be read.
func (o *Options) PolicyNames(ctx context.Context) []string {
	r, err := o.Reader(nil)
	if err != nil {
		return nil
	}
	return names(r.Policies(ctx))
}

// names are those of the objects; none if they couldn't be read.
func names[T any, P interface {
	*T
	metav1.Object
}](all []T, err error) []string {
	if err != nil {
		return nil
	}
	var out []string
	for i := range all {
		out = append(out, P(&all[i]).GetName())
	}
	return out
}
