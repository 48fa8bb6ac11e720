package control

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// maxConflicts is how many conflicts a status has room for.
const maxConflicts = 16

// policies tells admins what became of their SharingPolicies. It looks at all
// policies and nodes at once, since each GPU's answer depends on all policies;
// there is one request for everything.
type policies struct{ client client.Client }

// Reconcile writes the statuses that changed.
func (p policies) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	var list v1alpha1.SharingPolicyList
	if err := p.client.List(ctx, &list); err != nil {
		return reconcile.Result{}, fmt.Errorf("list SharingPolicies: %w", err)
	}
	if len(list.Items) == 0 {
		return reconcile.Result{}, nil
	}
	nodes, err := p.nodes(ctx)
	if err != nil {
		return reconcile.Result{}, err
	}
	var errs []error
	for name, status := range judge(ctx, list.Items, nodes) {
		i := slices.IndexFunc(list.Items, func(s v1alpha1.SharingPolicy) bool { return s.Name == name })
		if equality.Semantic.DeepEqual(list.Items[i].Status, status) {
			continue
		}
		changed := list.Items[i].DeepCopy()
		changed.Status = status
		if err := p.client.Status().Update(ctx, changed); err != nil {
			errs = append(errs, fmt.Errorf("write the status of SharingPolicy %s: %w", name, err))
			continue
		}
		accepted := meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionAccepted)
		klog.FromContext(ctx).Info("Judged a SharingPolicy", "policy", name, "accepted", accepted.Status,
			"reason", accepted.Reason, "nodes", status.Nodes, "gpus", status.GPUs)
	}
	return reconcile.Result{}, errors.Join(errs...)
}

// gpuNode is a node as selectors see it.
type gpuNode struct {
	labels labels.Set
	gpus   []resourceapi.Device
}

func (p policies) nodes(ctx context.Context) ([]gpuNode, error) {
	var inventories v1alpha1.GPUInventoryList
	if err := p.client.List(ctx, &inventories); err != nil {
		return nil, fmt.Errorf("list GPUInventories: %w", err)
	}
	objects := &metav1.PartialObjectMetadataList{}
	objects.SetGroupVersionKind(nodeKind())
	if err := p.client.List(ctx, objects); err != nil {
		return nil, fmt.Errorf("list Nodes: %w", err)
	}
	byName := make(map[string]labels.Set, len(objects.Items))
	for i := range objects.Items {
		byName[objects.Items[i].Name] = objects.Items[i].Labels
	}
	var out []gpuNode
	for i := range inventories.Items {
		set, ok := byName[inventories.Items[i].Name]
		if !ok {
			continue
		}
		n := gpuNode{labels: set}
		facts := inventory.Node(&inventories.Items[i])
		for _, g := range facts.GPUs {
			n.gpus = append(n.gpus, offer.Whole(facts, g))
		}
		out = append(out, n)
	}
	return out, nil
}

func nodeKind() schema.GroupVersionKind { return schema.GroupVersionKind{Version: "v1", Kind: "Node"} }

// judge computes the status of every policy.
func judge(ctx context.Context, all []v1alpha1.SharingPolicy, nodes []gpuNode) map[string]v1alpha1.SharingPolicyStatus {
	out := make(map[string]v1alpha1.SharingPolicyStatus, len(all))
	var accepted []*candidate
	for i := range all {
		c, err := newCandidate(&all[i])
		if err != nil {
			out[all[i].Name] = refused(&all[i], err)
			continue
		}
		accepted = append(accepted, c)
	}
	for _, n := range nodes {
		assign(ctx, accepted, n)
	}
	for _, c := range accepted {
		out[c.object.Name] = c.status()
	}
	return out
}

