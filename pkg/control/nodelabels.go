package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
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
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
)

// labelOwner is the field manager of the labels of Nodes that this program
// writes: it changes and removes only labels that it owns.
const labelOwner = "tessera-node-labels"

// labelPrefix starts the key of each of them.
const labelPrefix = "nvidia.com/"

// labelKeys returns the keys, without the prefix, that NodeLabels may use.
func labelKeys() []string {
	return []string{
		"gpu.present", "gpu.product", "gpu.count", "gpu.memory", "gpu.family", "gpu.compute.major", "gpu.compute.minor", "mig.capable",
		"cuda.driver.major", "cuda.driver.minor", "cuda.driver.rev",
		"cuda.driver-version.major", "cuda.driver-version.minor", "cuda.driver-version.revision", "cuda.driver-version.full",
		"cuda.runtime.major", "cuda.runtime.minor",
		"cuda.runtime-version.major", "cuda.runtime-version.minor", "cuda.runtime-version.full",
	}
}

// NodeLabels returns the labels that GPU Feature Discovery (NVIDIA/k8s-device-plugin,
// internal/lm) would set on a node with these GPUs, in the same form. Where the
// node has several models they are about the one with the most GPUs, or else the
// lowest index. A GPU that is lost counts as gone.
func NodeLabels(n gpu.Node) labels.Set {
	g, count := mainModel(n.GPUs)
	if count == 0 {
		return nil
	}
	out := labels.Set{}
	set := func(key, value string) { out[labelPrefix+key] = value }
	set("gpu.present", "true")
	set("gpu.product", labelValue(g.Model.ProductName))
	set("gpu.count", strconv.Itoa(count))
	if mib := g.MemoryBytes >> 20; mib > 0 {
		set("gpu.memory", strconv.FormatInt(mib, 10))
	}
	set("mig.capable", strconv.FormatBool(slices.ContainsFunc(n.GPUs, func(g gpu.GPU) bool { return g.MIG != nil })))
	if major, minor, ok := twoNumbers(g.Model.CUDAComputeCapability); ok {
		set("gpu.family", family(major, minor))
		set("gpu.compute.major", strconv.Itoa(major))
		set("gpu.compute.minor", strconv.Itoa(minor))
	}
	if v := strings.Split(n.DriverVersion, "."); len(v) == 2 || len(v) == 3 {
		v = append(v, "")
		for key, value := range map[string]string{
			"driver.major": v[0], "driver.minor": v[1], "driver.rev": v[2], "driver-version.major": v[0], "driver-version.minor": v[1],
			"driver-version.revision": v[2], "driver-version.full": n.DriverVersion,
		} {
			set("cuda."+key, labelValue(value))
		}
	}
	if major, minor, ok := twoNumbers(n.CUDADriverVersion); ok {
		for _, key := range []string{"cuda.runtime", "cuda.runtime-version"} {
			set(key+".major", strconv.Itoa(major))
			set(key+".minor", strconv.Itoa(minor))
		}
		set("cuda.runtime-version.full", fmt.Sprintf("%d.%d", major, minor))
	}
	return out
}

// mainModel returns a GPU of the model that the labels are about, and how many
// there are.
func mainModel(gpus []gpu.GPU) (main gpu.GPU, most int) {
	lost := func(c gpu.Condition) bool { return c.Type == gpu.Lost }
	count := make(map[string]int)
	for _, g := range gpus {
		if !slices.ContainsFunc(g.Conditions, lost) {
			count[g.Model.ProductName]++
		}
	}
	byIndex := slices.SortedStableFunc(slices.Values(gpus), func(a, b gpu.GPU) int { return cmp.Compare(a.Index, b.Index) })
	for _, g := range byIndex {
		if n := count[g.Model.ProductName]; n > most && !slices.ContainsFunc(g.Conditions, lost) {
			main, most = g, n
		}
	}
	return main, most
}

// labelValue writes a name as a label's value: words joined by dashes, without
// characters that a value must not have.
func labelValue(s string) string {
	s = regexp.MustCompile(`[^A-Za-z0-9-_. ]`).ReplaceAllString(s, "")
	s = strings.Join(strings.Fields(s), "-")
	return strings.Trim(s[:min(len(s), 63)], "-_.")
}

func twoNumbers(version string) (major, minor int, ok bool) {
	a, b, _ := strings.Cut(version, ".")
	major, err := strconv.Atoi(a)
	if err != nil || major <= 0 {
		return 0, 0, false
	}
	minor, err = strconv.Atoi(b)
	return major, minor, err == nil
}

// family names the architecture of a compute capability as the label does.
func family(major, minor int) string {
	switch {
	case major == 7 && minor >= 5:
		return "turing"
	case major == 8 && minor >= 9:
		return "ada-lovelace"
	case major == 10 || major == 12:
		return "blackwell"
	}
	if name, ok := map[int]string{3: "kepler", 5: "maxwell", 6: "pascal", 7: "volta", 8: "ampere", 9: "hopper"}[major]; ok {
		return name
	}
	return "undefined"
}

// nodeLabeler keeps the labels of Nodes equal to their inventories.
type nodeLabeler struct {
	client      client.Client // reads come from the cache
	inventories *kinds.InventoryReader
	writes      *undone.Writes

	mu sync.Mutex
	// refused are labels that a node has from others: their values, by node and key.
	refused map[string]labels.Set
}

func newNodeLabeler(c client.Client, live client.Reader, now clock.PassiveClock) *nodeLabeler {
	return &nodeLabeler{client: c, inventories: kinds.NewInventoryReader(c, live, now), writes: undone.New(now), refused: make(map[string]labels.Set)}
}

// Reconcile brings the labels of one node in line. In a steady state it writes
// nothing.
func (l *nodeLabeler) Reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
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
	if inv != nil && driverFails(inv) {
		return reconcile.Result{}, nil // the node's GPUs are unknown, not gone: their labels stay
	}
	if l.hasLabels(node, want) {
		return reconcile.Result{}, nil
	}
	_, err = l.writes.Do(labelsOf(r.Name), want.String(), func() error { return l.apply(ctx, node, want) })
	left, err := undone.Wait(err)
	return reconcile.Result{RequeueAfter: left}, err
}

// driverFails reports whether the node's driver doesn't work, so that its GPUs are unknown.
func driverFails(inv *v1alpha1.GPUInventory) bool {
	ready := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionReady)
	return ready != nil && ready.Reason == v1alpha1.ReasonNVMLError
}

// wantedLabels returns the labels that this program should have written to the node
// of an inventory.
func wantedLabels(inv *v1alpha1.GPUInventory) labels.Set {
	if inv == nil || inv.DeletionTimestamp != nil {
		return nil
	}
	return NodeLabels(inventory.Node(inv))
}

// hasLabels reports whether the node has all labels that it should have, apart
// from those that are somebody else's, and no other.
func (l *nodeLabeler) hasLabels(node *metav1.PartialObjectMetadata, want labels.Set) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range labelKeys() {
		key = labelPrefix + key
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
func (l *nodeLabeler) apply(ctx context.Context, node *metav1.PartialObjectMetadata, want labels.Set) error {
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
	for _, key := range labelKeys() {
		key = labelPrefix + key
		if value, has := stored[key]; has && (want[key] != value || !want.Has(key)) {
			theirs[key] = value
		}
	}
	l.remember(node.Name, theirs)
	klog.FromContext(ctx).Info("Labelled the node", "labels", len(ours), "ofOthers", slices.Sorted(maps.Keys(theirs)))
	return nil
}

func (l *nodeLabeler) remember(node string, theirs labels.Set) {
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
	err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(labelOwner))
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
