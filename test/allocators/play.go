package allocators

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// Stage has the settings of a play.
type Stage struct {
	Allocator Allocator
	Server    Server
	// Downgrades: at times the controller assumes that the server has fewer abilities,
	// as when the server doesn't answer.
	Downgrades bool
	// PrioritizedList: claims have alternatives.
	PrioritizedList bool
	// All: claims ask for all devices of a class.
	All bool
}

// Tally counts the claims that asked, and those that were allocated, by their
// requests without sizes and profiles.
type Tally struct {
	Asked, Allocated map[string]int
}

// Add adds the counts of another play.
func (t *Tally) Add(o Tally) {
	if t.Asked == nil {
		*t = Tally{Asked: make(map[string]int), Allocated: make(map[string]int)}
	}
	for kind, n := range o.Asked {
		t.Asked[kind] += n
	}
	for kind, n := range o.Allocated {
		t.Allocated[kind] += n
	}
}

// play is one in progress.
type play struct {
	*Cluster
	stage  Stage
	random *rand.Rand
	tally  Tally
	log    []string
	next   int
}

// Play plays steps with the chance of a seed: claims come and go, policies and
// the server's abilities change, and pools are stored slice by slice. After each
// step nothing may be allocated twice. The error has the seed and all steps.
func Play(ctx context.Context, stage Stage, seed uint64, steps int) (Tally, error) {
	random := rand.New(rand.NewPCG(seed, 11))
	p := &play{stage: stage, random: random}
	p.tally.Add(Tally{})
	node, err := someNode(random)
	if err != nil {
		return p.tally, err
	}
	p.Cluster = &Cluster{Node: node, Plans: make(map[gpu.UUID]v1alpha1.Plan), Server: stage.Server, Allocator: stage.Allocator, Order: random}
	for _, g := range node.GPUs {
		p.Plans[g.UUID] = p.plan(g)
	}
	p.Publish()
	for range steps {
		if err := p.step(ctx); err != nil {
			return p.tally, fmt.Errorf("seed %d: %w\n%s", seed, err, strings.Join(p.log, "\n"))
		}
	}
	return p.tally, nil
}

// someNode has one to three GPUs, of one model or, rarely, of several.
func someNode(random *rand.Rand) (gpu.Node, error) {
	models := []string{"h100-80gb", "h100-80gb", "a100-40gb", "h200", "b200", "a30", "rtx-pro-6000", "l40s"}
	model := models[random.IntN(len(models))]
	n, err := offertest.Node(model, 1+random.IntN(3))
	if err != nil {
		return n, err
	}
	if random.IntN(4) == 0 {
		other, err := offertest.Node(models[random.IntN(len(models))], len(n.GPUs))
		if err != nil {
			return n, err
		}
		last := len(n.GPUs) - 1
		n.GPUs[last] = other.GPUs[last]
	}
	for i := range n.GPUs {
		n.GPUs[i].MemoryReservedBytes = 616 << 20
	}
	return n, nil
}

func (p *play) step(ctx context.Context) error {
	switch n := p.random.IntN(12); {
	case n == 0:
		g := p.Node.GPUs[p.random.IntN(len(p.Node.GPUs))]
		plan := p.plan(g)
		p.Plans[g.UUID] = plan
		p.logf("%s is planned %s", g.UUID[:12], describe(plan))
		p.decide()
	case n == 1 && p.stage.Downgrades:
		p.Server = p.stage.Server
		if p.random.IntN(2) > 0 {
			p.downgrade()
		}
		p.logf("the server is taken for %+v", p.Server)
		p.decide()
	case n < 5:
		p.release()
	default:
		if err := p.ask(ctx); err != nil {
			return err
		}
	}
	if p.Pending() > 0 && p.random.IntN(2) == 0 {
		p.logf("the remaining %d slices are written", p.Pending())
		p.Write(p.Pending())
	}
	return p.Judge()
}

// decide has the controller decide, and write some or all of it.
func (p *play) decide() {
	p.Decide()
	n := p.Pending()
	if n > 1 && p.random.IntN(2) == 0 {
		n = 1 + p.random.IntN(n-1)
		p.logf("%d of %d slices are written", n, p.Pending())
	}
	p.Write(n)
}

func (p *play) downgrade() {
	if p.random.IntN(2) == 0 {
		p.Server.Counters, p.Server.Form = false, publish.NoCounters
	}
	p.Server.Multiple = p.Server.Multiple && p.random.IntN(2) == 0
	p.Server.Charged = p.Server.Charged && p.random.IntN(2) == 0
}

