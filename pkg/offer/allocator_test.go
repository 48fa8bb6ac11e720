package offer_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// A GPU is given whole or in shares, to as many as there are shares.
func TestClaimsForEqualShares(t *testing.T) {
	for name, tc := range map[string]struct {
		plan  v1alpha1.Plan
		what  request
		share string
	}{
		"MPS":        {equalShares(4), oneShare, "mps4-%d"},
		"time slice": {inTurn(4), oneTurn, "ts4-%d"},
	} {
		t.Run(name, func(t *testing.T) {
			everyAllocator(t, tc.plan, func(s *scheduler) {
				for i := range 4 {
					s.gets(fmt.Sprint(i), fmt.Sprintf(tc.share, i), tc.what)
					s.waits("whole", wholeGPU)
				}
				s.waits("fifth", tc.what)
				s.leaves("2")
				s.gets("fifth", fmt.Sprintf(tc.share, 2), tc.what)
				s.leaves("0", "1", "3")
				s.waits("whole", wholeGPU)
				s.leaves("fifth")
				s.gets("whole", "", wholeGPU) // its short name is empty
				if s.claims["whole"] == nil {
					s.t.Fatal("nobody has a share, and the whole GPU isn't to be had")
				}
				s.waits("late", tc.what)
			})
		})
	}
}

// The allocator of Kubernetes with features that are beta there, and the one
// with those that are alpha too.
func everyAllocator(t *testing.T, plan v1alpha1.Plan, story func(*scheduler)) {
	t.Helper()
	for name, alpha := range map[string]bool{"beta": false, "alpha": true} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, plan)
			s.features.CompatibilityGroups, s.features.DerivedAttributes = alpha, alpha
			story(s)
		})
	}
}

// One claim gets two shares; shares of other claims aren't allocated twice.
func TestOneClaimForTwoShares(t *testing.T) {
	everyAllocator(t, equalShares(3), func(s *scheduler) {
		s.gets("a", "mps3-0 mps3-1", oneShare, oneShare)
		s.waits("b", oneShare, oneShare)
		s.gets("c", "mps3-2", oneShare)
	})
}

// Claims request amounts; the rest is for others.
func TestClaimsForSharesOfASize(t *testing.T) {
	everyAllocator(t, bySize("1Gi", 16), func(s *scheduler) {
		s.gets("a", "mps clients=1 memory=10Gi threadPercentage=100", memory("10Gi"))
		s.gets("b", "mps clients=1 memory=20Gi threadPercentage=25", memory("20Gi", "25"))
		s.gets("c", "mps clients=1 memory=30Gi threadPercentage=50", memory("30Gi", "50"))
		s.waits("whole", wholeGPU)
		s.waits("more than all", memory("100Gi"))
		s.waits("more than is left", memory("20Gi"))
		s.waits("too many threads", memory("1Gi", "101"))
		s.gets("rounded up", "mps clients=1 memory=2Gi threadPercentage=1", memory("1100Mi", "0"))
		s.gets("default", "mps clients=1 memory=1Gi threadPercentage=100", memory(""))
		s.gets("rest", "mps clients=1 memory=15Gi threadPercentage=100", memory("15Gi"))
		s.waits("one more", memory("1Gi"))
		s.leaves("a")
		s.gets("one more", "mps clients=1 memory=1Gi threadPercentage=100", memory("1Gi"))
		s.leaves("b", "c", "rounded up", "default", "rest")
		s.waits("whole", wholeGPU)
		s.leaves("one more")
		if s.asks("whole", wholeGPU); s.claims["whole"] == nil {
			s.t.Fatal("nobody has a share, and the whole GPU isn't to be had")
		}
		s.waits("late", memory("1Gi"))
	})
}

// No more clients than the daemon serves.
func TestClientsRunOut(t *testing.T) {
	everyAllocator(t, bySize("1Gi", 3), func(s *scheduler) {
		s.gets("a", "mps clients=1 memory=1Gi threadPercentage=100 mps clients=1 memory=1Gi threadPercentage=100", oneShare, oneShare)
		s.waits("b", oneShare, oneShare)
		s.gets("c", "mps clients=1 memory=1Gi threadPercentage=100", oneShare)
		s.waits("d", oneShare)
	})
}

