package nodes

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// TestOffersAreCounted reports a node with two GPUs, and takes it away again.
func TestOffersAreCounted(t *testing.T) {
	s := newFixture(t)
	r := s.metrics
	s.published()
	const want = "devices_offered policy= type=gpu 2\nslice_writes_total reason=first 1\n"
	if got := controltest.Metrics(t, r); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
	problems, err := testutil.GatherAndLint(r)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	s.nodes.forgetNode("n")
	if got, want := controltest.Metrics(t, r), "slice_writes_total reason=first 1\n"; got != want {
		t.Errorf("without the node, got:\n%swant:\n%s", got, want)
	}
}

func TestReasonsOfWrites(t *testing.T) {
	pool := func(generation int64, change func(*resourceapi.ResourceSlice)) *resourceapi.ResourceSlice {
		s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "n-0", Labels: map[string]string{publish.ManagedByLabel: publish.ManagedBy}}}
		s.Spec.Pool = resourceapi.ResourcePool{Name: "n", Generation: generation, ResourceSliceCount: 1}
		s.Spec.Devices = []resourceapi.Device{{Name: "gpu-11111111"}}
		if change != nil {
			change(s)
		}
		return s
	}
	tainted := func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{Key: "k", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}
	more := func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: "gpu-22222222"})
	}
	half := func(s *resourceapi.ResourceSlice) { s.Spec.Pool.ResourceSliceCount = 2 }
	for want, tc := range map[string]struct{ current, wanted *resourceapi.ResourceSlice }{
		reasonFirst:   {wanted: pool(1, nil)},
		reasonHealth:  {pool(1, tainted), pool(0, nil)},
		reasonDevices: {pool(1, tainted), pool(0, more)},
		reasonRepair:  {pool(1, half), pool(0, nil)},
	} {
		var current []*resourceapi.ResourceSlice
		if tc.current != nil {
			current = append(current, tc.current)
		}
		if got := reasonOf(current, []resourceapi.ResourceSlice{*tc.wanted}); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
