package report

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/node/facts"
)

// Run keeps the object equal to the facts until ctx ends; it always returns
// nil then. Goroutines: one watches the inventory, one the Node, the caller's
// writes.
func (r *Reporter) Run(ctx context.Context) error {
	inventories := watchOne(r.inventories, inventoryResource, r.cfg.NodeName, &v1alpha1.GPUInventory{}, nil, r.saw, r.sawDeleted)
	nodes := watchOne(r.nodes, "nodes", r.cfg.NodeName, &corev1.Node{}, strip, r.sawNode, r.sawNodeDeleted)
	var watches sync.WaitGroup
	defer watches.Wait()
	watches.Go(func() { inventories.RunWithContext(ctx) })
	watches.Go(func() { nodes.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), inventories.HasSynced, nodes.HasSynced) {
		return nil
	}
	r.mu.Change(func() { r.synced = true })
	r.keep(ctx)
	return nil
}

// keep writes after each change, after those of the facts that come together once, and
// after each failure a while later.
func (r *Reporter) keep(ctx context.Context) {
	failures := flowcontrol.NewBackOff(retryFirst, retryLast)
	for ctx.Err() == nil {
		r.mu.Lock()
		changed := r.mu.Changed()
		r.mu.Unlock()
		_, factsChanged := r.facts.State()
		var retry <-chan time.Time
		if err := r.reconcile(ctx); err != nil {
			failures.Next(r.cfg.NodeName, time.Now())
			pause := failures.Get(r.cfg.NodeName)
			klog.FromContext(ctx).Info("GPUInventory not written, trying again", "node", r.cfg.NodeName, "after", pause, "err", err)
			retry = time.After(pause)
			changed, factsChanged = nil, nil // don't turn a failing server's answers into a storm
		} else {
			failures.Reset(r.cfg.NodeName)
		}
		select {
		case <-changed:
		case <-factsChanged:
		case <-retry:
		case <-ctx.Done():
		}
		select {
		case <-factsChanged:
			r.gather(ctx)
		default:
		}
	}
}

// reconcile writes the facts to the object, with at most one request.
func (r *Reporter) reconcile(ctx context.Context) error {
	have, want, err := r.compare()
	if err != nil || want == nil {
		return err
	}
	if have == nil {
		have, err = r.create(ctx, want)
		if err != nil {
			return err
		}
		want.ObjectMeta = have.ObjectMeta
	}
	if !equality.Semantic.DeepEqual(have.Status, want.Status) && !r.dropped.covers(have.Status, want.Status) {
		return r.update(ctx, want)
	}
	r.markReported(want)
	return nil
}

// compare returns the object as it is (nil: there is none) and as it should
// be (nil: nothing to say yet).
func (r *Reporter) compare() (have, want *v1alpha1.GPUInventory, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known, _ := r.facts.State()
	if !known.Known || !r.synced {
		return nil, nil, nil
	}
	if r.inventory == nil {
		if r.self == nil {
			return nil, nil, fmt.Errorf("the cluster has no Node %s to own its GPUInventory: is --node-name right?", r.cfg.NodeName)
		}
		want = newInventory(r.self)
	} else {
		want = r.inventory.DeepCopy()
	}
	r.fill(want, known)
	return r.inventory, want, nil
}

// fill writes the facts into the object; needs the lock.
func (r *Reporter) fill(inv *v1alpha1.GPUInventory, known facts.State) {
	s := &inv.Status
	inventory.SetFacts(s, known.Node)
	// As precise as the API is, or the stored time would differ from the sent one.
	now := metav1.Now().Rfc3339Copy()
	inventory.Stamp(s, now)
	s.BootID, s.PluginVersion = r.cfg.BootID, r.cfg.PluginVersion
	if at := registeredAt(known); at != nil {
		s.RegisteredAt = at
		s.PublishResponse = inv.Spec.PublishRequest
	}
	r.setDoubleAllocation(s, now)
	if ready := ready(s, known); ready != nil {
		ready.LastTransitionTime = now
		meta.SetStatusCondition(&s.Conditions, *ready)
	}
	if l := known.Listing; l.Identified < l.Listed {
		meta.SetStatusCondition(&s.Conditions, metav1.Condition{
			Type: v1alpha1.ConditionUnidentifiedGPUs, Status: metav1.ConditionTrue, Reason: ReasonNotIdentified, LastTransitionTime: now,
			Message: fmt.Sprintf("NVML lists %d GPUs, %d are identified: %s", l.Listed, l.Identified, l.Message),
		})
	} else {
		meta.RemoveStatusCondition(&s.Conditions, v1alpha1.ConditionUnidentifiedGPUs)
	}
	if c := conflicting(known); c.Status == metav1.ConditionTrue || !s.HasForeignSlices() {
		c.LastTransitionTime = now
		meta.SetStatusCondition(&s.Conditions, c)
	}
}

// registeredAt returns when the kubelet has registered the plugin; nil: it hasn't.
func registeredAt(known facts.State) *metav1.MicroTime {
	if known.Registered.IsZero() {
		return nil
	}
	// As precise as the API is, or what is read back would never be equal.
	return new(metav1.NewMicroTime(known.Registered.Truncate(time.Microsecond)))
}

