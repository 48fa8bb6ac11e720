package ranks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/rank"
)

// manager is the field manager of the taints.
const manager = "tessera-ranks"

// operation of a JSON patch (RFC 6902).
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// replaceTaints replaces the taints of a Node if they are those that were read: the server refuses
// the patch otherwise, so that nobody's taint gets lost.
func replaceTaints(ctx context.Context, nodes typedcorev1.NodeInterface, name string, read, write []corev1.Taint) error {
	const path = "/spec/taints"
	// A node without taints has no such field; to "test", it is null.
	patch := []operation{{"test", path, nil}, {"add", path, write}}
	if len(read) > 0 {
		patch = []operation{{"test", path, read}, {"replace", path, write}}
	}
	data, err := json.Marshal(patch)
	if err != nil {
		return fmt.Errorf("write the taints of Node %s: %w", name, err)
	}
	if _, err := nodes.Patch(ctx, name, types.JSONPatchType, data, metav1.PatchOptions{FieldManager: manager}); err != nil {
		return fmt.Errorf("write the taints of Node %s: %w", name, err)
	}
	return nil
}

// pageSize is how many Nodes are read at a time, as for the caches (pkg/control/pages).
const pageSize = 100

// attempts is how often all Nodes are read again while taints of some change meanwhile.
const attempts = 5

// RemoveAll removes the taints of all ranks from all Nodes, and no others. A Node that fails doesn't
// keep the others. No Ranker may be running.
func RemoveAll(ctx context.Context, nodes typedcorev1.NodeInterface) error {
	for attempt := 1; ; attempt++ {
		changed, err := removeAll(ctx, nodes)
		if !changed || attempt == attempts {
			return err
		}
	}
}

// removeAll also reports whether taints may have changed after they were read.
func removeAll(ctx context.Context, nodes typedcorev1.NodeInterface) (changed bool, err error) {
	var errs []error
	for page := ""; ; {
		list, err := nodes.List(ctx, metav1.ListOptions{Limit: pageSize, Continue: page})
		if err != nil {
			return false, errors.Join(append(errs, fmt.Errorf("list Nodes: %w", err))...)
		}
		for i := range list.Items {
			err := remove(ctx, nodes, &list.Items[i])
			changed = changed || apierrors.IsInvalid(err) || apierrors.IsConflict(err)
			errs = append(errs, err)
		}
		if page = list.Continue; page == "" {
			return changed, errors.Join(errs...)
		}
	}
}

func remove(ctx context.Context, nodes typedcorev1.NodeInterface, node *corev1.Node) error {
	taints, differs := rank.Rank{}.Apply(node.Spec.Taints)
	if !differs {
		return nil
	}
	err := replaceTaints(ctx, nodes, node.Name, node.Spec.Taints, taints)
	if apierrors.IsNotFound(err) {
		return nil // the Node is gone
	}
	if err == nil {
		klog.FromContext(ctx).Info("Removed the node's rank", "node", node.Name)
	}
	return err
}
