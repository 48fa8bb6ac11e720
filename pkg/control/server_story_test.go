//go:build integration

package control_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// Without the feature gate the server drops what makes a device one for several.
func TestServerWithoutConsumableCapacity(t *testing.T) {
	anotherServer(t, binaries, "feature-gates=DRAConsumableCapacity=false")
	startController(t)
	n := newMIGNode(t, 1)
	n.report(t)
	n.startPlugin(t)
	p := n.governs(t, v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}})
	n.waitForDevices(t, map[string]int{"gpu": 1, "mps": 4})
	if got := applied(t, p, v1alpha1.ReasonProblems); !strings.Contains(got, "DRAConsumableCapacity") || !strings.Contains(got, "spec.plan.mps.shares") {
		t.Errorf("got %q, want the gate's name in it, and what to do", got)
	}
	change(t, p, func() { p.Spec.Plan.MPS = &v1alpha1.MPSPlan{Shares: ptr.To[int32](2)} })
	n.waitForDevices(t, map[string]int{"gpu": 1, "mps": 2})
	applied(t, p, v1alpha1.ReasonApplied)
	mps := &v1alpha1.PartitionMPS{Shares: 2}
	change(t, p, func() { p.Spec.Plan = v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{MPS: mps}} })
	n.waitForDevices(t, map[string]int{"gpu": 1})
	if got := applied(t, p, v1alpha1.ReasonProblems); !strings.Contains(got, "spec.plan.partitioned.layout") {
		t.Errorf("got %q, want what to do", got)
	}
	change(t, p, func() {
		p.Spec.Plan = v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: []string{"3g.40gb", "1g.10gb"}, MPS: mps}}
	})
	n.waitForDevices(t, map[string]int{"3g.40gb": 2, "1g.10gb": 2})
	applied(t, p, v1alpha1.ReasonApplied)
}

// Without the feature gate the server drops counters: whole GPUs, and layouts.
func TestServerWithoutCounters(t *testing.T) {
	anotherServer(t, binaries, "feature-gates=DRAPartitionableDevices=false")
	startController(t)
	n := newMIGNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	n.waitForDevices(t, map[string]int{"gpu": 2})

	p := n.governs(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"1g.10gb"}}})
	if got := applied(t, p, v1alpha1.ReasonProblems); !strings.Contains(got, "DRAPartitionableDevices") {
		t.Errorf("got %q, want the gate's name in it", got)
	}
	claim := n.give(t, "gpu-00000000")
	change(t, p, func() {
		p.Spec.Plan = v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: []string{"3g.40gb", "1g.10gb", "1g.10gb"}}}
	})
	// The first GPU is taken as a whole: nothing else of it can be offered.
	n.waitForDevices(t, map[string]int{"leftover": 1, "3g.40gb": 1, "1g.10gb": 2})
	applied(t, p, v1alpha1.ReasonWaiting)
	release(t, claim)
	n.waitForDevices(t, map[string]int{"3g.40gb": 2, "1g.10gb": 4})
	applied(t, p, v1alpha1.ReasonApplied)
	change(t, p, func() { p.Spec.Plan = v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: ptr.To[int32](2)}} })
	n.waitForDevices(t, map[string]int{"mps": 4})
	if got := applied(t, p, v1alpha1.ReasonAppliedWithoutWhole); !strings.Contains(got, "the whole GPU can't be offered beside its MPS shares") {
		t.Errorf("got %q, want that it isn't offered whole", got)
	}
}

func TestServerOfTheFirstBeta(t *testing.T) {
	anotherServer(t, binaries, runtimeConfigFor("v1beta1"))
	startController(t)
	n := newMIGNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	n.waitForPool(t, 2)
	claim := n.give(t, "gpu-00000001-mig-3g40gb-4")
	p := n.governs(t, v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}})
	n.waitForDevices(t, map[string]int{"gpu": 2, "3g.40gb": 1})
	applied(t, p, v1alpha1.ReasonWaiting)
	release(t, claim)
	n.waitForDevices(t, map[string]int{"gpu": 2})
	change(t, p, func() {
		p.Spec.Plan = v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}
	})
	n.waitForDevices(t, map[string]int{"gpu": 2, "mps for several": 2})
	for _, s := range n.pool(t) {
		for _, d := range s.Spec.Devices {
			if p := d.Capacity["memory"].RequestPolicy; d.AllowMultipleAllocations != nil && (p == nil || p.ValidRange == nil || p.ValidRange.Step.String() != "1Gi") {
				t.Errorf("device %s: requests for memory are %+v", d.Name, p)
			}
		}
	}
}

type namedPlan struct {
	name string
	plan v1alpha1.Plan
}

// plans of all kinds.
func plans() []namedPlan {
	return []namedPlan{
		{"partitioned", v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}},
		{"shares of partitions", v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{MPS: &v1alpha1.PartitionMPS{Shares: 7}}}},
		{"equal shares", v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: ptr.To[int32](48)}}},
		{"shares by size", v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}},
		{"shares that are GPUs", v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{ServesGPUClass: true}}}},
		{"GPUs of one share", v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{ServesGPUClass: true, MemoryStep: new(resource.MustParse("50G"))}}}},
		{"shares of one size", v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{MemoryStep: new(resource.MustParse("50G"))}}}},
		{"replicas", v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 64}}},
	}
}

// Whatever inventory pkg/offer is tested with: the server stores what is made
// of it, as it is, by all kinds of plans, with counters and without.
func TestServerStoresEveryOffer(t *testing.T) {
	for _, form := range []publish.Counters{publish.SplitCounters, publish.NoCounters} {
		t.Run(form.String(), func(t *testing.T) {
			storesEveryOffer(t, form, offer.Server{Counters: form != publish.NoCounters, Multiple: true, Charged: true})
		})
	}
}

func storesEveryOffer(t *testing.T, form publish.Counters, server offer.Server) {
	t.Helper()
	files, err := filepath.Glob("../offer/testdata/*.in.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no inventories", err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		inv := &v1alpha1.GPUInventory{}
		if err := yaml.UnmarshalStrict(raw, inv); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, what := range plans() {
			t.Run(strings.TrimSuffix(filepath.Base(file), ".in.yaml")+"/"+what.name, func(t *testing.T) {
				n := inventory.Node(inv)
				offered := offer.Build(n, offertest.OnePlan(n, what.plan), nil, server)
				storesPool(t, publish.Pool(metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: "any", UID: "1"}, offered, form))
			})
		}
	}
}

// storesPool creates the slices of a pool in dry runs.
func storesPool(t *testing.T, pool []resourceapi.ResourceSlice) {
	t.Helper()
	for i := range pool {
		stored, err := slices.Create(t.Context(), &pool[i], metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			t.Fatal(err)
		}
		if !equality.Semantic.DeepEqual(stored.Spec, pool[i].Spec) {
			t.Errorf("%s (-sent +stored):\n%s", pool[i].Name, cmp.Diff(pool[i].Spec, stored.Spec))
		}
		// To the byte, because the cache compares digests; were one to differ,
		// each look at the node would cost a LIST.
		sent, err := pool[i].Spec.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := stored.Spec.Marshal(); err != nil || !bytes.Equal(sent, got) {
			t.Errorf("%s is stored with other bytes than it was sent with (%v)", pool[i].Name, err)
		}
	}
	t.Logf("%d slices", len(pool))
}
