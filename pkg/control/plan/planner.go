// Package plan decides the offer of each node, and remembers the last decision with the facts that
// it was made of. Nodes' ResourceSlices follow from it, and policies' statuses.
package plan

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/server"
)

// ErrNodeUnknown means that the cache has no such Node, not yet or no longer. Plans depend on its
// labels, so nothing can be decided; an event of the Node will follow.
var ErrNodeUnknown = errors.New("the node isn't known")

// Planner decides the offer of each node, from its inventory, its labels, the policies, the
// devices of claims, the server's abilities, and the time. Node and policy reconciliation both
// use it, and get the same result for the same facts.
type Planner struct {
	client  client.Reader // the cache
	book    *rulebook
	claims  *claims.Index
	server  *server.Server
	clock   clock.PassiveClock
	changes chan event.GenericEvent

	mu      sync.Mutex
	metrics *metrics
	last    map[string]Account // by node
	// published is since when each node's slices have been as planned; nodes whose slices
	// aren't are missing.
	published map[string]time.Time
}

// New returns a Planner that has decided nothing yet. It has the definitions' clock.
func New(c client.Reader, claims *claims.Index, s *server.Server, d kinds.Definitions, registerer prometheus.Registerer) *Planner {
	return &Planner{
		client: c, book: &rulebook{client: c, definitions: d}, claims: claims, server: s, clock: d.Clock, changes: make(chan event.GenericEvent, 1),
		metrics: newMetrics(registerer), last: make(map[string]Account), published: make(map[string]time.Time),
	}
}

// Changes receives an event when a node's waiting devices, problems or published devices differ
// from the last decision; there is no other event for these.
func (p *Planner) Changes() <-chan event.GenericEvent { return p.changes }

// Decide decides what a node offers, by input that Input has just returned.
func (p *Planner) Decide(ctx context.Context, inv *v1alpha1.GPUInventory, in Input) (Decision, error) {
	for {
		d := decide(inv, in)
		p.record(inv.Name, d.Account)
		// The event of a claim that was deleted meanwhile may have been ignored, because
		// nothing waited for it yet.
		if gone, err := p.anyReleased(inv.Name, d.Account.leftovers()); err != nil || !gone {
			return d, err
		}
		var err error
		if in, err = p.Input(ctx, inv); err != nil {
			return Decision{}, err
		}
	}
}

// anyReleased reports whether one of a node's allocations has been released.
func (p *Planner) anyReleased(node string, waiting []claims.Allocation) (bool, error) {
	if len(waiting) == 0 {
		return false, nil
	}
	now, err := p.claims.In(node)
	return slices.ContainsFunc(waiting, func(a claims.Allocation) bool { return !slices.Contains(now, a) }), err
}

func (p *Planner) record(node string, a Account) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.last[node]
	p.last[node] = a
	p.metrics.record(before, a)
	if !slices.Equal(before.leftovers(), a.leftovers()) || !slices.Equal(before.problems(), a.problems()) {
		p.notify()
	}
}

// RecordPublished records whether a node's slices are as planned now, and returns since
// when they have been.
func (p *Planner) RecordPublished(node string, published bool, now time.Time) (since time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	since, before := p.published[node]
	if before == published {
		return since
	}
	p.notify()
	if !published {
		delete(p.published, node)
		return time.Time{}
	}
	p.published[node] = now
	return now
}

// PublishedSince returns since when a node's slices have been as planned; false if they
// aren't.
func (p *Planner) PublishedSince(node string) (time.Time, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	since, ok := p.published[node]
	return since, ok
}

func (p *Planner) notify() {
	select {
	case p.changes <- event.GenericEvent{}:
	default: // one is waiting there
	}
}

