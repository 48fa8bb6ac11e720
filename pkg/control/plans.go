package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// errNodeUnknown says that the cache has no such Node, not yet or not any
// more. What its labels are decides about plans, so nothing can be decided;
// word of the Node is on its way here.
var errNodeUnknown = errors.New("the node isn't known")

// allocated is what plans need of claims.
type allocated interface {
	in(pool string) ([]allocation, error)
}

// plans decides what each node offers, from its inventory, its labels, the
// policies, what claims have, and what the server stores. It is the one place
// where these meet; node and policy reconciliation both ask here, and get the
// same answer to the same facts.
type plans struct {
	client client.Reader // the cache
	book   *rulebook
	claims allocated
	server *server

	// judgeAgain tells when on some node something else waits for claims than
	// before, can't be done, or is published: nobody else tells of that.
	judgeAgain chan event.GenericEvent

	mu   sync.Mutex
	last map[string]account // by node
	// published is whether each node's slices were last seen to be as planned.
	published map[string]bool
}

func newPlans(c client.Reader, claims allocated, s *server, k kinds) *plans {
	return &plans{
		client: c, book: &rulebook{client: c, kinds: k}, claims: claims, server: s,
		judgeAgain: make(chan event.GenericEvent, 1), last: make(map[string]account), published: make(map[string]bool),
	}
}

// decision is what one node offers.
type decision struct {
	form publish.Counters
	gpus []offer.GPU
	// requests are what the policies ask of the node, by UUID.
	requests []v1alpha1.GPUSpec
	account  account
}

// account is a decision as policies' statuses need it.
type account struct {
	facts facts
	// pool is the fingerprint of the slices that say so; empty for none.
	pool string
	gpus []gpuAccount
}

// waiting lists the devices that are offered for the sake of claims only.
func (a account) waiting() []allocation {
	var out []allocation
	for _, g := range a.gpus {
		out = append(out, g.waiting...)
	}
	return out
}

func (a account) problems() []string {
	var out []string
	for _, g := range a.gpus {
		out = append(out, g.problems...)
	}
	return out
}

// gpuAccount is what was decided about one GPU, and what of it waits or can't
// be.
type gpuAccount struct {
	name     gpu.DeviceName
	verdict  policy.Verdict
	found    []string // profiles that the plan names and the GPU has
	missing  []string // those that it hasn't, though it could be cut
	problems []string
	// uncharged: the scheduler's version is among the problems.
	uncharged bool
	waiting   []allocation
}

// facts are all that a decision follows from, in a form that compares.
type facts struct {
	inventory, labels, rules, claims string
	able                             publish.Abilities
}

// input is what a decision is made of.
type input struct {
	facts  facts
	labels labels.Set
	rules  *rules
	claims []allocation
}

// decide returns what a node offers now. It is errNodeUnknown where the node
// isn't in the cache.
func (p *plans) decide(ctx context.Context, inv *v1alpha1.GPUInventory) (decision, error) {
	for {
		in, err := p.input(ctx, inv)
		if err != nil {
			return decision{}, err
		}
		d := decide(ctx, inv, in)
		p.remember(inv.Name, d.account)
		// Word of a claim that went until now may have been passed over, because
		// nothing waited for it yet.
		if gone, err := p.gone(inv.Name, d.account.waiting()); err != nil || !gone {
			return d, err
		}
	}
}

// gone says whether one of a node's allocations isn't any more.
func (p *plans) gone(node string, waiting []allocation) (bool, error) {
	if len(waiting) == 0 {
		return false, nil
	}
	now, err := p.claims.in(node)
	return slices.ContainsFunc(waiting, func(a allocation) bool { return !slices.Contains(now, a) }), err
}

func (p *plans) remember(node string, a account) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.last[node]
	p.last[node] = a
	if !slices.Equal(before.waiting(), a.waiting()) || !slices.Equal(before.problems(), a.problems()) {
		p.tellJudge()
	}
}

// sawPublished remembers whether a node's slices are as planned.
func (p *plans) sawPublished(node string, is bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.published[node] != is {
		p.published[node] = is
		p.tellJudge()
	}
}

func (p *plans) tellJudge() {
	select {
	case p.judgeAgain <- event.GenericEvent{}:
	default: // one is waiting there
	}
}

// account returns what decide would, for statuses. Where nothing changed since
// the node was decided on, that is remembered.
func (p *plans) account(ctx context.Context, inv *v1alpha1.GPUInventory) (account, error) {
	in, err := p.input(ctx, inv)
	if err != nil {
		return account{}, err
	}
	p.mu.Lock()
	last, ok := p.last[inv.Name]
	p.mu.Unlock()
	if ok && last.facts == in.facts {
		return last, nil
	}
	d, err := p.decide(ctx, inv)
	return d.account, err
}

// forget a node that is gone.
func (p *plans) forget(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.last, node)
	delete(p.published, node)
}

// waits says whether the node offered something for the sake of claims only,
// when it was last decided on.
func (p *plans) waits(node string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.last[node].waiting()) > 0
}

func (p *plans) input(ctx context.Context, inv *v1alpha1.GPUInventory) (input, error) {
	var in input
	var err error
	if in.labels, err = p.labels(ctx, inv.Name); err != nil {
		return in, err
	}
	if in.rules, err = p.book.rules(ctx); err != nil {
		return in, err
	}
	if in.claims, err = p.claims.in(inv.Name); err != nil {
		return in, err
	}
	if in.facts.able, err = p.server.abilities(ctx); err != nil {
		return in, err
	}
	in.facts.inventory = string(inv.UID) + " " + inv.ResourceVersion
	in.facts.labels = in.labels.String()
	in.facts.rules = in.rules.version
	in.facts.claims = fmt.Sprint(in.claims)
	return in, nil
}

