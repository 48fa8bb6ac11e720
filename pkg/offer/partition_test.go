package offer_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestPartitionOfManySlices: a partition that others made has its memory slices as
// capacities, on GPUs with more of them than the server has room for as many as fit.
func TestPartitionOfManySlices(t *testing.T) {
	for model, want := range map[string]struct {
		profile string
		slices  int
	}{
		"h100-80gb": {"7g.80gb", 8}, "rtx-pro-6000": {"4g.96gb", 9},
	} {
		t.Run(model, func(t *testing.T) {
			n, err := offertest.Host(model, 1)
			if err != nil {
				t.Fatal(err)
			}
			m := n.GPUs[0].MIG
			p := m.Profiles[slices.IndexFunc(m.Profiles, func(p gpu.Profile) bool { return p.Name == want.profile })]
			m.Instances = []gpu.Instance{{Profile: p.Name, Placement: p.Placements[0], UUID: "MIG-1"}}
			d := build(n, options{})[0].Devices[0]
			checkLimits(t, d)
			got := 0
			for name, c := range d.Capacity {
				if len(name) > len("memorySlice") && name[:len("memorySlice")] == "memorySlice" && c.Value.Value() == 1 {
					got++
				}
			}
			if text(d, "uuid") != "MIG-1" || got != want.slices {
				t.Errorf("%s has %d memory slices, want %d: %v", d.Name, got, want.slices, slices.Sorted(maps.Keys(d.Capacity)))
			}
		})
	}
}

// TestEnginesOfWholeGPUs: a GPU that can be partitioned has those of its largest partition.
func TestEnginesOfWholeGPUs(t *testing.T) {
	for model, want := range map[string]map[resourceapi.QualifiedName]string{
		"h100-80gb": {"memory": "81559Mi", "multiprocessors": "132", "copyEngines": "8", "decoders": "7", "encoders": "0", "jpegEngines": "7", "ofaEngines": "1"},
		"l4":        {"memory": "23034Mi"},
	} {
		m, err := nvmlsim.FindModel(model)
		if err != nil {
			t.Fatal(err)
		}
		got := make(map[resourceapi.QualifiedName]string)
		for name, c := range build(offertest.NodeOf(m, 1), options{})[0].Devices[0].Capacity {
			got[name] = c.Value.String()
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", model, diff)
		}
	}
}
