package control

import (
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// labelRemover removes the labels that a nodeLabeler wrote before the option was switched off.
// The Nodes themselves say which these are, so that any controller can remove them.
type labelRemover struct {
	client client.Client // reads come from the cache
	writes *undone.Writes
}

// Reconcile removes the labels of one node. It writes nothing to a node that has none.
func (l *labelRemover) Reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
	node := kinds.NodeMetadata()
	if err := l.client.Get(ctx, client.ObjectKey{Name: r.Name}, node); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if !hasOurLabels(node) {
		return reconcile.Result{}, nil
	}
	_, err := l.writes.Do(labelsOf(r.Name), "", func() error { return removeLabels(ctx, l.client, node) })
	left, err := undone.Wait(err)
	return reconcile.Result{RequeueAfter: left}, err
}

// hasOurLabels reports whether a nodeLabeler owns labels of a Node.
func hasOurLabels(node client.Object) bool {
	return slices.ContainsFunc(node.GetManagedFields(), func(m metav1.ManagedFieldsEntry) bool { return m.Manager == labelOwner })
}

// removeLabels removes the labels of a Node that a nodeLabeler owns.
func removeLabels(ctx context.Context, c client.Client, node *metav1.PartialObjectMetadata) error {
	if _, err := applyLabels(ctx, c, node, nil); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove the labels of Node %s: %w", node.Name, err)
	}
	klog.FromContext(ctx).Info("Removed the node's labels")
	return nil
}

// labelPage is how many Nodes are read at a time.
const labelPage = 500

// removeNodeLabels removes all labels of Nodes that nodeLabelers have written.
func removeNodeLabels(ctx context.Context, c client.Client) error {
	for page := ""; ; {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(kinds.Node().GroupVersion().WithKind("NodeList"))
		if err := c.List(ctx, list, client.Limit(labelPage), client.Continue(page)); err != nil {
			return fmt.Errorf("list Nodes: %w", err)
		}
		for i := range list.Items {
			node := &list.Items[i]
			if !hasOurLabels(node) {
				continue
			}
			logger := klog.FromContext(ctx).WithValues("node", node.Name)
			if err := removeLabels(klog.NewContext(ctx, logger), c, node); err != nil {
				return err
			}
		}
		if page = list.Continue; page == "" {
			return nil
		}
	}
}
