package view_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// TestSlots: the ranges that claims have and those that are left, in their order.
func TestSlots(t *testing.T) {
	const gib = 1 << 30
	room := []view.Fit{{Type: "mig", Profile: "1g.10gb", Count: 1}}
	at := func(start, size int) *view.Placement { return &view.Placement{Start: start, Size: size} }
	free := func(p *view.Placement, memory int64) view.Slot {
		return view.Slot{State: view.SlotFree, Placement: p, MemoryBytes: memory * gib}
	}
	used := func(p *view.Placement, u view.Use) view.Slot {
		return view.Slot{State: view.SlotUsed, Placement: p, Use: &u, MemoryBytes: u.MemoryBytes}
	}
	whole, small := view.Use{Type: "gpu", MemoryBytes: 80 * gib}, view.Use{Type: "mig", Placement: at(1, 1), MemoryBytes: 10 * gib}
	big := view.Use{Type: "mig", Placement: at(4, 4), MemoryBytes: 40 * gib}
	half := view.Use{Type: "mps", Placement: at(4, 4), Count: 2, MemoryBytes: 20 * gib}
	share, watching := view.Use{Type: "mps", MemoryBytes: 20 * gib}, view.Use{Type: "gpu", AdminAccess: true}
	others := view.Instance{Profile: "2g.20gb", Placement: view.Placement{Start: 2, Size: 2}}
	for name, tc := range map[string]struct {
		gpu  view.GPU
		want []view.Slot
	}{
		"idle":           {gpu: view.GPU{Offered: true, Fits: room}, want: []view.Slot{free(at(0, 8), 80)}},
		"in MIG":         {gpu: view.GPU{Offered: true, Fits: room, Uses: []view.Use{small, big}}, want: []view.Slot{free(at(0, 1), 10), used(at(1, 1), small), free(at(2, 2), 20), used(at(4, 4), big)}},
		"whole":          {gpu: view.GPU{Offered: true, Uses: []view.Use{whole}}, want: []view.Slot{used(at(0, 8), whole)}},
		"watched":        {gpu: view.GPU{Offered: true, Fits: room, Uses: []view.Use{watching}}, want: []view.Slot{free(at(0, 8), 80), used(nil, watching)}},
		"a share":        {gpu: view.GPU{Offered: true, Fits: room, Uses: []view.Use{share}}, want: []view.Slot{used(nil, share), free(nil, 60)}},
		"in a partition": {gpu: view.GPU{Offered: true, Fits: room, Uses: []view.Use{half}}, want: []view.Slot{free(at(0, 4), 40), used(at(4, 4), half), free(at(6, 2), 20)}},
		"by others": {gpu: view.GPU{Offered: true, Fits: room, Instances: []view.Instance{others}}, want: []view.Slot{
			free(at(0, 2), 20), {State: view.SlotForeign, Placement: at(2, 2), Instance: &others, MemoryBytes: 20 * gib}, free(at(4, 4), 40),
		}},
		"claims can't be listed": {gpu: view.GPU{Offered: true}, want: []view.Slot{{State: view.SlotUnknown, Placement: at(0, 8), MemoryBytes: 80 * gib}}},
		"broken":                 {gpu: view.GPU{Conditions: []view.Condition{{Type: "ResetRequired"}}}, want: []view.Slot{{State: view.SlotBlocked, Placement: at(0, 8), MemoryBytes: 80 * gib}}},
	} {
		t.Run(name, func(t *testing.T) {
			tc.gpu.MemorySlices, tc.gpu.MemoryBytes = 8, 80*gib
			page := view.Page(view.Node{Name: "n", GPUs: []view.GPU{tc.gpu}}, "")
			for i := range tc.want {
				tc.want[i].Node = "n"
			}
			if diff := cmp.Diff(tc.want, page.Slots()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
