package nodes

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestHealthPolicy checks that a GPU's conditions become taints with the time at which
// they were reported, with the effects that its policy gives them, and are gone
// with the conditions; and that the other GPU's devices never change.
func TestHealthPolicy(t *testing.T) {
	for name, tc := range map[string]struct {
		condition gpu.ConditionType
		health    v1alpha1.HealthPolicy
		want      string // of the whole GPU and of a partition
	}{
		"lost":                      {gpu.Lost, v1alpha1.HealthPolicy{}, "NoSchedule NoSchedule"},
		"lost, evict":               {gpu.Lost, v1alpha1.HealthPolicy{Evict: true}, "NoExecute NoExecute"},
		"reboot, evict":             {gpu.RebootRequired, v1alpha1.HealthPolicy{Evict: true}, "NoExecute NoExecute"},
		"reset, evict":              {gpu.ResetRequired, v1alpha1.HealthPolicy{Evict: true}, "NoSchedule NoSchedule"},
		"rows wait":                 {gpu.RowRemapPending, v1alpha1.HealthPolicy{}, "None None"},
		"rows wait, and no whole":   {gpu.RowRemapPending, v1alpha1.HealthPolicy{RowRemapPending: v1alpha1.NoSchedule}, "NoSchedule None"},
		"reported by newer plugins": {"Scratched", v1alpha1.HealthPolicy{Evict: true}, " "},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.server.Form, s.server.Taints = publish.SplitCounters, true
			s.cuttable()
			p := controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Partitioned("3g.40gb"), Health: tc.health})
			if err := s.api.Create(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			s.publish()
			s.mustTaint(" ")
			since := metav1.NewTime(time.Unix(1000, 0))
			sick := controltest.H100(0)
			sick.Conditions = []v1alpha1.GPUCondition{{Type: string(tc.condition), LastTransitionTime: &since}}
			s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.GPUs = []v1alpha1.GPU{sick, controltest.H100(1)} })
			s.mustReconcile()
			s.mustTaint(tc.want)
			s.cuttable()
			s.mustReconcile()
			s.mustTaint(" ")
		})
	}
}

// mustTaint checks the effects of the taints of the first GPU and of its first
// partition, and that the other devices of that GPU have the partition's.
func (s *fixture) mustTaint(want string) {
	s.t.Helper()
	effects := make(map[string]string)
	for _, slice := range s.store.slices {
		for _, d := range slice.Spec.Devices {
			effect := ""
			for _, x := range d.Taints {
				effect += string(x.Effect)
				if x.TimeAdded.Unix() != 1000 || x.Key != "gpu.nvidia.com/unhealthy" {
					s.t.Errorf("%s: taint %+v", d.Name, x)
				}
			}
			effects[d.Name] = effect
		}
	}
	got := fmt.Sprint(effects["gpu-00000000"], " ", effects["gpu-00000000-mig-3g40gb-0"])
	if got != want || effects["gpu-00000000-mig-3g40gb-4"] != effects["gpu-00000000-mig-3g40gb-0"] {
		s.t.Errorf("effects %q in %v, want %q", got, effects, want)
	}
	if len(effects) != 6 || effects["gpu-00000001"] != "" || effects["gpu-00000001-mig-3g40gb-0"] != "" {
		s.t.Errorf("the other GPU's devices, or their number, have changed: %v", effects)
	}
}

// TestMoreDevicesThanTaintsAllow checks a GPU of 70 devices: a slice with taints has room for
// 64, but on servers of the joint form for 128. Where taints have no room, the blocked
// devices aren't published; of a GPU that isn't blocked as a whole, one that a claim has
// stays, for no other claim.
func TestMoreDevicesThanTaintsAllow(t *testing.T) {
	const claimed = "gpu-00000000-mig-1g10gb-0-mps10-0"
	for name, tc := range map[string]struct {
		condition gpu.ConditionType
		form      publish.Counters
		want      map[string]int // devices by type and taints
	}{
		"healthy":               {"", publish.SplitCounters, map[string]int{"mps": 70}},
		"lost":                  {gpu.Lost, publish.SplitCounters, map[string]int{}},
		"lost, no counters":     {gpu.Lost, publish.NoCounters, map[string]int{}},
		"lost, joint":           {gpu.Lost, publish.JointCounters, map[string]int{"mps Lost": 70}},
		"MPS fails":             {gpu.MPSDaemonFailed, publish.SplitCounters, map[string]int{"leftover": 1}},
		"MPS fails, joint":      {gpu.MPSDaemonFailed, publish.JointCounters, map[string]int{"mps MPSDaemonFailed": 70}},
		"a link is down":        {gpu.NVLinkDown, publish.SplitCounters, map[string]int{"mps": 70}},
		"a link is down, joint": {gpu.NVLinkDown, publish.JointCounters, map[string]int{"mps NVLinkDown": 70}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.server.Form, s.server.Taints = tc.form, true
			sick := controltest.H100(0)
			if tc.condition != "" {
				sick.Conditions = []v1alpha1.GPUCondition{{Type: string(tc.condition)}}
			}
			s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.GPUs = []v1alpha1.GPU{sick} })
			s.sharing("p", v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{
				Layout: slices.Repeat([]string{"1g.10gb"}, 7), MPS: &v1alpha1.PartitionMPS{Shares: 10},
			}})
			s.claims.Have("n", controltest.Devices{"ns/c": {claimed}})
			s.publish()
			got := map[string]int{}
			for _, slice := range s.store.slices {
				for _, d := range slice.Spec.Devices {
					is := *d.Attributes["type"].StringValue
					for _, x := range d.Taints {
						is += " " + x.Value
					}
					got[is]++
					if is == "leftover" && d.Name != claimed {
						t.Errorf("%s is left over", d.Name)
					}
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
