package publish

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// maxNode is how many bytes of JSON a node of eight H100s may publish: all placements of
// partitions, NVLink, the attributes of PCI that hosts report, and the counter of memory.
const maxNode = 90 << 10

// TestSizeOfNode checks that a node stays within maxNode, also if all devices of one GPU have
// a taint.
func TestSizeOfNode(t *testing.T) {
	for name, conditions := range map[string][]gpu.Condition{
		"healthy":          nil,
		"one GPU of eight": {{Type: gpu.ResetRequired, Since: time.Unix(1e9, 0)}},
	} {
		t.Run(name, func(t *testing.T) {
			n, err := offertest.Node("h100-80gb", 8)
			if err != nil {
				t.Fatal(err)
			}
			for i := range n.GPUs {
				g := &n.GPUs[i]
				g.PCI, g.PCIeRoot = gpu.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 16+i)), fmt.Sprintf("pci0000:%02x", 15+i)
				g.NUMANode, g.ECCEnabled = new(i/4), new(true)
			}
			n.GPUs[0].Conditions = conditions
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
			if devices != 144 || taints != 18*len(conditions) {
				t.Errorf("%d devices have %d taints", devices, taints)
			}
			if size > maxNode {
				t.Errorf("%d bytes, want at most %d", size, maxNode)
			}
			t.Logf("%.1f KiB", float64(size)/1024)
		})
	}
}
