package offer_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// offered is one GPU's offer in short: "whole" and "1g10gb-4".
type offered struct {
	Devices, Leftover, Counters string
	Problem                     string // a part of one of the problems; "": there is none
}

// TestPlans tests the offer of a GPU by its plan, its MIG mode, foreign
// instances, and devices of claims.
func TestPlans(t *testing.T) {
	const (
		small  = "1g10gb-0 1g10gb-1 1g10gb-2 1g10gb-3 1g10gb-4 1g10gb-5 1g10gb-6"
		halves = "s0-3=4 s4-6=3"
	)
	for name, tc := range map[string]struct {
		gpu       func(*gpu.GPU) // changes an H100 in its initial state
		plan      *v1alpha1.PartitionedPlan
		allocated []string
		bare      bool // a server without counters
		want      offered
	}{
		"exclusive":                          {want: offered{Devices: "whole"}},
		"exclusive, no counters":             {bare: true, want: offered{Devices: "whole"}},
		"exclusive, others switched MIG on":  {gpu: on, want: offered{Problem: "exclusive by its plan"}},
		"exclusive, others made an instance": {gpu: other("3g.40gb", 4), want: offered{Devices: "3g40gb-4", Problem: "exclusive by its plan"}},
		"exclusive, MIG goes on at a reset":  {gpu: pending(false, true), want: offered{Devices: "whole"}},
		"one profile":                        {plan: only("1g.10gb"), want: offered{Devices: "whole " + small}},
		"two profiles":                       {plan: only("3g.40gb", "1g.10gb"), want: offered{Devices: "whole " + small + " 3g40gb-4 3g40gb-0", Counters: halves}},
		"the whole GPU as a partition":       {plan: only("7g.80gb"), want: offered{Devices: "whole 7g80gb-0"}},
		"a profile it hasn't beside one it has": {plan: only("1g.10gb", "1g.18gb"),
			want: offered{Devices: "whole " + small}},
		"no profile it has": {plan: only("1g.18gb"), want: offered{Devices: "whole", Problem: "none of the profiles 1g.18gb"}},
		"on demand, no counters": {plan: only("1g.10gb"), bare: true,
			want: offered{Devices: "whole", Problem: "spec.plan.partitioned.layout"}},
		"on demand, no counters, others switched MIG on": {gpu: on, plan: only("1g.10gb"), bare: true,
			want: offered{Problem: "spec.plan.partitioned.layout"}},
		"MPS in partitions": {plan: &v1alpha1.PartitionedPlan{MPS: &v1alpha1.PartitionMPS{Shares: 2}},
			want: offered{Devices: "whole", Problem: "spec.plan.partitioned.mps"}},

		"no MIG":                     {gpu: func(g *gpu.GPU) { g.MIG = nil }, plan: only("1g.10gb"), want: offered{Devices: "whole", Problem: "no MIG"}},
		"mode off, not to be had":    {gpu: fixed, plan: only("1g.10gb"), want: offered{Devices: "whole", Problem: "nvidia-smi -mig 1"}},
		"mode off, no profiles read": {gpu: func(g *gpu.GPU) { g.MIG.Profiles = nil }, plan: only("1g.10gb"), want: offered{Devices: "whole", Problem: "lists no MIG profiles"}},
		"others switched MIG on":     {gpu: on, plan: only("1g.10gb"), want: offered{Devices: small}},
		"MIG goes on at a reset":     {gpu: pending(false, true), plan: only("1g.10gb"), want: offered{Devices: "whole", Problem: "is off and becomes on"}},
		"MIG goes off at a reset":    {gpu: both(other("3g.40gb", 4), pending(true, false)), plan: only("1g.10gb"), want: offered{Devices: "3g40gb-4", Problem: "is on and becomes off"}},
		"others made an instance":    {gpu: other("3g.40gb", 4), plan: only("1g.10gb"), want: offered{Devices: "1g10gb-0 1g10gb-1 1g10gb-2 1g10gb-3 3g40gb-4"}},
		"others' instance is used first": {gpu: other("1g.10gb", 2), plan: only("1g.10gb", "3g.40gb"),
			want: offered{Devices: "1g10gb-2 1g10gb-0 1g10gb-1 1g10gb-3 1g10gb-4 1g10gb-5 1g10gb-6 3g40gb-4", Counters: "s4-6=3"}},
		"others have the media engines": {gpu: other("1g.10gb+me", 2), plan: only("1g.10gb+me", "3g.40gb"), want: offered{Devices: "1g10gbme-2 3g40gb-4"}},
		"others' instance under our mode": {gpu: both(other("3g.40gb", 4), pending(false, false)), plan: only("3g.40gb"),
			want: offered{Devices: "3g40gb-4 3g40gb-0"}},
		"others' instance is divided": {gpu: both(other("3g.40gb", 4), divided), plan: only("3g.40gb"), want: offered{Devices: "3g40gb-0", Problem: "no compute instance or several"}},
		"others' instance is unknown": {gpu: both(other("3g.40gb", 4), func(g *gpu.GPU) { g.MIG.Instances[0].Profile = "x" }), plan: only("3g.40gb"),
			want: offered{Devices: "3g40gb-0", Problem: `no profile "x"`}},

		"layout":                          {plan: fix("3g.40gb", "1g.10gb", "1g.10gb", "2g.20gb"), want: offered{Devices: "1g10gb-2 1g10gb-3 2g20gb-0 3g40gb-4"}},
		"layout, no counters":             {plan: fix("3g.40gb", "3g.40gb"), bare: true, want: offered{Devices: "3g40gb-0 3g40gb-4"}},
		"layout that needs a search":      {plan: fix("2g.20gb", "2g.20gb", "3g.40gb"), want: offered{Devices: "2g20gb-0 2g20gb-2 3g40gb-4"}},
		"layout too large":                {plan: fix("3g.40gb", "3g.40gb", "1g.10gb"), want: offered{Devices: "3g40gb-0 3g40gb-4", Problem: "no room for the 1g.10gb of spec.plan.partitioned.layout[2]"}},
		"layout, too many media engines":  {plan: fix("1g.10gb+me", "1g.10gb+me"), want: offered{Devices: "1g10gbme-0", Problem: "layout[1]"}},
		"layout with a profile it hasn't": {plan: fix("1g.18gb", "3g.40gb"), want: offered{Devices: "3g40gb-0", Problem: "no profile 1g.18gb (spec.plan.partitioned.layout[0])"}},
		"layout of profiles it hasn't":    {plan: fix("1g.18gb"), want: offered{Devices: "whole", Problem: "no profile 1g.18gb"}},
		"layout, others made part of it":  {gpu: other("3g.40gb", 4), plan: fix("3g.40gb", "3g.40gb"), want: offered{Devices: "3g40gb-4 3g40gb-0"}},
		"layout, others are in the way":   {gpu: other("1g.10gb", 0), plan: fix("3g.40gb", "3g.40gb"), want: offered{Devices: "1g10gb-0 3g40gb-4", Problem: "layout[1]"}},

		"claimed: in the plan":                        {plan: only("1g.10gb"), allocated: []string{"1g10gb-4", "1g10gb-0"}, want: offered{Devices: "whole " + small}},
		"claimed: whole, in the plan":                 {plan: only("1g.10gb"), allocated: []string{"whole"}, want: offered{Devices: "whole " + small}},
		"claimed: what can't be had at once":          {plan: only("1g.10gb"), allocated: []string{"1g10gb-4", "whole"}, want: offered{Devices: "whole 1g10gb-4", Leftover: "whole 1g10gb-4"}},
		"claimed: whole, then layout":                 {plan: fix("3g.40gb", "3g.40gb"), allocated: []string{"whole"}, want: offered{Devices: "whole 3g40gb-0 3g40gb-4", Leftover: "whole"}},
		"claimed: whole, then layout, no counters":    {plan: fix("3g.40gb", "3g.40gb"), allocated: []string{"whole"}, bare: true, want: offered{Devices: "whole", Leftover: "whole"}},
		"claimed: whole, then others switched MIG on": {gpu: on, plan: only("1g.10gb"), allocated: []string{"whole"}, want: offered{Devices: "whole " + small, Leftover: "whole"}},
		"claimed: partition, then exclusive":          {allocated: []string{"1g10gb-4"}, want: offered{Devices: "whole 1g10gb-4", Leftover: "1g10gb-4"}},
		"claimed: partition, then exclusive, no counters": {allocated: []string{"1g10gb-4"}, bare: true,
			want: offered{Devices: "1g10gb-4", Leftover: "1g10gb-4"}},
		"claimed: partition, then narrower": {plan: only("3g.40gb"), allocated: []string{"1g10gb-4", "1g10gb-0"},
			want: offered{Devices: "whole 1g10gb-0 1g10gb-4 3g40gb-0 3g40gb-4", Leftover: "1g10gb-0 1g10gb-4", Counters: "s0=1 s4=1"}},
		"claimed: partition, then layout, no counters": {plan: fix("3g.40gb", "3g.40gb"), allocated: []string{"1g10gb-4"}, bare: true,
			want: offered{Devices: "1g10gb-4 3g40gb-0", Leftover: "1g10gb-4"}},
		"claimed: media engines, then layout, no counters": {plan: fix("1g.10gb+me", "3g.40gb"), allocated: []string{"1g10gbme-6"}, bare: true,
			want: offered{Devices: "1g10gbme-6 3g40gb-0", Leftover: "1g10gbme-6"}},
		"claimed: partition, then counters are gone": {plan: only("1g.10gb"), allocated: []string{"1g10gb-4"}, bare: true,
			want: offered{Devices: "1g10gb-4", Leftover: "1g10gb-4", Problem: "no shared counters"}},
		"claimed: others' instance, then it is gone": {gpu: on, plan: only("1g.10gb"), allocated: []string{"3g40gb-4"},
			want: offered{Devices: small + " 3g40gb-4", Leftover: "3g40gb-4", Counters: "s4-6=3"}},
		"claimed: a partition that isn't listed any more": {plan: only("7g.80gb"), allocated: []string{"1g18gb-0"},
			want: offered{Problem: "gpu-00000001-mig-1g18gb-0, which a claim has"}},
		"claimed: two partitions, one isn't listed any more": {plan: only("1g.10gb"), allocated: []string{"1g18gb-0", "3g40gb-4", "1g10gb-0"},
			want: offered{Devices: "1g10gb-0 3g40gb-4", Leftover: "3g40gb-4", Problem: "gpu-00000001-mig-1g18gb-0, which a claim has"}},
		"claimed: partition, then MIG is gone": {gpu: func(g *gpu.GPU) { g.MIG = nil }, plan: only("1g.10gb"), allocated: []string{"1g10gb-0"},
			want: offered{Problem: "gpu-00000001-mig-1g10gb-0, which a claim has"}},
		"claimed: partition, then the tables make no sense": {gpu: func(g *gpu.GPU) { g.MIG.Profiles[3].MaxInstances = -1 }, plan: only("1g.10gb"), allocated: []string{"1g10gb-0"},
			want: offered{Problem: "gpu-00000001-mig-1g10gb-0, which a claim has"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := node(t, "h100-80gb", 1)
			if tc.gpu != nil {
				tc.gpu(&n.GPUs[0])
			}
			o := options{Server: offer.Server{Counters: !tc.bare}, Plan: v1alpha1.Plan{Partitioned: tc.plan}}
			for _, a := range tc.allocated {
				o.Allocated = append(o.Allocated, long(a))
			}
			got := build(n, o)
			if len(got) != 1 {
				t.Fatalf("%d GPUs", len(got))
			}
			checkProblem(t, got[0].Problems, tc.want.Problem)
			tc.want.Problem = ""
			checkLeftover(t, got[0])
			if diff := cmp.Diff(tc.want, inShort(got[0])); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestMissingProfilesAreNamed(t *testing.T) {
	n := node(t, "h100-80gb", 1)
	got := build(n, partitioned([]string{"1g.18gb", "1g.10gb", "9g.9gb"}))[0].Missing
	if diff := cmp.Diff([]string{"1g.18gb", "9g.9gb"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A node that reports nonsense of a GPU loses that GPU's partitions, and nothing
// else: a slice that the server refuses would keep back all its GPUs.
func TestTablesThatMakeNoSense(t *testing.T) {
	for name, change := range map[string]func(*gpu.MIG){
		"instances in one place": func(m *gpu.MIG) {
			at := m.Profiles[0].Placements[0]
			m.Instances = []gpu.Instance{{UUID: "MIG-1", Profile: m.Profiles[0].Name, Placement: at, GPUInstanceID: 1}, {UUID: "MIG-2", Profile: m.Profiles[0].Name, Placement: at, GPUInstanceID: 2}}
		},
		"a name that is none":     func(m *gpu.MIG) { m.Profiles[0].Name = "1g.10GB beta" },
		"a name that is too long": func(m *gpu.MIG) { m.Profiles[0].Name = strings.Repeat("1g.10gb", 9) },
	} {
		t.Run(name, func(t *testing.T) {
			n := node(t, "h100-80gb", 1)
			change(n.GPUs[0].MIG)
			got := build(n, partitioned(nil))[0]
			checkProblem(t, got.Problems, "make no sense")
			for _, d := range got.Devices {
				checkLimits(t, d)
			}
		})
	}
}

// The number of ways to fill a GPU grows with every profile; no report of a
// node may use up the controller's time or memory.
func TestManyProfilesAreCountedInTime(t *testing.T) {
	n := node(t, "h100-80gb", 1)
	m := n.GPUs[0].MIG
	m.Profiles = nil
	for i := range 24 {
		m.Profiles = append(m.Profiles, gpu.Profile{Name: fmt.Sprintf("%dg.1gb", i+1), MaxInstances: 1,
			Placements: []gpu.Placement{{Start: i, Size: 1}, {Start: (i + 12) % 24, Size: 1}}})
	}
	if got := build(n, partitioned(nil))[0]; len(got.Devices) != 49 {
		t.Errorf("%d devices, want all", len(got.Devices))
	}
}

// A node with GPUs of several kinds, more than fit one slice of counter sets;
// one of them is lost.
func TestManyGPUs(t *testing.T) {
	n := node(t, "rtx-pro-6000", 10)
	l4 := node(t, "l4", 12)
	for i := 10; i < 12; i++ {
		n.GPUs = append(n.GPUs, l4.GPUs[i])
	}
	n.GPUs[3].Conditions = []gpu.Condition{{Type: gpu.Lost}}
	var all []string
	for _, p := range n.GPUs[0].MIG.Profiles {
		all = append(all, p.Name)
	}
	o := partitioned(all)
	o.Allocated = []gpu.DeviceName{"gpu-00000004", "gpu-00000005-mig-1g24gb-0"}
	got := build(n, o)
	if len(got) != 11 {
		t.Fatalf("%d GPUs", len(got))
	}
	for _, g := range got {
		want, counters := 31, 7
		if g.Index >= 10 {
			want, counters = 1, 0
		}
		if len(g.Devices) != want || len(g.Leftover) != 0 {
			t.Errorf("GPU %d: %d devices, leftover %v", g.Index, len(g.Devices), g.Leftover)
		}
		if g.Counters == nil != (counters == 0) || g.Counters != nil && len(g.Counters.Counters) != counters {
			t.Errorf("GPU %d: counters %s", g.Index, counterText(g))
		}
		for _, d := range g.Devices {
			checkLimits(t, d)
		}
	}
}

// The offer doesn't depend on the order in which facts are listed.
func TestOrderOfFactsDoesNotMatter(t *testing.T) {
	n := node(t, "h100-80gb", 3)
	o := partitioned([]string{"3g.40gb", "1g.10gb"})
	o.Allocated = []gpu.DeviceName{"gpu-00000001-mig-2g20gb-0", "gpu-00000001-mig-2g20gb-2", "gpu-00000002-mig-2g20gb-2"}
	want := build(n, o)
	slices.Reverse(n.GPUs)
	slices.Reverse(o.Allocated)
	reversed := partitioned([]string{"1g.10gb", "3g.40gb"})
	o.Plan = reversed.Plan
	if diff := cmp.Diff(want, build(n, o)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func checkProblem(t *testing.T, got []string, want string) {
	t.Helper()
	if want == "" && len(got) > 0 || want != "" && !slices.ContainsFunc(got, func(p string) bool { return strings.Contains(p, want) }) {
		t.Errorf("problems %q, want one that says %q", got, want)
	}
}

func only(profiles ...string) *v1alpha1.PartitionedPlan {
	return &v1alpha1.PartitionedPlan{Profiles: profiles}
}

func fix(layout ...string) *v1alpha1.PartitionedPlan {
	return &v1alpha1.PartitionedPlan{Layout: layout}
}

// The possible states of a GPU.

func on(g *gpu.GPU)    { g.MIG.Enabled, g.MIG.Pending = true, true }
func fixed(g *gpu.GPU) { g.MIG.Switchable = false }
func divided(g *gpu.GPU) {
	g.MIG.Instances[0].UUID, g.MIG.Instances[0].ComputeInstanceID = "", gpu.NoComputeInstance
}

func pending(now, then bool) func(*gpu.GPU) {
	return func(g *gpu.GPU) { g.MIG.Enabled, g.MIG.Pending = now, then }
}

func other(profile string, start int) func(*gpu.GPU) {
	return func(g *gpu.GPU) { instance(g, profile, start) }
}

func both(a, b func(*gpu.GPU)) func(*gpu.GPU) {
	return func(g *gpu.GPU) { a(g); b(g) }
}

const firstGPU = "gpu-00000001"

func long(short string) gpu.DeviceName {
	if short == "whole" {
		return firstGPU
	}
	return gpu.DeviceName(fmt.Sprintf("%s-mig-%s", firstGPU, short))
}

// checkLeftover checks that no DeviceClass selects leftovers, and that all
// other devices have their normal type.
func checkLeftover(t *testing.T, g offer.GPU) {
	t.Helper()
	for _, d := range g.Devices {
		left := slices.Contains(g.Leftover, gpu.DeviceName(d.Name))
		if is := *d.Attributes["type"].StringValue == "leftover"; is != left {
			t.Errorf("device %s has type %s; leftover: %v", d.Name, *d.Attributes["type"].StringValue, left)
		}
	}
}

func inShort(g offer.GPU) offered {
	short := func(name string) string {
		if name == string(g.Name) {
			return "whole"
		}
		return strings.TrimPrefix(strings.TrimPrefix(name, string(g.Name)+"-"), "mig-")
	}
	var devices, leftover []string
	for _, d := range g.Devices {
		devices = append(devices, short(d.Name))
	}
	for _, l := range g.Leftover {
		leftover = append(leftover, short(string(l)))
	}
	return offered{Devices: strings.Join(devices, " "), Leftover: strings.Join(leftover, " "), Counters: counterText(g)}
}
