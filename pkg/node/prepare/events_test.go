package prepare_test

import (
	"strings"
	"testing"

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
		want   string // empty: no event
	}{
		"a share":               {claims: forPod(newClaim("a", share("s", 0, 4, 0)))},
		"shares of one request": {claims: forPod(newClaim("a", share("s", 0, 4, 0), share("s", 0, 4, 1)))},
		"two whole GPUs":        {claims: forPod(newClaim("a", result("g", 0)), newClaim("b", result("g", 1)))},
		"two GPUs, one daemon":  {claims: forPod(configured(newClaim("a", result("g", 0), result("g", 1)), mps))},
		"a look at a share":     {claims: forPod(newClaim("a", share("s", 0, 4, 0)), newClaim("b", adminResult("g", 1)))},
		"shares of two GPUs": {
			claims: forPod(newClaim("a", share("s", 0, 4, 0)), newClaim("b", share("s", 1, 4, 2))),
			want:   "gpu-980fb000-mps4-0 of claim a; gpu-980fb001-mps4-2 of claim b",
		},
		"shares of one GPU": {
			claims: forPod(newClaim("a", share("s", 0, 4, 0)), newClaim("b", share("s", 0, 4, 1))),
			want:   "gpu-980fb000-mps4-0 of claim a; gpu-980fb000-mps4-1 of claim b",
		},
		"two requests of one claim": {
			claims: forPod(newClaim("a", share("s", 0, 4, 0), share("t", 1, 4, 0))),
			want:   "gpu-980fb000-mps4-0 of claim a; gpu-980fb001-mps4-0 of claim a",
		},
		"with MPS and without": {
			claims: forPod(configured(newClaim("a", result("g", 0)), mps), newClaim("b", result("g", 1))),
			want:   "gpu-980fb001 of claim b; gpu-980fb000 of claim a",
		},
		"two pods": {claims: append(forPod(newClaim("a", share("s", 0, 4, 0))), newClaim("b", share("s", 1, 4, 0)))},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 2)
			for _, c := range tc.claims {
				if len(f.noted) > 0 {
					t.Errorf("told before claim %s is prepared: %q", c.Name, <-f.noted)
				}
				mustPrepare(t, f, c)
			}
			if tc.want == "" {
				if len(f.noted) > 0 {
					t.Errorf("told %q", <-f.noted)
				}
				return
			}
			if got := <-f.noted; !strings.HasPrefix(got, "default/worker OneMPSDaemonPerContainer: ") || !strings.Contains(got, ": "+tc.want+". ") {
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
	if got := <-f.noted; !strings.HasPrefix(got, `default/worker TimeSlicingHasNoEffect: Request "part" of claim a was given `+c.Status.Allocation.Devices.Results[0].Device) {
		t.Errorf("told %q", got)
	}
	if len(f.noted)+len(f.warned) > 0 {
		t.Error("there are more events")
	}
	if r, ok := f.journal.Claim("a"); !ok || r.Shares() {
		t.Errorf("the claim has %+v", r)
	}
}
