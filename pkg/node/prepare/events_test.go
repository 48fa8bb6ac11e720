package prepare_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// forPod reserves the claims for one pod.
func forPod(claims ...*resourceapi.ResourceClaim) []*resourceapi.ResourceClaim {
	for _, c := range claims {
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "worker", UID: types.UID(podUID)}}
	}
	return claims
}

// TestOneDaemonPerContainer checks that a pod is told which of its devices no container can
// use together, by the last of its claims that is prepared.
func TestOneDaemonPerContainer(t *testing.T) {
	const mps = `{"strategy":"MPS"}`
	for name, tc := range map[string]struct {
		claims []*resourceapi.ResourceClaim
		want   []string // the sets of devices; nil: no event
	}{
		"a share":               {claims: forPod(newClaim("a", share("s", 0, 4, 0)))},
		"shares of one request": {claims: forPod(newClaim("a", share("s", 0, 4, 0), share("s", 0, 4, 1)))},
		"two whole GPUs":        {claims: forPod(newClaim("a", result("g", 0)), newClaim("b", result("g", 1)))},
		"two GPUs, one daemon":  {claims: forPod(configured(newClaim("a", result("g", 0), result("g", 1)), mps))},
		"a look at a share":     {claims: forPod(newClaim("a", share("s", 0, 4, 0)), newClaim("b", adminResult("g", 1)))},
		"shares of two GPUs": {
			claims: forPod(newClaim("a", share("s", 0, 4, 0)), newClaim("b", share("s", 1, 4, 2))),
			want:   []string{gpu0 + "-mps4-0 of claim a", gpu1 + "-mps4-2 of claim b"},
		},
		"shares of one GPU": {
			claims: forPod(newClaim("a", share("s", 0, 4, 0)), newClaim("b", share("s", 0, 4, 1))),
			want:   []string{gpu0 + "-mps4-0 of claim a", gpu0 + "-mps4-1 of claim b"},
		},
		"two requests of one claim": {
			claims: forPod(newClaim("a", share("s", 0, 4, 0), share("t", 1, 4, 0))),
			want:   []string{gpu0 + "-mps4-0 of claim a", gpu1 + "-mps4-0 of claim a"},
		},
		"with MPS and without": {
			claims: forPod(configured(newClaim("a", result("g", 0)), mps), newClaim("b", result("g", 1))),
			want:   []string{gpu1 + " of claim b", gpu0 + " of claim a"},
		},
		"two pods": {claims: append(forPod(newClaim("a", share("s", 0, 4, 0))), newClaim("b", share("s", 1, 4, 0)))},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 2)
			var told []string
			for _, c := range tc.claims {
				if len(told) > 0 {
					t.Errorf("told before claim %s is prepared: %q", c.Name, told)
				}
				mustPrepare(t, f, c)
				told = f.told(t, corev1.EventTypeNormal)
			}
			if tc.want == nil || len(told) != 1 {
				if len(told) > 0 || tc.want != nil {
					t.Errorf("told %q, want the pod to be told of %q", told, tc.want)
				}
				return
			}
			got := told[0]
			_, sets, _ := strings.Cut(got, "only one of these: ")
			sets, _, _ = strings.Cut(sets, ". ")
			of := strings.Split(sets, "; ")
			slices.Sort(of)
			slices.Sort(tc.want)
			if !strings.HasPrefix(got, "default/worker OneMPSDaemonPerContainer: ") || !slices.Equal(of, tc.want) {
				t.Errorf("told %q, want the pod to be told of %q", got, tc.want)
			}
		})
	}
}

// TestTimeSlicingOfPartition checks that a configuration that asks for it has no effect, and
// that the pod is told.
func TestTimeSlicingOfPartition(t *testing.T) {
	f := newFixture(t, 1)
	c := forPod(newClaim("a", part("part", 0, "1g.10gb", 2)))[0]
	c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
		Source: resourceapi.AllocationConfigSourceClaim, Requests: []string{"part"},
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver:     driver,
			Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"TimeSlicing"}}`)},
		}},
	}}
	mustPrepare(t, f, c)
	if got := f.told(t, corev1.EventTypeNormal); len(got) != 1 || !strings.HasPrefix(got[0], `default/worker TimeSlicingHasNoEffect: Request "part" of claim a was given `+c.Status.Allocation.Devices.Results[0].Device) {
		t.Errorf("told %q", got)
	}
	if r, ok := f.journal.Claim("a"); !ok || r.Shares() {
		t.Errorf("the claim has %+v", r)
	}
}
