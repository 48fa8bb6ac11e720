package offer_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
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
			s.library.Features.CompatibilityGroups, s.library.Features.DerivedAttributes = alpha, alpha
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
		three, four := request{Kind: "mps", Profile: "3g.40gb"}, request{Kind: "mps", Profile: "4g.40gb"}
		const limits = " memory=20160Mi threadPercentage=50"
		s.gets("a", "mig-3g40gb-4-mps"+limits, three)
		s.gets("b", "mig-3g40gb-4-mps"+limits, three)
		s.waits("whole", wholeGPU)
		s.gets("c", "mig-4g40gb-0-mps"+limits, four)
		s.waits("overlaps", three)
		s.gets("d", "mig-4g40gb-0-mps"+limits, four)
		s.waits("full", four)
		s.waits("full", request{Kind: "mps", Profile: "1g.10gb"})
		s.leaves("c", "d")
		s.gets("e", "mig-3g40gb-0-mps"+limits, three)
		s.waits("overlaps", four)
		s.leaves("a", "b", "e")
		if s.asks("whole", wholeGPU); s.claims["whole"] == nil {
			s.t.Fatal("nobody has a share, and the whole GPU isn't to be had")
		}
		s.waits("late", three)
		s.waits("late", request{Kind: "mps", Profile: "1g.10gb"})
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
			s.library.Features.PartitionableDevices, s.library.Features.ConsumableCapacity = tc.counters, tc.multiple
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

func checkHeld(t *testing.T, s *scheduler) {
	t.Helper()
	c := s.cluster()
	if err := errors.Join(c.Judge(), c.JudgeOffer()); err != nil {
		t.Error(err)
	}
}

// TestAllocatorThatDoesNotCharge: on Kubernetes before 1.36.2 no claim gets a
// GPU, or a part of it, while others have shares of it, and the problems say
// why less is offered.
func TestAllocatorThatDoesNotCharge(t *testing.T) {
	for name, tc := range map[string]struct {
		plan   v1alpha1.Plan
		share  request
		shared bool // a share is given
		unsafe bool // a part of the plan is left out
	}{
		"by size":               {bySize("1Gi", 4), memory("20Gi"), true, false},
		"equal":                 {equalShares(4), oneShare, true, false},
		"in turn":               {inTurn(4), oneTurn, true, false},
		"of partitions":         {sharedParts(2, "1g.10gb", "3g.40gb"), oneShare, false, true},
		"of a layout":           {sharedLayout(2, "3g.40gb", "3g.40gb"), oneShare, true, false},
		"partitions, no shares": {v1alpha1.Plan{Partitioned: only("1g.10gb")}, request{Kind: "mig"}, true, false},
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
			const reason = "Kubernetes v1.36.1 can allocate the same part of a GPU twice"
			if told := strings.Contains(strings.Join(g.Problems, " "), reason); g.Unsafe != tc.unsafe || told != tc.unsafe {
				t.Errorf("unsafe: %v, problems %q", g.Unsafe, g.Problems)
			}
			if told := strings.Contains(g.WithoutWhole, reason); told != (name == "by size") {
				t.Errorf("without the whole GPU: %q", g.WithoutWhole)
			}
		})
	}
}

// TestAllocatorThatDoesNotCountCapacity: Kubernetes 1.34 stores devices that are
// allocated several times, and its scheduler crashes over them.
func TestAllocatorThatDoesNotCountCapacity(t *testing.T) {
	for name, plan := range map[string]v1alpha1.Plan{"by size": bySize("1Gi", 4), "of partitions": sharedParts(2, "1g.10gb")} {
		s := newScheduler(t, plan)
		s.options.Multiple, s.options.Charged, s.options.Version = false, false, "v1.34.4"
		g := s.offered()
		if told := strings.Join(g.Problems, " "); !strings.Contains(told, "Kubernetes v1.34.4") || !strings.Contains(told, "kubernetes/kubernetes#133705") {
			t.Errorf("%s: problems %q", name, g.Problems)
		}
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
	pair := request{Kind: "gpu", Count: 2, Linked: true}
	s.gets("a pair", "gpu-00000002 gpu-00000004", pair)
	s.gets("another pair", "gpu-00000003 gpu-00000006", pair)
	s.waits("a third pair", pair)
}

// TestSizesForGPUClaims: an amount is the same on each model, although the memory of none
// is a multiple of the policy's step.
func TestSizesForGPUClaims(t *testing.T) {
	plan := bySize("1Gi", 4)
	plan.MPS.Consumable.ServesGPUClass = true
	for _, model := range []string{"h100-80gb", "a100-80gb"} {
		for amount, want := range map[string]string{"4Gi": "4Gi", "1100Mi": "1100Mi", "1": "1Gi", "5000000k": "4769Mi"} {
			t.Run(model+" "+amount, func(t *testing.T) {
				s := newScheduler(t, plan)
				s.node = node(t, model, 1)
				s.gets("a", "mps clients=1 memory="+want+" threadPercentage=100", request{
					Kind: "gpu", Capacity: map[resourceapi.QualifiedName]string{"memory": amount},
				})
			})
		}
	}
}

// TestSharesForGPUClaims: a GPU that serves the class of GPUs too. A claim with
// a request for capacity gets a share; one without gets all of it, and other
// claims get nothing. It has no counters, so that older schedulers count
// correctly.
func TestSharesForGPUClaims(t *testing.T) {
	plan := bySize("1Gi", 4)
	plan.MPS.Consumable.ServesGPUClass = true
	sized := request{Kind: "gpu", Capacity: map[resourceapi.QualifiedName]string{"memory": "20Gi"}}
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
