package labels

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// Remover removes the labels that a Labeler wrote before the option was switched off. The Nodes
// themselves say which these are, so that any controller can remove them.
type Remover struct {
	client client.Client // reads come from the cache
	writes *undone.Writes
}

// NewRemover returns a Remover of a controller whose client reads from a cache.
func NewRemover(c client.Client, w *undone.Writes) *Remover { return &Remover{c, w} }

// Reconcile removes the labels of one node. It writes nothing to a node that has none.
func (l *Remover) Reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
	node := kinds.NodeMetadata()
	if err := l.client.Get(ctx, client.ObjectKey{Name: r.Name}, node); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if !kinds.HasOurLabels(node) {
		return reconcile.Result{}, nil
	}
	_, err := l.writes.Do(undone.LabelsOf(r.Name), "", func() error { return remove(ctx, l.client, node) })
	left, err := undone.Wait(err)
	return reconcile.Result{RequeueAfter: left}, err
}

// remove removes the labels of a Node that a Labeler owns.
func remove(ctx context.Context, c client.Client, node *metav1.PartialObjectMetadata) error {
	if _, err := applyLabels(ctx, c, node, nil); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove the labels of Node %s: %w", node.Name, err)
	}
	klog.FromContext(ctx).Info("Removed the node's labels")
	return nil
}

// pageSize is how many Nodes are read at a time.
const pageSize = 500

// RemoveAll removes all labels of Nodes that Labelers have written. None may be
// running.
func RemoveAll(ctx context.Context, c client.Client) error {
	for page := ""; ; {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(kinds.Node().GroupVersion().WithKind("NodeList"))
		if err := c.List(ctx, list, client.Limit(pageSize), client.Continue(page)); err != nil {
			return fmt.Errorf("list Nodes: %w", err)
		}
		for i := range list.Items {
			node := &list.Items[i]
			if !kinds.HasOurLabels(node) {
				continue
			}
			logger := klog.FromContext(ctx).WithValues("node", node.Name)
			if err := remove(klog.NewContext(ctx, logger), c, node); err != nil {
				return err
			}
		}
		if page = list.Continue; page == "" {
			return nil
		}
	}
}