// A step that is as large as the GPU: one claim at a time.
func TestOneStep(t *testing.T) {
	everyAllocator(t, bySize("50Gi", 2), func(s *scheduler) {
		s.gets("a", "mps clients=1 memory=50Gi threadPercentage=100", memory("1Gi"))
		s.waits("b", oneShare)
	})
}

// Shares of one partition are had together; those of partitions that overlap,
// and the whole GPU, never.
func TestClaimsForSharesOfPartitions(t *testing.T) {
	everyAllocator(t, sharedParts(2, "3g.40gb", "4g.40gb", "1g.10gb"), func(s *scheduler) {
		three, four := request{kind: "mps", profile: "3g.40gb"}, request{kind: "mps", profile: "4g.40gb"}
		const limits = " memory=20160Mi threadPercentage=50"
		s.gets("a", "mig-3g40gb-4-mps"+limits, three)
		s.gets("b", "mig-3g40gb-4-mps"+limits, three)
		s.waits("whole", wholeGPU)
		s.gets("c", "mig-4g40gb-0-mps"+limits, four)
		s.waits("overlaps", three)
		s.gets("d", "mig-4g40gb-0-mps"+limits, four)
		s.waits("full", four)
		s.waits("full", request{kind: "mps", profile: "1g.10gb"})
		s.leaves("c", "d")
		s.gets("e", "mig-3g40gb-0-mps"+limits, three)
		s.waits("overlaps", four)
		s.leaves("a", "b", "e")
		if s.asks("whole", wholeGPU); s.claims["whole"] == nil {
			s.t.Fatal("nobody has a share, and the whole GPU isn't to be had")
		}
		s.waits("late", three)
		s.waits("late", request{kind: "mps", profile: "1g.10gb"})
	})
}

// On servers without counters, or without consumable capacity, the remaining
// offer still excludes overlapping allocations.
func TestClaimsOnLesserServers(t *testing.T) {
	for name, tc := range map[string]struct {
		plan               v1alpha1.Plan
		counters, multiple bool
		what               request
		want               []string // the devices of the claims that request it
		whole              bool     // has to be offered
	}{
		"equal, no counters":           {equalShares(2), false, true, oneShare, []string{"mps2-0", "mps2-1"}, false},
		"by size, no counters":         {bySize("30Gi", 2), false, true, oneShare, []string{"mps clients=1 memory=30Gi threadPercentage=100", "mps clients=1 memory=30Gi threadPercentage=100"}, false},
		"by size, one at a time":       {bySize("1Gi", 2), true, false, oneShare, []string{"mps4-0", "mps4-1", "mps4-2", "mps4-3"}, true},
		"by size, neither":             {bySize("1Gi", 2), false, false, oneShare, []string{"mps4-0", "mps4-1", "mps4-2", "mps4-3"}, false},
		"in turn, no counters":         {inTurn(2), false, false, oneTurn, []string{"ts2-0", "ts2-1"}, false},
		"of partitions, one at a time": {sharedParts(2, "1g.10gb"), true, false, oneShare, nil, true},
		"layout": {sharedLayout(2, "3g.40gb", "3g.40gb"), false, false, oneShare,
			[]string{"mig-3g40gb-0-mps2-0", "mig-3g40gb-0-mps2-1", "mig-3g40gb-4-mps2-0", "mig-3g40gb-4-mps2-1"}, false},
		"layout, with several at a time": {sharedLayout(2, "3g.40gb"), false, true, oneShare,
			[]string{"mig-3g40gb-0-mps memory=20160Mi threadPercentage=50", "mig-3g40gb-0-mps memory=20160Mi threadPercentage=50"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, tc.plan)
			s.options.Counters, s.options.Multiple = tc.counters, tc.multiple
			s.features.PartitionableDevices, s.features.ConsumableCapacity = tc.counters, tc.multiple
			s.asks("whole", wholeGPU)
			if offered := s.claims["whole"] != nil; offered != tc.whole {
				t.Errorf("the whole GPU was given: %v", offered)
			}
			if tc.whole {
				s.waits("late", tc.what)
			}
			s.leaves("whole")
			for i, want := range tc.want {
				s.gets(fmt.Sprint(i), want, tc.what)
			}
			s.waits("another", tc.what)
			s.asks("whole", wholeGPU)
			if s.claims["whole"] != nil && len(tc.want) > 0 {
				t.Error("the whole GPU was given beside shares of it")
			}
		})
	}
}