// ready returns nil while there is nothing new to say: between the start of a
// plugin and its registration, its predecessor's condition stays.
func ready(s *v1alpha1.GPUInventoryStatus, known facts.State) *metav1.Condition {
	c := &metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse}
	switch said := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionReady); {
	case known.Trouble.Reason != "":
		c.Reason, c.Message = known.Trouble.Reason, known.Trouble.Message
	case known.Conflict() != "" || s.HasForeignSlices():
		c.Reason, c.Message = ReasonConflicting, "see condition Conflicting"
	case !known.Registered.IsZero():
		c.Status, c.Reason = metav1.ConditionTrue, ReasonRegistered
		c.Message = "the driver answers and the kubelet has registered the plugin"
	case said != nil && said.Reason == ReasonRegistered:
		return nil
	default:
		c.Reason, c.Message = ReasonNotRegistered, "the kubelet has not registered the plugin yet"
	}
	return c
}

// conflicting returns the condition Conflicting, as far as this node can tell.
func conflicting(known facts.State) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionConflicting, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNoOtherDriver,
		Message: "no other driver offers this node's GPUs"}
	if message := known.DevicePlugin; message != "" {
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, "DevicePlugin", message
	} else if known.DRADriver != "" {
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, "DRADriver", known.DRADriver
	}
	return c
}

func newInventory(node *corev1.Node) *v1alpha1.GPUInventory {
	return &v1alpha1.GPUInventory{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "GPUInventory"},
		ObjectMeta: metav1.ObjectMeta{
			Name: node.Name,
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID, Controller: new(true),
			}},
		},
	}
}

func (r *Reporter) create(ctx context.Context, inv *v1alpha1.GPUInventory) (*v1alpha1.GPUInventory, error) {
	made := &v1alpha1.GPUInventory{}
	bare := inv.DeepCopy()
	bare.Status = v1alpha1.GPUInventoryStatus{} // a subresource: dropped by the server
	err := r.inventories.Post().Resource(inventoryResource).Body(bare).Do(ctx).Into(made)
	if apierrors.IsAlreadyExists(err) {
		return nil, errors.Join(err, r.refresh(ctx))
	}
	if err != nil {
		return nil, fmt.Errorf("create GPUInventory %s: %w", inv.Name, err)
	}
	r.saw(made)
	return made, nil
}

func (r *Reporter) update(ctx context.Context, inv *v1alpha1.GPUInventory) error {
	written := &v1alpha1.GPUInventory{}
	err := r.inventories.Put().Resource(inventoryResource).Name(inv.Name).SubResource("status").Body(inv).Do(ctx).Into(written)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return errors.Join(err, r.refresh(ctx))
	}
	if err != nil {
		return fmt.Errorf("write status of GPUInventory %s: %w", inv.Name, err)
	}
	r.noteDropped(ctx, inv.Status, written.Status)
	r.saw(written)
	r.markReported(written)
	return nil
}

// refresh reads the object, for when the watch is behind.
func (r *Reporter) refresh(ctx context.Context) error {
	inv, err := r.Get(ctx)
	switch {
	case err != nil:
		return err
	case inv == nil:
		r.mu.Change(func() { r.inventory = nil })
	default:
		r.saw(inv)
	}
	return nil
}

// Get reads the object; nil: there is none. It may be called before Run.
func (r *Reporter) Get(ctx context.Context) (*v1alpha1.GPUInventory, error) {
	inv := &v1alpha1.GPUInventory{}
	err := r.inventories.Get().Resource(inventoryResource).Name(r.cfg.NodeName).Do(ctx).Into(inv)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil //nolint:nilnil // the caller asks for it
	case err != nil:
		return nil, fmt.Errorf("read GPUInventory %s: %w", r.cfg.NodeName, err)
	}
	return inv, nil
}

// markReported records that the object is equal to the facts.
func (r *Reporter) markReported(inv *v1alpha1.GPUInventory) {
	r.mu.Lock()
	double := r.doubleAllocation != nil && hasDoubleAllocation(&inv.Status, r.doubleAllocation.Reason)
	news := double || !r.reported
	r.mu.Unlock()
	if !news {
		return
	}
	r.mu.Change(func() {
		r.reported = true
		if double {
			r.doubleAllocation = nil
		}
	})
}

// strip keeps of a Node what is looked at: the rest (images, for one) is large.
func strip(obj any) (any, error) {
	node, ok := obj.(*corev1.Node)
	if !ok {
		return obj, nil
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion},
		Status:     corev1.NodeStatus{Allocatable: node.Status.Allocatable},
	}, nil
}

// sawNode wakes the others only when something of interest changed: a Node's
// status changes every few minutes.
func (r *Reporter) sawNode(node *corev1.Node) {
	r.mu.Lock()
	same := r.self != nil && r.self.UID == node.UID && conflict(r.self) == conflict(node)
	r.mu.Unlock()
	if !same {
		r.facts.SawNode(true, conflict(node))
		r.mu.Change(func() { r.self = node })
	}
}

func (r *Reporter) sawNodeDeleted(*corev1.Node) {
	r.facts.SawNode(false, "")
	r.mu.Change(func() { r.self = nil })
}