// assign finds the policy of each GPU of a node and keeps count.
func assign(ctx context.Context, accepted []*candidate, n gpuNode) {
	here := make(map[string]bool)
	for _, device := range n.gpus {
		var selecting []policy.Policy
		for _, c := range accepted {
			if c.selects(ctx, n.labels, device) {
				selecting = append(selecting, c.policy())
			}
		}
		winner, ok := policy.Decide(selecting)
		if !ok {
			continue
		}
		for _, c := range accepted {
			switch {
			case c.object.Name == winner.Name:
				c.gpus++
				if !here[winner.Name] {
					here[winner.Name] = true
					c.nodes++
				}
			case slices.Contains(selecting, c.policy()):
				c.lost[winner.Name]++
			}
		}
	}
}

// candidate is a policy that takes part, and what it got.
type candidate struct {
	object      *v1alpha1.SharingPolicy
	nodeLabels  labels.Selector
	gpuSelector *selector // nil: all
	nodes, gpus int32
	lost        map[string]int32 // to whom, how many
	failed      error            // failure of gpuSelector on failedOn
	failedOn    string           // the first by name of the devices it fails on
}

// newCandidate returns an error for a policy that can't take part.
func newCandidate(s *v1alpha1.SharingPolicy) (*candidate, error) {
	if errs := s.Spec.Validate(); len(errs) > 0 {
		return nil, errs.ToAggregate()
	}
	if err := policy.Supported(s.Spec.Plan); err != nil {
		return nil, err
	}
	c := &candidate{object: s, nodeLabels: labels.Everything(), lost: make(map[string]int32)}
	var err error
	if s.Spec.NodeSelector != nil {
		if c.nodeLabels, err = metav1.LabelSelectorAsSelector(s.Spec.NodeSelector); err != nil {
			return nil, fmt.Errorf("spec.nodeSelector: %w", err)
		}
	}
	if s.Spec.GPUSelector != "" {
		if c.gpuSelector, err = compile(s.Spec.GPUSelector); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *candidate) policy() policy.Policy {
	return policy.Policy{Name: c.object.Name, Priority: c.object.Spec.Priority, Created: c.object.CreationTimestamp.Time}
}

// selects says whether the policy wants a GPU. A selector that fails on a GPU,
// because the GPU lacks an attribute, say, doesn't select it.
func (c *candidate) selects(ctx context.Context, node labels.Set, device resourceapi.Device) bool {
	if !c.nodeLabels.Matches(node) {
		return false
	}
	if c.gpuSelector == nil {
		return true
	}
	ok, err := c.gpuSelector.matches(ctx, device)
	if err != nil && (c.failed == nil || device.Name < c.failedOn) {
		c.failedOn = device.Name
		c.failed = fmt.Errorf("spec.gpuSelector fails on %s, which is therefore not selected: %w", device.Name, err)
	}
	return ok && err == nil
}

func (c *candidate) status() v1alpha1.SharingPolicyStatus {
	s := v1alpha1.SharingPolicyStatus{
		ObservedGeneration: c.object.Generation, Nodes: c.nodes, GPUs: c.gpus,
		Conditions: slices.Clone(c.object.Status.Conditions),
	}
	for _, name := range slices.Sorted(maps.Keys(c.lost)) {
		if len(s.Conflicts) < maxConflicts {
			s.Conflicts = append(s.Conflicts, v1alpha1.PolicyConflict{Policy: name, GPUs: c.lost[name]})
		}
	}
	message := "the policy is in force"
	if c.failed != nil {
		message = c.failed.Error()
	}
	accept(&s, c.object, metav1.ConditionTrue, v1alpha1.ReasonAccepted, message)
	return s
}

func refused(s *v1alpha1.SharingPolicy, err error) v1alpha1.SharingPolicyStatus {
	status := v1alpha1.SharingPolicyStatus{ObservedGeneration: s.Generation, Conditions: slices.Clone(s.Status.Conditions)}
	reason := v1alpha1.ReasonInvalid
	if errors.Is(err, policy.ErrPlanNotSupported) {
		reason = v1alpha1.ReasonPlanNotSupported
	}
	accept(&status, s, metav1.ConditionFalse, reason, err.Error())
	return status
}

func accept(status *v1alpha1.SharingPolicyStatus, s *v1alpha1.SharingPolicy, is metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionAccepted, Status: is, Reason: reason, Message: message, ObservedGeneration: s.Generation,
	})
}
