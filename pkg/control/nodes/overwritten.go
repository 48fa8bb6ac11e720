package nodes

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// Keys of undone.Writes for the writes about a node.
func slicesOf(node string) string                   { return "slices/" + node }
func deletionOf(node string) string                 { return "deletion/" + node }
func settingsOf(node string) string                 { return "settings/" + node }
func conditionOf(conditionType, node string) string { return "condition/" + conditionType + "/" + node }

// writesOf returns the keys of all writes about a node with an inventory.
func writesOf(node string) []string {
	return []string{
		slicesOf(node), settingsOf(node), undone.LabelsOf(node),
		conditionOf(v1alpha1.ConditionReady, node), conditionOf(v1alpha1.ConditionConflicting, node),
		conditionOf(v1alpha1.ConditionDoubleAllocation, node), conditionOf(v1alpha1.ConditionOverwritten, node),
	}
}

// withdraw deletes our slices of a node, for as long as nothing is to be published there.
func (n *Reconciler) withdraw(ctx context.Context, node string, inv *v1alpha1.GPUInventory, ours []*resourceapi.ResourceSlice) error {
	n.Writes.Forget(slicesOf(node))
	return n.deleteOurs(ctx, node, inv, ours)
}

// deleteOurs deletes slices of ours, with growing pauses if somebody writes them again.
func (n *Reconciler) deleteOurs(ctx context.Context, node string, inv *v1alpha1.GPUInventory, ours []*resourceapi.ResourceSlice) error {
	if len(ours) == 0 {
		return nil
	}
	times, err := n.Writes.Do(deletionOf(node), "", func() error {
		klog.FromContext(ctx).Info("Withdrawing the node's devices", "slices", len(ours))
		return n.Slices.Delete(ctx, ours)
	})
	if err != nil {
		return err
	}
	return n.reportUndone(ctx, inv, times, "ResourceSlices that the controller deletes are created", ours)
}

// setSilent sets the inventory's condition that the node's plugin doesn't answer,
// unless the plugin itself has reported why it isn't ready. The plugin removes it.
func (n *Reconciler) setSilent(ctx context.Context, inv *v1alpha1.GPUInventory, number int64) error {
	if !meta.IsStatusConditionTrue(inv.Status.Conditions, v1alpha1.ConditionReady) {
		return nil
	}
	return n.setCondition(ctx, inv, metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonPluginSilent,
		Message: fmt.Sprintf("The node's plugin didn't answer publishRequest %d within %s, and nothing of the node is offered until it does: "+
			"look at the plugin's pod on the node, and at the kubelet.", number, answerWithin),
	})
}

// setCondition writes one condition of an inventory. On a conflict it does nothing,
// because the newer inventory is reconciled next.
func (n *Reconciler) setCondition(ctx context.Context, inv *v1alpha1.GPUInventory, c metav1.Condition) error {
	changed := inv.DeepCopy()
	if !meta.SetStatusCondition(&changed.Status.Conditions, c) {
		return nil
	}
	times, err := n.Writes.Do(conditionOf(c.Type, inv.Name), string(c.Status)+c.Reason+c.Message, func() error {
		return n.Client.Status().Patch(ctx, changed, client.MergeFromWithOptions(inv, client.MergeFromWithOptimisticLock{}))
	})
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil
	case err != nil:
		return fmt.Errorf("write condition %s of GPUInventory %s: %w", c.Type, inv.Name, err)
	}
	if times == undone.Fight {
		n.Events.Eventf(inv, nil, corev1.EventTypeWarning, v1alpha1.ConditionOverwritten, "Report", "%s",
			undone.Explain("the condition "+c.Type+" of this GPUInventory is changed", ""))
	}
	klog.FromContext(ctx).Info("Wrote a condition of the node's inventory", "condition", c.Type, "status", c.Status, "reason", c.Reason)
	return nil
}

// isOurs reports whether this release has written the slices.
func (n *Reconciler) isOurs(all []*resourceapi.ResourceSlice) bool {
	return n.Release == "" || publish.OfRelease(all, n.Release)
}

func isOverwritten(inv *v1alpha1.GPUInventory) bool {
	return inv != nil && meta.IsStatusConditionTrue(inv.Status.Conditions, v1alpha1.ConditionOverwritten)
}

// isContested reports whether something is to be judged about a node that decisions don't
// depend on: a double allocation, another driver's slices, or writes that are undone.
func (n *Reconciler) isContested(inv *v1alpha1.GPUInventory) bool {
	return meta.IsStatusConditionTrue(inv.Status.Conditions, v1alpha1.ConditionDoubleAllocation) || inv.Status.HasForeignSlices() ||
		isOverwritten(inv) || n.Writes.Undone(undone.LabelsOf(inv.Name)) >= undone.Fight
}

// reportUndone sets the condition Overwritten if a write has been undone so many times that
// somebody else must be at work. found are the slices as they were found, if the write was
// one of slices.
func (n *Reconciler) reportUndone(ctx context.Context, inv *v1alpha1.GPUInventory, times int, happens string, found []*resourceapi.ResourceSlice) error {
	if times < undone.Fight || inv == nil {
		return nil
	}
	for _, s := range found {
		if other := s.Annotations[publish.ReleaseAnnotation]; other != "" && n.Release != "" && other != n.Release {
			return n.setCondition(ctx, inv, metav1.Condition{
				Type: v1alpha1.ConditionOverwritten, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonOtherRelease,
				Message: explainReleases(n.Release, other),
			})
		}
	}
	return n.setCondition(ctx, inv, metav1.Condition{
		Type: v1alpha1.ConditionOverwritten, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonOtherWriter,
		Message: undone.Explain(happens, strings.Join(managersOf(found), ", ")),
	})
}

// judgeOverwritten sets the condition Overwritten if somebody undoes the writes of the Node's
// labels, which wake this controller, too. It ends the condition after a quiet time, and
// returns how much of that is left.
func (n *Reconciler) judgeOverwritten(ctx context.Context, inv *v1alpha1.GPUInventory) (time.Duration, error) {
	switch {
	case inv == nil:
		return 0, nil
	case !isOverwritten(inv):
		return 0, n.reportUndone(ctx, inv, n.Writes.Undone(undone.LabelsOf(inv.Name)), "labels of this Node that the controller writes are changed or deleted", nil)
	}
	if left := n.Writes.UntilQuiet(slicesOf(inv.Name), deletionOf(inv.Name), settingsOf(inv.Name), undone.LabelsOf(inv.Name)); left > 0 {
		return left, nil
	}
	return 0, n.setCondition(ctx, inv, metav1.Condition{
		Type: v1alpha1.ConditionOverwritten, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonUndisturbed,
		Message: "nobody else undoes the controller's writes any more",
	})
}

// explainReleases names both releases. Its text is the same in both: each would otherwise
// replace the other's.
func explainReleases(a, b string) string {
	return fmt.Sprintf("Two releases of Tessera, in the namespaces %s and %s, write the ResourceSlices of this node, and each replaces what the other has written. "+
		"A cluster needs only one: uninstall the other (helm list --all-namespaces). Until then each writes less and less often.",
		min(a, b), max(a, b))
}

// managersOf returns the field managers of slices, without the controller's own, which an
// older version has, too.
func managersOf(all []*resourceapi.ResourceSlice) []string {
	var out []string
	for _, s := range all {
		for _, m := range s.ManagedFields {
			if m.Manager != publish.FieldManager {
				out = append(out, m.Manager)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