// release deletes a claim. The controller looks at it now or later.
func (p *play) release() {
	names := slices.Sorted(maps.Keys(p.Claims))
	if len(names) == 0 {
		return
	}
	name := names[p.random.IntN(len(names))]
	delete(p.Claims, name)
	p.logf("%s ends", name)
	p.look()
}

// look has the controller look at the claims; sometimes it is late.
func (p *play) look() {
	if p.random.IntN(3) > 0 {
		p.decide()
	}
}

// ask creates a claim.
func (p *play) ask(ctx context.Context) error {
	requests := []Request{p.request()}
	if p.random.IntN(5) == 0 {
		requests = append(requests, p.request())
	}
	name := fmt.Sprintf("claim%03d", p.next)
	p.next++
	results, err := p.Ask(ctx, name, requests...)
	if err != nil && strings.Contains(err.Error(), "is currently being updated") {
		err = nil // a claim for all devices waits for the rest of the pool
	}
	var devices []string
	for _, r := range results {
		devices = append(devices, r.Device)
	}
	p.logf("%s asks for %s, and gets %q", name, join(requests), devices)
	for _, r := range requests {
		p.tally.Asked[r.Kind]++
		if len(results) > 0 {
			p.tally.Allocated[r.Kind]++
		}
	}
	if err != nil {
		return fmt.Errorf("allocate %s: %w", name, err)
	}
	p.look()
	return p.JudgeOffer()
}

// request is one that some GPU of the node could satisfy under some plan.
func (p *play) request() Request {
	g := p.Node.GPUs[p.random.IntN(len(p.Node.GPUs))]
	all := []Request{{Kind: "gpu"}, {Kind: "gpu", Count: 2}, {Kind: "mps"}, {Kind: "mps", Count: 2}, {Kind: "timeslice"}}
	if p.stage.All {
		all = append(all, Request{Kind: "gpu", All: true}, Request{Kind: "timeslice", All: true})
	}
	if p.stage.Server.Multiple {
		for _, size := range []string{"2Gi", "9Gi", "20Gi"} {
			all = append(all, Request{Kind: "mps", Capacity: capacity(size)}, Request{Kind: "gpu", Capacity: capacity(size)})
		}
	}
	for _, profile := range profiles(g) {
		all = append(all, Request{Kind: "mig", Profile: profile}, Request{Kind: "mps", Profile: profile}, Request{Kind: "mig"})
	}
	r := all[p.random.IntN(len(all))]
	if p.stage.PrioritizedList && p.random.IntN(8) == 0 {
		r.Or = &all[p.random.IntN(len(all))]
	}
	return r
}

// plan is one that the GPU can carry out, on some servers.
func (p *play) plan(g gpu.GPU) v1alpha1.Plan {
	shares := int32(2 + p.random.IntN(3))
	all := []v1alpha1.Plan{
		{}, {MPS: &v1alpha1.MPSPlan{Shares: &shares}}, bySize("1Gi", 4), bySize("9Gi", 2),
		{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: shares}},
	}
	forGPUs := bySize("1Gi", 4)
	forGPUs.MPS.Consumable.ServesGPUClass = true
	all = append(all, forGPUs)
	if names := profiles(g); names != nil {
		last := names[len(names)-1]
		mps := &v1alpha1.PartitionMPS{Shares: shares}
		for _, plan := range []v1alpha1.PartitionedPlan{
			{}, {Profiles: names}, {Profiles: names[:1]}, {Layout: []string{last, names[0]}}, {Layout: []string{names[0], names[0], names[0]}},
		} {
			shared := plan
			shared.MPS = mps
			all = append(all, v1alpha1.Plan{Partitioned: &plan}, v1alpha1.Plan{Partitioned: &shared})
		}
	}
	return all[p.random.IntN(len(all))]
}

// profiles are some of the GPU's: the smallest, and the larger ones that leave
// room for others.
func profiles(g gpu.GPU) []string {
	if g.MIG == nil {
		return nil
	}
	var out []string
	for _, p := range g.MIG.Profiles {
		if !strings.ContainsAny(p.Name, "+-") && p.MaxInstances > 1 && len(out) < 4 {
			out = append(out, p.Name)
		}
	}
	return out
}

func bySize(step string, clients int32) v1alpha1.Plan {
	q := resource.MustParse(step)
	return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{MemoryStep: &q, MaxClients: &clients}}}
}

func (p *play) logf(format string, args ...any) { p.log = append(p.log, fmt.Sprintf(format, args...)) }

func describe(plan v1alpha1.Plan) string {
	data, err := json.Marshal(plan)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

func capacity(memory string) map[resourceapi.QualifiedName]string {
	return map[resourceapi.QualifiedName]string{gpu.MemoryCapacity: memory}
}