// The devices of claims never conflict, for any plans, abilities of the server,
// and order of claims; and a claim keeps its devices.
func TestNobodyGetsWhatSomebodyHas(t *testing.T) {
	plans := []v1alpha1.Plan{
		{}, equalShares(2), equalShares(4), bySize("1Gi", 4), bySize("30Gi", 2), inTurn(2), inTurn(3),
		{Partitioned: only("1g.10gb", "3g.40gb")}, {Partitioned: fix("3g.40gb", "3g.40gb")},
		sharedParts(2, "1g.10gb", "3g.40gb"), sharedParts(3, "3g.40gb"), sharedLayout(2, "3g.40gb", "1g.10gb"),
	}
	asked := []request{
		wholeGPU, oneShare, oneTurn, memory("20Gi"), {kind: "mig", profile: "1g.10gb"}, {kind: "mig", profile: "3g.40gb"},
		{kind: "mps", profile: "3g.40gb"}, {kind: "leftover"},
	}
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 3))
		s := newScheduler(t, plans[r.IntN(len(plans))])
		var log []string
		for i := range 40 {
			switch r.IntN(6) {
			case 0:
				p := r.IntN(len(plans))
				s.plan(plans[p])
				log = append(log, fmt.Sprint("plan ", p))
			case 1:
				s.options.Counters, s.options.Multiple = r.IntN(4) > 0, r.IntN(4) > 0
				s.options.Charged = r.IntN(2) > 0
				log = append(log, fmt.Sprint("server ", s.options.Counters, s.options.Multiple, s.options.Charged))
			case 2:
				for name := range s.claims {
					s.leaves(name)
					log = append(log, name+" goes")
					break
				}
			default:
				what := asked[r.IntN(len(asked)-1)]
				log = append(log, fmt.Sprintf("%d: %v gets %q", i, what, s.asks(fmt.Sprint(i), what)))
			}
			checkHeld(t, s)
			if t.Failed() {
				t.Fatalf("seed %d:\n%s", seed, strings.Join(log, "\n"))
			}
		}
	}
}

func checkHeld(t *testing.T, s *scheduler) {
	t.Helper()
	names, err := gpu.NewNames(s.node.GPUs)
	if err != nil {
		t.Fatal(err)
	}
	offered := s.offered()
	var held []gpu.Device
	for _, claim := range s.claims {
		for _, r := range claim.Status.Allocation.Devices.Results {
			d, err := names.Device(gpu.DeviceName(r.Device))
			if err != nil {
				t.Fatal(err)
			}
			for _, h := range held {
				if gpu.Conflict(d, h) {
					t.Errorf("claims have %v and %v", d, h)
				}
			}
			held = append(held, d)
			if !slices.ContainsFunc(offered.Devices, func(d resourceapi.Device) bool { return d.Name == r.Device }) {
				t.Errorf("%s isn't offered any more", r.Device)
			}
		}
	}
	checkNotShort(t, s, offered)
}

// checkNotShort: a counter of which claims have more than there is would keep
// the scheduler from giving away anything else of the pool.
func checkNotShort(t *testing.T, s *scheduler, offered offer.GPU) {
	t.Helper()
	if offered.Counters == nil {
		return
	}
	left := make(map[string]int64)
	for name, c := range offered.Counters.Counters {
		left[name] = c.Value.Value()
	}
	state := s.allocated()
	for _, d := range offered.Devices {
		id := structured.MakeDeviceID(gpu.DriverName, s.node.Name, d.Name)
		shared := slices.ContainsFunc(state.AllocatedSharedDeviceIDs.UnsortedList(), func(x structured.SharedDeviceID) bool {
			return structured.MakeDeviceID(x.Driver.String(), x.Pool.String(), x.Device.String()) == id
		})
		if !shared && !state.AllocatedDevices.Has(id) {
			continue
		}
		for _, u := range d.ConsumesCounters {
			for name, c := range u.Counters {
				left[name] -= c.Value.Value()
			}
		}
	}
	for name, n := range left {
		if n < 0 {
			t.Errorf("there is %d left of counter %s", n, name)
		}
	}
}

