package offer_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestCountersSayWhatTheHardwareSays goes through the sets of devices that can
// be allocated together, for every product and every choice of profiles that
// makes sense, and asks of each further device whether counters and hardware
// agree about it. Both rules are such that a part of a good set is good, so
// sets further out need no look.
func TestCountersSayWhatTheHardwareSays(t *testing.T) {
	for _, m := range migModels(t) {
		t.Run(m.ID, func(t *testing.T) {
			for _, profiles := range choices(m) {
				n := node(t, m.ID, 1)
				g := build(n, partitioned(profiles))[0]
				checkCounters(t, fmt.Sprint(profiles), m, n, g)
				if t.Failed() {
					return
				}
			}
		})
	}
}

// TestCountersBesideOthers does the same on GPUs on which others have made
// instances, and where a claim still has a device of an earlier plan.
func TestCountersBesideOthers(t *testing.T) {
	for _, m := range migModels(t) {
		t.Run(m.ID, func(t *testing.T) {
			for _, p := range m.MIG.Profiles {
				for _, start := range p.Starts {
					n := node(t, m.ID, 1)
					instance(&n.GPUs[0], p.Name, int(start))
					checkCounters(t, fmt.Sprintf("beside %s at %d", p.Name, start), m, n, build(n, partitioned(nil))[0])

					n = node(t, m.ID, 1)
					o := partitioned([]string{m.MIG.Profiles[0].Name})
					o.Allocated = []gpu.DeviceName{name(t, n, gpu.Partition{GPU: n.GPUs[0].UUID, Profile: p.Name, Placement: gpu.Placement{Start: int(start), Size: int(p.Size)}})}
					checkCounters(t, fmt.Sprintf("after %s at %d", p.Name, start), m, n, build(n, o)[0])
				}
			}
		})
	}
}

// TestMemoryCounter: whichever way a GPU is offered whole and in parts, each device takes as
// much of the counter memory as a claim for it gets of the GPU's memory, and the whole GPU
// all.
func TestMemoryCounter(t *testing.T) {
	models, err := nvmlsim.Models()
	if err != nil {
		t.Fatal(err)
	}
	plans := map[string]v1alpha1.Plan{
		"exclusive": {}, "partitioned": {Partitioned: &v1alpha1.PartitionedPlan{}}, "equal shares": equalShares(4), "by size": bySize("1Gi", 4),
		"in turn":              {TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 3}},
		"shares of partitions": {Partitioned: &v1alpha1.PartitionedPlan{MPS: &v1alpha1.PartitionMPS{Shares: 2}}},
	}
	for _, m := range models {
		for what, plan := range plans {
			n := node(t, m.ID, 1)
			g := build(n, options{Server: offer.Server{Counters: true, Multiple: true, Charged: true}, Plan: plan})[0]
			if len(g.Devices) == 1 { // nothing to keep apart
				if g.Counters != nil {
					t.Errorf("%s, %s: one device has counters, which keep admin access off it", m.ID, what)
				}
				continue
			}
			if n.GPUs[0].MemoryBytes == 0 {
				checkWholeTakesAll(t, m.ID+", "+what, g)
				continue
			}
			for _, d := range g.Devices {
				want := memoryOf(n, d)
				if got := d.ConsumesCounters[0].Counters["memory"].Value; got.Cmp(want) != 0 || got.Format != resource.BinarySI {
					t.Errorf("%s, %s: %s takes %s, want %s", m.ID, what, d.Name, got.String(), want.String())
				}
			}
			if all := g.Counters.Counters["memory"].Value; all.Value() != n.GPUs[0].MemoryBytes {
				t.Errorf("%s, %s: there is %s, want what the GPU has", m.ID, what, all.String())
			}
		}
	}
}