// Account returns the account of a decision on a node, for statuses. Where nothing has changed
// since the last decision on the node, it is the one of that decision. common may be
// older than that: it only saves reading that input again for each node.
func (p *Planner) Account(ctx context.Context, common CommonInput, inv *v1alpha1.GPUInventory) (Account, error) {
	in, err := p.nodeInput(ctx, common, inv)
	if err != nil {
		return Account{}, err
	}
	if last, unchanged := p.Unchanged(inv.Name, in); unchanged {
		return last, nil
	}
	// The common input may have changed since it was read, and the node's last decision may have
	// been made from the new one: a decision from the old one must not replace it.
	if in, err = p.Input(ctx, inv); err != nil {
		return Account{}, err
	}
	if last, unchanged := p.Unchanged(inv.Name, in); unchanged {
		return last, nil
	}
	d, err := p.Decide(ctx, inv, in)
	return d.Account, err
}

// Unchanged reports whether the last decision on a node was made of the same input, and returns
// its account.
func (p *Planner) Unchanged(node string, in Input) (Account, bool) {
	last, ok := p.Last(node)
	return last, ok && last.facts == in.facts
}

// Keep has the last decision on a node, if it was made of this version of the
// inventory, stand for the next one: the controller's own write, which changes nothing that
// decisions depend on.
func (p *Planner) Keep(inv *v1alpha1.GPUInventory, next string) {
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

// Last returns the account of the last decision on a node; false if there is none.
func (p *Planner) Last(node string) (Account, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	last, ok := p.last[node]
	return last, ok
}

// Forget forgets a node that is gone.
func (p *Planner) Forget(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.metrics.record(p.last[node], Account{})
	delete(p.last, node)
	delete(p.published, node)
}

// DependsOnClaims reports whether something follows from the node's claims, as of the last
// decision on it: it offered devices only because claims have them, or has devices
// that no new claim should get.
func (p *Planner) DependsOnClaims(node string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.last[node].leftovers()) > 0 || len(p.last[node].Withheld) > 0
}

// Input returns everything that a decision on a node depends on, besides the
// inventory. It is ErrNodeUnknown where the node isn't in the cache.
func (p *Planner) Input(ctx context.Context, inv *v1alpha1.GPUInventory) (Input, error) {
	common, err := p.Common(ctx)
	if err != nil {
		return Input{}, err
	}
	return p.nodeInput(ctx, common, inv)
}

// Common returns the part of the input that all nodes have.
func (p *Planner) Common(ctx context.Context) (CommonInput, error) {
	var in CommonInput
	var err error
	if in.Rules, err = p.book.load(ctx); err != nil {
		return in, err
	}
	in.policies = in.Rules.policies(ctx)
	in.able, err = p.server.Abilities(ctx)
	return in, err
}

// nodeInput returns the input of one node.
func (p *Planner) nodeInput(ctx context.Context, common CommonInput, inv *v1alpha1.GPUInventory) (Input, error) {
	in := Input{policies: common.policies, now: p.clock.Now()}
	var err error
	if in.labels, err = p.labels(ctx, inv.Name); err != nil {
		return in, err
	}
	if in.claims, err = p.claims.In(inv.Name); err != nil {
		return in, err
	}
	in.facts = facts{
		inventory: versionOf(inv.UID, inv.ResourceVersion), labels: hash(in.labels.String()), rules: common.Rules.version,
		claims: hash(fmt.Sprint(in.claims)), able: common.able,
	}
	in.facts.turns, _ = turns(inv, in.now)
	return in, nil
}

// hash stands for a text of which only changes matter.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return string(sum[:])
}

// labels returns a node's labels, which are shared with the cache: don't change them.
func (p *Planner) labels(ctx context.Context, node string) (labels.Set, error) {
	object := kinds.NodeMetadata()
	err := p.client.Get(ctx, types.NamespacedName{Name: node}, object, client.UnsafeDisableDeepCopy)
	switch {
	case apierrors.IsNotFound(err):
		return nil, ErrNodeUnknown
	case err != nil:
		return nil, fmt.Errorf("read Node %s: %w", node, err)
	}
	return object.Labels, nil
}
