package control

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/server"
)

// errNodeUnknown means that the cache has no such Node, not yet or no longer.
// Plans depend on its labels, so nothing can be decided; an event of the Node
// will follow.
var errNodeUnknown = errors.New("the node isn't known")

// planner decides the offer of each node, from its inventory, its labels, the
// policies, the devices of claims, and the server's abilities. Node and policy
// reconciliation both use it, and get the same result for the same facts.
type planner struct {
	client client.Reader // the cache
	book   *rulebook
	claims *claims.Index
	server *server.Server
	// metrics, which may be nil, count what nodes offer.
	metrics *metrics

	// policyEvents receives an event when a node's waiting devices, problems or
	// published devices differ from the last decision; there is no other event for
	// these.
	policyEvents chan event.GenericEvent

	mu   sync.Mutex
	last map[string]nodeAccount // by node
	// published is since when each node's slices have been as planned; nodes whose slices
	// aren't are missing.
	published map[string]time.Time
}

func newPlanner(c client.Reader, claims *claims.Index, s *server.Server, d kinds.Definitions) *planner {
	return &planner{
		client: c, book: &rulebook{client: c, definitions: d}, claims: claims, server: s,
		policyEvents: make(chan event.GenericEvent, 1), last: make(map[string]nodeAccount), published: make(map[string]time.Time),
	}
}

// forNode returns what a node offers now. It is errNodeUnknown where the node
// isn't in the cache.
func (p *planner) forNode(ctx context.Context, inv *v1alpha1.GPUInventory) (nodeDecision, error) {
	for {
		in, err := p.collectInput(ctx, inv)
		if err != nil {
			return nodeDecision{}, err
		}
		d := decide(inv, in)
		p.recordAccount(inv.Name, d.account)
		// The event of a claim that was deleted meanwhile may have been ignored, because
		// nothing waited for it yet.
		if gone, err := p.anyReleased(inv.Name, d.account.leftovers()); err != nil || !gone {
			return d, err
		}
	}
}

// anyReleased reports whether one of a node's allocations has been released.
func (p *planner) anyReleased(node string, waiting []claims.Allocation) (bool, error) {
	if len(waiting) == 0 {
		return false, nil
	}
	now, err := p.claims.In(node)
	return slices.ContainsFunc(waiting, func(a claims.Allocation) bool { return !slices.Contains(now, a) }), err
}

func (p *planner) recordAccount(node string, a nodeAccount) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.last[node]
	p.last[node] = a
	p.metrics.recordOffer(before, a)
	if !slices.Equal(before.leftovers(), a.leftovers()) || !slices.Equal(before.problems(), a.problems()) {
		p.notifyPolicies()
	}
}

// recordPublished records whether a node's slices are as planned now, and returns since
// when they have been.
func (p *planner) recordPublished(node string, published bool, now time.Time) (since time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	since, before := p.published[node]
	if before == published {
		return since
	}
	p.notifyPolicies()
	if !published {
		delete(p.published, node)
		return time.Time{}
	}
	p.published[node] = now
	return now
}

// publishedSince returns since when a node's slices have been as planned; false if they
// aren't.
func (p *planner) publishedSince(node string) (time.Time, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	since, ok := p.published[node]
	return since, ok
}

func (p *planner) notifyPolicies() {
	select {
	case p.policyEvents <- event.GenericEvent{}:
	default: // one is waiting there
	}
}

// accountOf returns the account of forNode, for statuses. Where nothing has changed
// since the last decision on the node, it is the one of that decision.
func (p *planner) accountOf(ctx context.Context, common commonInput, inv *v1alpha1.GPUInventory) (nodeAccount, error) {
	in, err := p.nodeInput(ctx, common, inv)
	if err != nil {
		return nodeAccount{}, err
	}
	if last, ok := p.lastAccount(inv.Name); ok && last.facts == in.facts {
		return last, nil
	}
	d, err := p.forNode(ctx, inv)
	return d.account, err
}

// unchanged reports whether the last decision on a node is still right, and returns its
// account. Where that can't be found out, it isn't.
func (p *planner) unchanged(ctx context.Context, inv *v1alpha1.GPUInventory) (nodeAccount, bool) {
	last, ok := p.lastAccount(inv.Name)
	if !ok {
		return last, false
	}
	in, err := p.collectInput(ctx, inv)
	return last, err == nil && last.facts == in.facts
}

// keepDecision has the last decision on a node, if it was made of this version of the
// inventory, stand for the next one: the controller's own write, which changes nothing that
// decisions depend on.
func (p *planner) keepDecision(inv *v1alpha1.GPUInventory, next string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last := p.last[inv.Name]; last.facts.inventory == versionOf(inv.UID, inv.ResourceVersion) {
		last.facts.inventory = versionOf(inv.UID, next)
		p.last[inv.Name] = last
	}
}

func versionOf(inventory types.UID, resourceVersion string) string {
	return string(inventory) + " " + resourceVersion
}

func (p *planner) lastAccount(node string) (nodeAccount, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	last, ok := p.last[node]
	return last, ok
}

// forget a node that is gone.
func (p *planner) forget(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.metrics.recordOffer(p.last[node], nodeAccount{})
	delete(p.last, node)
	delete(p.published, node)
}

// dependsOnClaims reports whether something follows from the node's claims, as of the last
// decision on it: it offered devices only because claims have them, or has devices
// that no new claim should get.
func (p *planner) dependsOnClaims(node string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.last[node].leftovers()) > 0 || len(p.last[node].withheld) > 0
}

// collectInput returns everything that a decision on a node depends on, besides the
// inventory.
func (p *planner) collectInput(ctx context.Context, inv *v1alpha1.GPUInventory) (decisionInput, error) {
	common, err := p.commonInput(ctx)
	if err != nil {
		return decisionInput{}, err
	}
	return p.nodeInput(ctx, common, inv)
}

// commonInput returns the part of the input that all nodes have.
func (p *planner) commonInput(ctx context.Context) (commonInput, error) {
	var in commonInput
	rules, err := p.book.load(ctx)
	if err != nil {
		return in, err
	}
	in.version, in.policies = rules.version, rules.policies(ctx)
	in.able, err = p.server.Abilities(ctx)
	return in, err
}

// nodeInput returns the input of one node.
func (p *planner) nodeInput(ctx context.Context, common commonInput, inv *v1alpha1.GPUInventory) (decisionInput, error) {
	in := decisionInput{policies: common.policies}
	var err error
	if in.labels, err = p.labels(ctx, inv.Name); err != nil {
		return in, err
	}
	if in.claims, err = p.claims.In(inv.Name); err != nil {
		return in, err
	}
	in.facts = decisionFacts{
		inventory: versionOf(inv.UID, inv.ResourceVersion), labels: hash(in.labels.String()), rules: common.version,
		claims: hash(fmt.Sprint(in.claims)), able: common.able,
	}
	return in, nil
}

// hash stands for a text of which only changes matter.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return string(sum[:])
}

// labels returns a node's labels, which are shared with the cache: don't change them.
func (p *planner) labels(ctx context.Context, node string) (labels.Set, error) {
	object := kinds.NodeMetadata()
	err := p.client.Get(ctx, types.NamespacedName{Name: node}, object, client.UnsafeDisableDeepCopy)
	switch {
	case apierrors.IsNotFound(err):
		return nil, errNodeUnknown
	case err != nil:
		return nil, fmt.Errorf("read Node %s: %w", node, err)
	}
	return object.Labels, nil
}
