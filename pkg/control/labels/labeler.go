package labels

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/undone"
	"github.com/tessera-dra/tessera/pkg/inventory"
)

// Labeler keeps the labels of Nodes equal to their inventories.
type Labeler struct {
	client      client.Client // reads come from the cache
	inventories *kinds.InventoryReader
	writes      *undone.Writes

	mu sync.Mutex
	// refused are labels that a node has from others: their values, by node and key.
	refused map[string]labels.Set
}

// NewLabeler returns a Labeler of a controller whose client reads from a cache.
func NewLabeler(c client.Client, server client.Reader, now clock.PassiveClock, w *undone.Writes) *Labeler {
	return &Labeler{client: c, inventories: kinds.NewInventoryReader(c, server, now), writes: w, refused: make(map[string]labels.Set)}
}

// Reconcile brings the labels of one node in line. In a steady state it writes
// nothing.
func (l *Labeler) Reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
	node := kinds.NodeMetadata()
	if err := l.client.Get(ctx, client.ObjectKey{Name: r.Name}, node); err != nil {
		l.remember(r.Name, nil)
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	inv, err := l.inventories.Get(ctx, r.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	if left := l.inventories.UntilReported(inv); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	want := wantedLabels(inv)
	if inv != nil && kinds.DriverFails(inv) {
		return reconcile.Result{}, nil // the node's GPUs are unknown, not gone: their labels stay
	}
	if l.hasLabels(node, want) {
		return reconcile.Result{}, nil
	}
	_, err = l.writes.Do(undone.LabelsOf(r.Name), want.String(), func() error { return l.apply(ctx, node, want) })
	left, err := undone.Wait(err)
	return reconcile.Result{RequeueAfter: left}, err
}

// wantedLabels returns the labels that this program should have written to the node
// of an inventory.
func wantedLabels(inv *v1alpha1.GPUInventory) labels.Set {
	if inv == nil || inv.DeletionTimestamp != nil {
		return nil
	}
	return OfNode(inventory.Node(inv))
}

// hasLabels reports whether the node has all labels that it should have, apart
// from those that are somebody else's, and no other.
func (l *Labeler) hasLabels(node *metav1.PartialObjectMetadata, want labels.Set) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range keys() {
		key = prefix + key
		value, has := node.Labels[key]
		theirs, refused := l.refused[node.Name][key]
		if refused && has && theirs == value {
			continue
		}
		if wanted, ok := want[key]; ok != has || wanted != value {
			return false
		}
	}
	return true
}

// apply writes the labels that no other manager owns, and removes labels of
// ours that are no longer wanted.
func (l *Labeler) apply(ctx context.Context, node *metav1.PartialObjectMetadata, want labels.Set) error {
	ours := maps.Clone(want)
	stored, err := applyLabels(ctx, l.client, node, ours)
	if keys := conflictingLabels(err); len(keys) > 0 {
		for _, key := range keys {
			delete(ours, key)
		}
		stored, err = applyLabels(ctx, l.client, node, ours)
	}
	if err != nil {
		return fmt.Errorf("label Node %s: %w", node.Name, err)
	}
	theirs := labels.Set{}
	for _, key := range keys() {
		key = prefix + key
		if value, has := stored[key]; has && (want[key] != value || !want.Has(key)) {
			theirs[key] = value
		}
	}
	l.remember(node.Name, theirs)
	klog.FromContext(ctx).Info("Labelled the node", "labels", len(ours), "ofOthers", slices.Sorted(maps.Keys(theirs)))
	return nil
}

func (l *Labeler) remember(node string, theirs labels.Set) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(theirs) == 0 {
		delete(l.refused, node)
		return
	}
	l.refused[node] = theirs
}

// applyLabels makes these the labels that we own, of this very Node, and
// returns all that the Node has then.
func applyLabels(ctx context.Context, c client.Client, node *metav1.PartialObjectMetadata, ours labels.Set) (labels.Set, error) {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(kinds.Node())
	u.SetName(node.Name)
	u.SetUID(node.UID)
	u.SetLabels(ours)
	err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(kinds.LabelManager))
	return u.GetLabels(), err
}

// conflictingLabels are the keys that others own with another value.
func conflictingLabels(err error) []string {
	var keys []string
	var status apierrors.APIStatus
	if errors.As(err, &status) && status.Status().Details != nil {
		for _, c := range status.Status().Details.Causes {
			if key, ok := strings.CutPrefix(c.Field, ".metadata.labels."); ok && c.Type == metav1.CauseTypeFieldManagerConflict {
				keys = append(keys, key)
			}
		}
	}
	return keys
}