func (p *plans) labels(ctx context.Context, node string) (labels.Set, error) {
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(nodeKind())
	err := p.client.Get(ctx, types.NamespacedName{Name: node}, object)
	switch {
	case apierrors.IsNotFound(err):
		return nil, errNodeUnknown
	case err != nil:
		return nil, fmt.Errorf("read Node %s: %w", node, err)
	}
	return object.Labels, nil
}

func nodeKind() schema.GroupVersionKind { return schema.GroupVersionKind{Version: "v1", Kind: "Node"} }

// decide is the pure part.
func decide(ctx context.Context, inv *v1alpha1.GPUInventory, in input) decision {
	n := inventory.Node(inv)
	policies := in.rules.policies(ctx)
	verdicts := make(map[gpu.UUID]policy.Verdict, len(n.GPUs))
	d := decision{form: in.facts.able.Counters, account: account{facts: in.facts}}
	d.gpus = offer.Build(n, offer.Options{
		Counters:  d.form != publish.NoCounters,
		Multiple:  in.facts.able.Multiple,
		Charged:   in.facts.able.Charged,
		Version:   in.facts.able.Version,
		Allocated: devicesOf(in.claims),
		Plan: func(g gpu.GPU) offer.Plan {
			v := policy.Decide(policies, in.labels, offer.Whole(n, g))
			verdicts[g.UUID] = v
			return offer.Plan{Partitioned: v.Plan.Partitioned, MPS: v.Plan.MPS, TimeSliced: v.Plan.TimeSliced}
		},
	})
	for _, g := range d.gpus {
		v, profiles := verdicts[g.UUID], profilesOf(n, g.UUID)
		d.account.gpus = append(d.account.gpus, accountFor(g, v, profiles, in.claims))
		r := v1alpha1.GPUSpec{UUID: string(g.UUID), TimeSlice: timeSlice(g, v.Plan, inv)}
		if plan := v.Plan.Partitioned; plan != nil && plan.KeepWarm != nil && plan.KeepWarm.Duration > 0 && len(profiles) > 0 {
			r.KeepWarm = plan.KeepWarm
		}
		if r != (v1alpha1.GPUSpec{UUID: r.UUID}) {
			d.requests = append(d.requests, r)
		}
	}
	slices.SortFunc(d.requests, func(a, b v1alpha1.GPUSpec) int { return cmp.Compare(a.UUID, b.UUID) })
	d.account.pool = fingerprint(publish.Pool(metav1.OwnerReference{Name: inv.Name}, d.gpus, d.form))
	return d
}

func fingerprint(pool []resourceapi.ResourceSlice) string {
	all := make([]*resourceapi.ResourceSlice, len(pool))
	for i := range pool {
		all[i] = &pool[i]
	}
	return publish.Fingerprint(all)
}

// timeSlice is what a GPU's time slice is to be while claims have replicas of it.
// What a policy asked for holds until the last of its replicas is gone.
func timeSlice(g offer.GPU, plan v1alpha1.Plan, inv *v1alpha1.GPUInventory) v1alpha1.TimeSliceInterval {
	if plan.TimeSliced != nil && slices.ContainsFunc(g.Devices, func(d resourceapi.Device) bool { return gpu.DeviceName(d.Name).IsReplica() }) {
		return cmp.Or(plan.TimeSliced.Interval, v1alpha1.DefaultTimeSlice)
	}
	i := slices.IndexFunc(inv.Spec.GPUs, func(s v1alpha1.GPUSpec) bool { return s.UUID == string(g.UUID) })
	if i < 0 || !slices.ContainsFunc(g.Leftover, gpu.DeviceName.IsReplica) {
		return ""
	}
	return inv.Spec.GPUs[i].TimeSlice
}

func accountFor(g offer.GPU, v policy.Verdict, profiles []gpu.Profile, claims []allocation) gpuAccount {
	a := gpuAccount{name: g.Name, verdict: v, missing: g.Missing, problems: g.Problems, uncharged: g.Uncharged}
	for _, p := range profiles {
		if v.Plan.Partitioned != nil && slices.Contains(v.Plan.Partitioned.Profiles, p.Name) {
			a.found = append(a.found, p.Name)
		}
	}
	for _, c := range claims {
		if slices.Contains(g.Leftover, c.device) {
			a.waiting = append(a.waiting, c)
		}
	}
	return a
}

// profilesOf a GPU that can be cut; none of another.
func profilesOf(n gpu.Node, uuid gpu.UUID) []gpu.Profile {
	i := slices.IndexFunc(n.GPUs, func(g gpu.GPU) bool { return g.UUID == uuid })
	if i < 0 || n.GPUs[i].MIG == nil {
		return nil
	}
	return n.GPUs[i].MIG.Profiles
}

func devicesOf(claims []allocation) []gpu.DeviceName {
	out := make([]gpu.DeviceName, len(claims))
	for i, c := range claims {
		out[i] = c.device
	}
	return out
}

func (a allocation) compare(b allocation) int {
	return cmp.Or(strings.Compare(string(a.device), string(b.device)), strings.Compare(a.claim, b.claim))
}
