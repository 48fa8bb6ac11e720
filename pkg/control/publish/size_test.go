package publish

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// TestSizeOfNode checks how many bytes of JSON a node of eight H100s publishes: all
// placements of partitions, NVLink, the PCI facts that hosts report, and the counter of memory;
// and that all devices of some GPUs have a taint.
func TestSizeOfNode(t *testing.T) {
	for name, tc := range map[string]struct{ tainted, most int }{
		"healthy":          {0, 140 << 10},
		"one GPU of eight": {1, 142 << 10},
		"all GPUs":         {8, 158 << 10},
	} {
		t.Run(name, func(t *testing.T) {
			n, err := offertest.Host("h100-80gb", 8)
			if err != nil {
				t.Fatal(err)
			}
			for i := range tc.tainted {
				n.GPUs[i].Conditions = []gpu.Condition{{Type: gpu.ResetRequired, Since: time.Unix(1e9, 0)}}
			}
			built := offer.Build(n, offertest.OnePlan(n, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}), nil,
				offer.Server{Counters: true, MaxTainted: SplitCounters.MaxTainted()})
			size, devices, taints := 0, 0, 0
			for _, s := range Pool(owner("node"), built, SplitCounters) {
				raw, err := json.Marshal(s)
				if err != nil {
					t.Fatal(err)
				}
				size += len(raw)
				devices += len(s.Spec.Devices)
				for _, d := range s.Spec.Devices {
					taints += len(d.Taints)
					_, counted := d.ConsumesCounters[0].Counters["memory"]
					if _, linked := d.Attributes["nvlinkDomain"]; !counted || linked != (*d.Attributes["type"].StringValue == gpu.TypeGPU) {
						t.Errorf("device %s lacks something: %+v", d.Name, d)
					}
				}
			}
			if devices != 144 || taints != 18*tc.tainted {
				t.Errorf("%d devices have %d taints", devices, taints)
			}
			if size > tc.most {
				t.Errorf("%d bytes, want at most %d", size, tc.most)
			}
			t.Logf("%.1f KiB", float64(size)/1024)
		})
	}
}