// memoryOf is the amount that one claim for the device gets.
func memoryOf(n gpu.Node, d resourceapi.Device) resource.Quantity {
	c := d.Capacity["memory"]
	switch {
	case text(d, "type") == "timeslice":
		return *resource.NewQuantity(n.GPUs[0].MemoryBytes/3, resource.BinarySI)
	case text(d, "type") == "mps" && text(d, "profile") != "":
		return *c.RequestPolicy.Default
	case c.RequestPolicy != nil: // by size: a counter is consumed once for all claims
		return *resource.NewQuantity(n.GPUs[0].MemoryBytes, resource.BinarySI)
	}
	return c.Value
}

// TestCounters pins how many counters there are, by product.
func TestCounters(t *testing.T) {
	for _, tc := range []struct {
		models   []string
		profiles []string // by the part before the dot and the suffix after "gb"
		want     string
	}{
		{eightSlices, []string{"1g"}, ""},
		{eightSlices, []string{"3g"}, ""},
		{eightSlices, []string{"1g", "3g"}, "s0-3=4 s4-6=3"},
		{eightSlices, []string{"1g", "2g", "3g"}, "s0-1=2 s2-3=2 s4-5=2 s6=1"},
		{eightSlices, nil, "ofa-engines=1 s0=1 s1=1 s2=1 s3=1 s4=1 s5=1 s6=1"},
		{[]string{"a30"}, []string{"1g"}, ""},
		{rtxPRO6000, []string{"1g"}, ""},
		{rtxPRO6000, []string{"1g", "2g", "4g"}, "s0-3=2 s6-9=2"},
	} {
		for _, model := range tc.models {
			m, err := nvmlsim.FindModel(model)
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, p := range m.MIG.Profiles {
				slices, rest, _ := strings.Cut(p.Name, ".")
				if _, suffix, _ := strings.Cut(rest, "gb"); suffix == "" && p.Enum != 9 && contains(tc.profiles, slices) {
					names = append(names, p.Name)
				}
			}
			if tc.profiles == nil {
				for _, p := range m.MIG.Profiles {
					names = append(names, p.Name)
				}
			}
			if got := counterText(build(node(t, model, 1), partitioned(names))[0]); got != tc.want {
				t.Errorf("%s %v: got %s, want %s", model, names, got, tc.want)
			}
		}
	}
}

// Models with the same number of memory slices.
var (
	eightSlices = []string{"a100-40gb", "a100-80gb", "h100-80gb", "h100-nvl", "h200", "h200-nvl", "b200", "gb200", "gb200-189gb"}
	rtxPRO6000  = []string{"rtx-pro-6000", "rtx-pro-6000-max-q", "rtx-pro-6000-workstation"}
)

func contains(list []string, s string) bool { return slices.Contains(list, s) }