// TestAllocatorThatDoesNotCharge: on Kubernetes before 1.36.2 no claim gets a
// GPU, or a part of it, while others have shares of it, and the problems say
// why less is offered.
func TestAllocatorThatDoesNotCharge(t *testing.T) {
	for name, tc := range map[string]struct {
		plan      v1alpha1.Plan
		share     request
		shared    bool // a share is given
		uncharged bool // something is left out
	}{
		"by size":               {bySize("1Gi", 4), memory("20Gi"), true, true},
		"equal":                 {equalShares(4), oneShare, true, false},
		"in turn":               {inTurn(4), oneTurn, true, false},
		"of partitions":         {sharedParts(2, "1g.10gb", "3g.40gb"), oneShare, false, true},
		"of a layout":           {sharedLayout(2, "3g.40gb", "3g.40gb"), oneShare, true, false},
		"partitions, no shares": {v1alpha1.Plan{Partitioned: only("1g.10gb")}, request{kind: "mig"}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, tc.plan)
			s.options.Charged, s.options.Version = false, "v1.36.1"
			if got := s.asks("share", tc.share) != ""; got != tc.shared {
				t.Errorf("a share was given: %v", got)
			}
			if s.asks("whole", wholeGPU) != "" && tc.shared {
				t.Error("the whole GPU was given beside a share of it")
			}
			checkHeld(t, s)
			g := s.offered()
			told := strings.Contains(strings.Join(g.Problems, " "), "Kubernetes v1.36.1 can allocate the same part of a GPU twice")
			if g.Uncharged != tc.uncharged || told != tc.uncharged {
				t.Errorf("uncharged: %v, problems %q", g.Uncharged, g.Problems)
			}
		})
	}
}

// TestBridgedPairs: two GPUs in one NVLink domain are those of one bridge. Two that
// have no NVLink won't do.
func TestBridgedPairs(t *testing.T) {
	s := newScheduler(t, v1alpha1.Plan{})
	s.node = node(t, "l40s", 6)
	for _, pair := range [][2]int{{1, 3}, {2, 5}} {
		for _, i := range pair {
			s.node.GPUs[i].NVLink = &gpu.NVLink{Links: 4, Domain: string(s.node.GPUs[pair[0]].UUID)}
		}
	}
	pair := request{kind: "gpu", linked: true}
	s.gets("a pair", "gpu-00000002 gpu-00000004", pair)
	s.gets("another pair", "gpu-00000003 gpu-00000006", pair)
	s.waits("a third pair", pair)
}

// TestSharesForGPUClaims: a GPU that serves the class of GPUs too. A claim with
// a request for capacity gets a share; one without gets all of it, and other
// claims get nothing. It has no counters, so that older schedulers count
// correctly.
func TestSharesForGPUClaims(t *testing.T) {
	plan := bySize("1Gi", 4)
	plan.MPS.Consumable.ServesGPUClass = true
	sized := request{kind: "gpu", capacity: map[resourceapi.QualifiedName]string{"memory": "20Gi"}}
	for name, charged := range map[string]bool{"1.36.2": true, "1.36.1": false} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, plan)
			s.options.Charged = charged
			all, err := gpu.ShareableMiB(s.node.GPUs[0], gpu.Whole{GPU: s.node.GPUs[0].UUID})
			if err != nil {
				t.Fatal(err)
			}
			entire := fmt.Sprintf("mps clients=1 memory=%dMi threadPercentage=100", all)
			s.gets("all", entire, wholeGPU)
			s.waits("part", sized)
			s.waits("another", wholeGPU)
			s.leaves("all")
			for i, what := range []request{sized, sized, memory("20Gi")} {
				if s.asks(fmt.Sprint("part ", i), what) == "" {
					t.Errorf("part %d has to wait", i)
				}
			}
			s.waits("all", wholeGPU)
			checkHeld(t, s)
			if d := s.offered().Devices; len(d) != 1 || *d[0].Attributes["uuid"].StringValue != string(s.node.GPUs[0].UUID) {
				t.Errorf("offered: %+v", d)
			}
			// The policy is edited: claims keep their devices, and no device is
			// allocated twice.
			s.plan(bySize("1Gi", 4))
			checkHeld(t, s)
			s.waits("all", wholeGPU)
			s.plan(v1alpha1.Plan{})
			checkHeld(t, s)
			s.waits("all", wholeGPU)
		})
	}
	s := newScheduler(t, plan)
	s.options.Multiple = false
	s.asks("whole", wholeGPU)
	if s.claims["whole"] == nil {
		t.Error("without consumable capacity there is no whole GPU")
	}
}