// counterText lists the counters but that of memory, which all GPUs have
// (TestMemoryCounter).
func counterText(g offer.GPU) string {
	var out []string
	if g.Counters != nil {
		for name, c := range g.Counters.Counters {
			if name != "memory" {
				out = append(out, fmt.Sprintf("%s=%s", name, c.Value.String()))
			}
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// choices of profiles: each alone, each two, on a GPU with few of them any, the
// default ones (nil), and all.
func choices(m *nvmlsim.Model) [][]string {
	all := m.MIG.Profiles
	out := [][]string{nil}
	for set := 1; set < 1<<len(all); set++ {
		var names []string
		for i, p := range all {
			if set&(1<<i) != 0 {
				names = append(names, p.Name)
			}
		}
		if len(names) <= 2 || len(all) <= 7 || len(names) == len(all) {
			out = append(out, names)
		}
	}
	return out
}

// checkCounters compares counters with the hardware, expects that none of them
// could be left out, and that the server would store them.
func checkCounters(t *testing.T, what string, m *nvmlsim.Model, n gpu.Node, g offer.GPU) {
	t.Helper()
	c := newChecker(t, m, n, g)
	if set, bad := c.disagree("", nil, 0); bad {
		t.Errorf("%s, counters %s: counters and hardware disagree about %v", what, counterText(g), c.names(set))
	}
	if g.Counters == nil {
		return
	}
	for counter := range g.Counters.Counters {
		if _, needed := c.disagree(counter, nil, 0); !needed && counter != "memory" {
			t.Errorf("%s, counters %s: %s could be left out", what, counterText(g), counter)
		}
	}
	checkCounterLimits(t, g)
}

func checkCounterLimits(t *testing.T, g offer.GPU) {
	t.Helper()
	if n := len(g.Counters.Counters); n > resourceapi.ResourceSliceMaxCountersPerCounterSet {
		t.Errorf("%d counters", n)
	}
	if len(g.Devices) > resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures {
		t.Errorf("%d devices", len(g.Devices))
	}
	for counter := range g.Counters.Counters {
		if errs := validation.IsDNS1123Label(counter); len(errs) > 0 {
			t.Errorf("counter %q: %v", counter, errs)
		}
	}
	for _, d := range g.Devices {
		for _, u := range d.ConsumesCounters {
			if u.CounterSet != g.Counters.Name {
				t.Errorf("device %s consumes from %q", d.Name, u.CounterSet)
			}
			for counter := range u.Counters {
				if _, ok := g.Counters.Counters[counter]; !ok {
					t.Errorf("device %s consumes %q, which isn't there", d.Name, counter)
				}
			}
		}
	}
}

// checker compares counters and hardware for each set of devices.
type checker struct {
	devices  []gpu.Device
	counters sums
	hardware sums
	overlap  [][]bool
}

// sums has limits of the sum of the devices' consumption, for each kind of
// resource.
type sums struct {
	kinds  []string
	limits []int
	takes  [][]int
}

func newChecker(t *testing.T, m *nvmlsim.Model, n gpu.Node, g offer.GPU) *checker {
	t.Helper()
	names, err := gpu.NewNames(n.GPUs)
	if err != nil {
		t.Fatal(err)
	}
	c := &checker{counters: counterSums(g)}
	for _, d := range g.Devices {
		device, err := names.Device(gpu.DeviceName(d.Name))
		if err != nil {
			t.Fatal(err)
		}
		c.devices = append(c.devices, device)
	}
	for _, a := range c.devices {
		var row []bool
		for _, b := range c.devices {
			row = append(row, gpu.Conflict(a, b))
		}
		c.overlap = append(c.overlap, row)
	}
	c.hardware = hardwareSums(m, n.GPUs[0].MIG.Instances, c.devices)
	return c
}

func counterSums(g offer.GPU) sums {
	var s sums
	if g.Counters == nil {
		return sums{takes: make([][]int, len(g.Devices))}
	}
	for name, k := range g.Counters.Counters {
		s.kinds, s.limits = append(s.kinds, name), append(s.limits, int(k.Value.Value()))
	}
	for _, d := range g.Devices {
		takes := make([]int, len(s.kinds))
		for _, u := range d.ConsumesCounters {
			for name, k := range u.Counters {
				takes[slices.Index(s.kinds, name)] = int(k.Value.Value())
			}
		}
		s.takes = append(s.takes, takes)
	}
	return s
}

// hardwareSums are the engines and the instances of each profile, by the
// model's data, as an independent statement of the rules.
func hardwareSums(m *nvmlsim.Model, others []gpu.Instance, devices []gpu.Device) sums {
	e := m.Engines
	s := sums{limits: []int{int(e.Multiprocessors), int(e.Copy), int(e.Decoders), int(e.Encoders), int(e.JPEG), int(e.OFA)}}
	for _, p := range m.MIG.Profiles {
		s.limits = append(s.limits, int(p.InstanceCount))
	}
	takes := func(profile string) []int {
		i := slices.IndexFunc(m.MIG.Profiles, func(p nvmlsim.Profile) bool { return p.Name == profile })
		p := m.MIG.Profiles[i]
		out := make([]int, len(s.limits))
		copy(out, []int{int(p.MultiprocessorCount), int(p.CopyEngineCount), int(p.DecoderCount), int(p.EncoderCount), int(p.JPEGCount), int(p.OFACount)})
		out[6+i] = 1
		return out
	}
	for _, i := range others {
		for k, n := range takes(i.Profile) {
			s.limits[k] -= n
		}
	}
	for _, d := range devices {
		p, ok := gpu.Base(d).(gpu.Partition)
		if !ok || slices.ContainsFunc(others, func(i gpu.Instance) bool { return i.Profile == p.Profile && i.Placement == p.Placement }) {
			s.takes = append(s.takes, make([]int, len(s.limits)))
			continue
		}
		s.takes = append(s.takes, takes(p.Profile))
	}
	return s
}

// allow reports whether a set takes no more than there is, one kind left aside.
func (s sums) allow(set []int, except string) bool {
	for k, limit := range s.limits {
		sum := 0
		for _, d := range set {
			sum += s.takes[d][k]
		}
		if sum > limit && (s.kinds == nil || s.kinds[k] != except) {
			return false
		}
	}
	return true
}

// disagree finds a set of devices about which counters, but for one, and the
// hardware disagree. set is one that both like; only devices from the position
// on are added.
func (c *checker) disagree(except string, set []int, from int) ([]int, bool) {
	for d := from; d < len(c.devices); d++ {
		larger := append(set, d) //nolint:gocritic // each is done with before the next
		counted := c.counters.allow(larger, except)
		if counted != c.exist(larger) {
			return slices.Clone(larger), true
		}
		if counted {
			if bad, found := c.disagree(except, larger, d+1); found {
				return bad, true
			}
		}
	}
	return nil, false
}

func (c *checker) exist(set []int) bool {
	last := set[len(set)-1]
	for _, d := range set[:len(set)-1] {
		if c.overlap[d][last] {
			return false
		}
	}
	return c.hardware.allow(set, "")
}

func (c *checker) names(set []int) []string {
	var out []string
	for _, d := range set {
		out = append(out, fmt.Sprint(c.devices[d]))
	}
	return out
}

// Nodes of simulated GPUs, and plans.

func migModels(t *testing.T) []*nvmlsim.Model {
	t.Helper()
	models, err := nvmlsim.Models()
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(models, func(m *nvmlsim.Model) bool { return m.MIG == nil })
}

func node(t *testing.T, model string, gpus int) gpu.Node {
	t.Helper()
	n, err := offertest.Node(model, gpus)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func name(t *testing.T, n gpu.Node, d gpu.Device) gpu.DeviceName {
	t.Helper()
	names, err := gpu.NewNames(n.GPUs)
	if err != nil {
		t.Fatal(err)
	}
	out, ok := names.Name(d)
	if !ok {
		t.Fatalf("%v has no name", d)
	}
	return out
}

// instance is made by others on a GPU whose MIG mode they have switched on.
func instance(g *gpu.GPU, profile string, start int) {
	m := g.MIG
	m.Enabled, m.Pending = true, true
	for _, p := range m.Profiles {
		for _, at := range p.Placements {
			if p.Name == profile && at.Start == start {
				id := len(m.Instances) + 1
				m.Instances = append(m.Instances, gpu.Instance{UUID: gpu.UUID(fmt.Sprintf("MIG-%d", id)), Profile: profile, Placement: at, GPUInstanceID: id})
			}
		}
	}
}

func partitioned(profiles []string) options {
	return options{Server: offer.Server{Counters: true}, Plan: v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: profiles}}}
}

// options are the plan of all GPUs of a node, the server, and the devices that
// claims have been allocated.
type options struct {
	offer.Server
	Plan      v1alpha1.Plan
	Allocated []gpu.DeviceName
}

func build(n gpu.Node, o options) []offer.GPU {
	return offer.Build(n, offertest.OnePlan(n, o.Plan), o.Allocated, o.Server)
}
