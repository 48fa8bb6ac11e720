package fit_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
	"github.com/tessera-dra/tessera/test/allocators"
)

var (
	seed   = flag.Uint64("seed", rand.Uint64(), "seed of the random states; printed with a failure")
	states = flag.Int("states", 150, "random states and requests to compare")
)

func exactly(class string, edit ...func(*resourceapi.ExactDeviceRequest)) *resourceapi.ResourceClaim {
	e := &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
	for _, f := range edit {
		f(e)
	}
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "new"}}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "r", Exactly: e}}
	return c
}

// waiting returns the claims as those of a pod that has no others.
func waiting(claims ...*resourceapi.ResourceClaim) fit.PodClaims {
	return fit.PodClaims{Waiting: claims}
}

func where(expression string) func(*resourceapi.ExactDeviceRequest) {
	return func(e *resourceapi.ExactDeviceRequest) {
		e.Selectors = append(e.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}})
	}
}

func profile(name string) func(*resourceapi.ExactDeviceRequest) {
	return where(fmt.Sprintf(`device.attributes["gpu.nvidia.com"].?profile.orValue("") == %q`, name))
}

func times(n int64) func(*resourceapi.ExactDeviceRequest) {
	return func(e *resourceapi.ExactDeviceRequest) { e.Count = n }
}

func all(e *resourceapi.ExactDeviceRequest) {
	e.AllocationMode, e.Count = resourceapi.DeviceAllocationModeAll, 0
}

func memory(q string) func(*resourceapi.ExactDeviceRequest) {
	return func(e *resourceapi.ExactDeviceRequest) {
		e.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(q)}}
	}
}

func tolerant(e *resourceapi.ExactDeviceRequest) {
	e.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
}

func watching(e *resourceapi.ExactDeviceRequest) { e.AdminAccess = new(true) }

// together is a claim with the requests of several.
func together(claims ...*resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	out := claims[0].DeepCopy()
	for i, c := range claims[1:] {
		r := c.Spec.Devices.Requests[0]
		r.Name = fmt.Sprint("r", i)
		out.Spec.Devices.Requests = append(out.Spec.Devices.Requests, r)
	}
	return out
}

func linked(c *resourceapi.ResourceClaim, attribute string) *resourceapi.ResourceClaim {
	c.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: new(resourceapi.FullyQualifiedName(attribute))}}
	return c
}

func eitherOr(first, second *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	sub := func(name string, c *resourceapi.ResourceClaim) resourceapi.DeviceSubRequest {
		e := c.Spec.Devices.Requests[0].Exactly
		return resourceapi.DeviceSubRequest{Name: name, DeviceClassName: e.DeviceClassName, Selectors: e.Selectors, AllocationMode: e.AllocationMode, Count: e.Count}
	}
	out := first.DeepCopy()
	out.Spec.Devices.Requests[0].Exactly = nil
	out.Spec.Devices.Requests[0].FirstAvailable = []resourceapi.DeviceSubRequest{sub("first", first), sub("second", second)}
	return out
}

// questions are claims that people write, rightly and wrongly.
func questions() []*resourceapi.ResourceClaim {
	out := []*resourceapi.ResourceClaim{
		exactly("gpu"), exactly("gpu", times(2)), exactly("gpu", times(3)), exactly("gpu", all), exactly("gpu", tolerant),
		exactly("gpu", watching), exactly("gpu", watching, all),
		exactly("mig"), exactly("mig", times(8)), exactly("mps"), exactly("mps", memory("20Gi")), exactly("mps", memory("200Gi")),
		exactly("timeslice"), exactly("missing"),
		exactly("gpu", where(`device.attributes["gpu.nvidia.com"].productName.startsWith("NVIDIA B200")`)),
		exactly("gpu", where(`device.attributes["gpu.nvidia.com"].wrong == 1`)),
		exactly("gpu", where(`device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("200Gi")) > 0`)),
		exactly("mig", profile("1g.10gb"), where(`device.attributes["gpu.nvidia.com"].index == 1`)),
		exactly("mig", profile("1g.10gb"), profile("3g.40gb")),
		linked(exactly("gpu", times(2)), "gpu.nvidia.com/parentUUID"), linked(exactly("mig", times(2)), "gpu.nvidia.com/parentUUID"),
		together(exactly("gpu"), exactly("mig", profile("3g.40gb"))), together(exactly("mig", profile("4g.40gb")), exactly("mig", profile("3g.40gb")), exactly("gpu")),
		together(exactly("gpu", times(2)), exactly("mig")),
		eitherOr(exactly("mps"), exactly("mig", profile("2g.20gb"))), eitherOr(exactly("gpu"), exactly("timeslice")),
	}
	for _, name := range []string{"1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"} {
		out = append(out, exactly("mig", profile(name)))
	}
	return out
}

func plans() []v1alpha1.Plan {
	shares, clients, step := int32(3), int32(5), resource.MustParse("2Gi")
	return []v1alpha1.Plan{
		{Exclusive: &v1alpha1.ExclusivePlan{}},
		{Partitioned: &v1alpha1.PartitionedPlan{}},
		{Partitioned: &v1alpha1.PartitionedPlan{MPS: &v1alpha1.PartitionMPS{Shares: 2}}},
		{MPS: &v1alpha1.MPSPlan{Shares: &shares}},
		{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{MemoryStep: &step, MaxClients: &clients}}},
		{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 3}},
	}
}

// cluster has a node of two H100s, each under a plan, with claims that came and went.
func cluster(t *testing.T, random *rand.Rand, name string) *allocators.Cluster {
	t.Helper()
	n, err := offertest.Node("h100-80gb", 2)
	if err != nil {
		t.Fatal(err)
	}
	n.Name = name
	c := &allocators.Cluster{
		Node: n, Plans: make(map[gpu.UUID]v1alpha1.Plan), Allocator: allocators.NewLibrary(),
		Server: allocators.Server{Server: offer.Server{Counters: true, Multiple: true, Charged: true, MaxTainted: 64}, Form: publish.SplitCounters},
	}
	for i := range n.GPUs {
		c.Plans[n.GPUs[i].UUID] = plans()[random.IntN(len(plans()))]
		if random.IntN(6) == 0 {
			c.Node.GPUs[i].Conditions = []gpu.Condition{{Type: gpu.ResetRequired, Message: "XID 95"}}
		}
	}
	c.Publish()
	kinds := []allocators.Request{{Kind: "gpu"}, {Kind: "mps"}, {Kind: "timeslice"}, {Kind: "mig", Profile: "1g.10gb"}, {Kind: "mig", Profile: "3g.40gb"}, {Kind: "mig"}}
	for i := range random.IntN(10) {
		if _, err := c.Ask(t.Context(), fmt.Sprint(name, "-", i), kinds[random.IntN(len(kinds))]); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Claims)) {
		if random.IntN(4) == 0 {
			delete(c.Claims, name)
		}
	}
	return c
}

// classes are those that the allocators of the test know.
func classes() []resourceapi.DeviceClass {
	var out []resourceapi.DeviceClass
	for name, expression := range map[string]string{
		"gpu": `device.attributes["gpu.nvidia.com"].type == "gpu"`, "mig": `device.attributes["gpu.nvidia.com"].type == "mig"`,
		"mps": `device.attributes["gpu.nvidia.com"].type == "mps"`, "timeslice": `device.attributes["gpu.nvidia.com"].type == "timeslice"`,
	} {
		c := resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
		c.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
		out = append(out, c)
	}
	return out
}

func objects(clusters ...*allocators.Cluster) fit.Objects {
	o := fit.Objects{Classes: classes()}
	for _, c := range clusters {
		for _, s := range c.Slices() {
			o.Slices = append(o.Slices, *s)
		}
		for _, name := range slices.Sorted(maps.Keys(c.Claims)) {
			claim := c.Claims[name].DeepCopy()
			claim.Name = name
			o.Claims = append(o.Claims, *claim)
		}
	}
	return o
}

// seen is a cluster with its slices as the scheduler sees them.
type seen struct {
	*allocators.Cluster
	slices []*resourceapi.ResourceSlice
}

// given counts how often the library of the allocators gives a node's devices to the
// claim, beside the named claims.
func given(ctx context.Context, c seen, claim *resourceapi.ResourceClaim, beside map[string]*resourceapi.ResourceClaim, limit int) (n int, err error) {
	var allocated []resourceapi.DeviceRequestAllocationResult
	for _, name := range slices.Sorted(maps.Keys(beside)) {
		allocated = append(allocated, beside[name].Status.Allocation.Devices.Results...)
	}
	for n < limit {
		got, err := c.Allocator.Allocate(ctx, allocators.Question{Node: c.Node.Name, Slices: c.slices, Allocated: allocated, Claim: claim})
		if err != nil || got == nil {
			return n, err
		}
		n++
		for _, r := range got.Devices.Results {
			if r.AdminAccess == nil || !*r.AdminAccess {
				allocated = append(allocated, r)
			}
		}
	}
	return n, nil
}

const limit = 20

// TestAgreement: the judge says of random claims in random states what the allocator
// says that is asked about one node and one claim after the other; the claims that it
// names are enough to end, and none of them too many.
func TestAgreement(t *testing.T) {
	t.Logf("-seed %d", *seed)
	all := questions()
	causes := make(map[fit.Cause]int)
	for i := range *states {
		random := rand.New(rand.NewPCG(*seed, uint64(i)))
		a, b := cluster(t, random, "a"), cluster(t, random, "b")
		o := objects(a, b)
		o.TaintRules = taintRules(random, o.Slices)
		tracked := patched(t, o)
		clusters := []seen{{a, tracked["a"]}, {b, tracked["b"]}}
		j := fit.NewJudge(o)
		claim := all[random.IntN(len(all))]
		got, err := j.Fits(t.Context(), j.Nodes(), waiting(claim), limit)
		want, refused := expect(t, clusters, claim)
		switch {
		case refused != nil:
			if err != nil || got.Reason == nil || got.Reason.Cause != fit.Refused {
				t.Errorf("-seed %d, state %d: %+v, %v; the allocator says: %v", *seed, i, got, err, refused)
			}
		case err != nil:
			t.Errorf("-seed %d, state %d: %v", *seed, i, err)
		case got.Count != want:
			t.Errorf("-seed %d, state %d: fits %d times, the allocator allocates it %d times: %+v", *seed, i, got.Count, want, claim.Spec.Devices.Requests)
		case want == 0:
			causes[got.Reason.Cause]++
			checkReason(t, clusters, claim, got.Reason, fmt.Sprintf("-seed %d, state %d", *seed, i))
		}
	}
	t.Log(causes)
}

// TestSentences: a reason names what is in the way, with the values that devices have.
func TestSentences(t *testing.T) {
	one := func(plan v1alpha1.Plan) *allocators.Cluster {
		c := cluster(t, rand.New(rand.NewPCG(0, 0)), "a")
		c.Plans, c.Claims = offertest.OnePlan(c.Node, plan), nil
		for i := range c.Node.GPUs {
			c.Node.GPUs[i].Conditions = nil
		}
		c.Publish()
		return c
	}
	partitioned := v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}
	full := one(partitioned)
	for _, name := range []string{"first", "second"} {
		if _, err := full.Ask(t.Context(), name, allocators.Request{Kind: "gpu"}); err != nil {
			t.Fatal(err)
		}
		full.Claims[name].Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-" + name}}
	}
	sick := one(partitioned)
	for i := range sick.Node.GPUs {
		sick.Node.GPUs[i].Conditions = []gpu.Condition{{Type: gpu.ResetRequired, Message: "XID 95"}}
	}
	sick.Publish()
	shared := one(plans()[4])
	for i := range 2 {
		all := allocators.Request{Kind: "mps", Capacity: map[resourceapi.QualifiedName]string{"memory": "70Gi"}}
		if _, err := shared.Ask(t.Context(), fmt.Sprint("share-", i), all); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		cluster *allocators.Cluster
		claim   *resourceapi.ResourceClaim
		want    fit.Reason
	}{
		"counter": {full, exactly("mig", profile("1g.10gb")), fit.Reason{
			Text: "Other claims have what it needs: gpu-00000001-mig-1g10gb-4 on a needs 9984Mi of its counter memory; " +
				"0 of 81559Mi are free, the rest is used by claim ns/first (pod pod-first).",
			Change: "It fits on a after the end of claim ns/first (pod pod-first).",
		}},
		"shares": {shared, exactly("mps", memory("20Gi")), fit.Reason{
			Text:   "Other claims have what it needs: it needs 20Gi of capacity memory of gpu-00000001-mps on a; 8Gi of 78Gi is free, the rest is used by claim ns/share-0 (no pod uses it).",
			Change: "It fits on a after the end of claim ns/share-0 (no pod uses it).",
		}},
		"no such model": {full, exactly("gpu", where(`device.attributes["gpu.nvidia.com"].productName == "NVIDIA B200"`)), fit.Reason{
			Text: `The selector device.attributes["gpu.nvidia.com"].productName == "NVIDIA B200" of request r is true for none of the 2 devices of DeviceClass gpu: ` +
				"productName is NVIDIA H100 80GB HBM3 (2 devices).",
			Change: "Correct the selector, or add nodes or a SharingPolicy with such devices.",
		}},
		"wrong, and in use": {full, exactly("gpu", where(`device.attributes["gpu.nvidia.com"].wrong == 1`)), fit.Reason{
			Text: "The scheduler refuses it on every node: claim ns/new: selector #0 on device gpu.nvidia.com/a/gpu-00000001: CEL runtime error: no such key: wrong.",
			Change: "Correct the name: of the 2 devices of DeviceClass gpu, none of them has the attribute wrong; the attributes of gpu.nvidia.com are " +
				"addressingMode, architecture, brand, computeEnforcement, cudaComputeCapability, cudaDriverVersion, driverVersion, index, memoryEnforcement, " +
				"migCapable, minor, nvlinkDomain, nvlinkLinks, productName, type and uuid.",
		}},
		"taint": {sick, exactly("gpu"), fit.Reason{
			Text:   "Of 2 devices that match, 2 have taints that the claim doesn't tolerate: gpu.nvidia.com/unhealthy=ResetRequired:NoSchedule on a.",
			Change: "Repair the devices, or tolerate the taints in the claim's request.",
		}},
		"no choice": {one(plans()[0]), eitherOr(exactly("mig"), exactly("timeslice")), fit.Reason{
			Text: `DeviceClass mig of request r/first selects none of the nodes' 2 devices: its selector device.attributes["gpu.nvidia.com"].type == "mig" is never true; type is gpu (2 devices). ` +
				`DeviceClass timeslice of request r/second selects none of the nodes' 2 devices: its selector device.attributes["gpu.nvidia.com"].type == "timeslice" is never true; type is gpu (2 devices).`,
			Change: "Choose another DeviceClass, or a SharingPolicy that offers such devices.",
		}},
		"second choice tainted": {sick, eitherOr(exactly("mps"), exactly("gpu")), fit.Reason{
			Text:   "Of 2 devices that match, 2 have taints that the claim doesn't tolerate: gpu.nvidia.com/unhealthy=ResetRequired:NoSchedule on a.",
			Change: "Repair the devices, or tolerate the taints in the claim's request.",
		}},
		"capacity": {one(plans()[4]), exactly("mps", memory("200Gi")), fit.Reason{
			Text:   "Request r asks for 200Gi of capacity memory, which none of the 2 devices that match has: memory is 78Gi (2 devices).",
			Change: "Ask for less.",
		}},
		"too many": {one(partitioned), exactly("gpu", times(3)), fit.Reason{
			Text:   "Request r asks for 3 devices of one node, and no node has more than 2 that match (a).",
			Change: "Ask for at most 2, or divide the work among several pods.",
		}},
	} {
		j := fit.NewJudge(objects(tc.cluster))
		got, err := j.Fits(t.Context(), j.Nodes(), waiting(tc.claim), 1)
		if err != nil || got.Reason == nil {
			t.Errorf("%s: %+v, %v", name, got, err)
			continue
		}
		if got.Reason.Text != tc.want.Text || got.Reason.Change != tc.want.Change {
			t.Errorf("%s:\n got %s\n     %s\nwant %s\n     %s", name, got.Reason.Text, got.Reason.Change, tc.want.Text, tc.want.Change)
		}
	}
}

func expect(t *testing.T, clusters []seen, claim *resourceapi.ResourceClaim) (sum int, refused error) {
	t.Helper()
	for _, c := range clusters {
		n, err := given(t.Context(), c, claim, c.Claims, limit)
		if sum += n; n == 0 {
			refused = errors.Join(refused, err)
		}
	}
	return sum, refused
}

// checkReason judges a reason by the allocator's answers when less is in the way.
func checkReason(t *testing.T, clusters []seen, claim *resourceapi.ResourceClaim, r *fit.Reason, which string) {
	t.Helper()
	if r.Cause == fit.Refused { // the allocator doesn't evaluate selectors for devices that are in use
		var refused error
		for _, c := range clusters {
			n, err := given(t.Context(), c, claim, nil, 1)
			if refused = errors.Join(refused, err); n > 0 {
				t.Errorf("%s: %+v; it fits on %s without other claims", which, r, c.Node.Name)
			}
		}
		if refused == nil {
			t.Errorf("%s: %+v; the allocator has no error without other claims", which, r)
		}
		return
	}
	fits := func(c seen, claim *resourceapi.ResourceClaim, without []fit.Claim) bool {
		beside := maps.Clone(c.Claims)
		for _, x := range without {
			delete(beside, x.Name)
		}
		n, err := given(t.Context(), c, claim, beside, 1)
		if err != nil {
			t.Fatal(which, err)
		}
		return n > 0
	}
	empty, tolerated := false, false
	for _, c := range clusters {
		var everything []fit.Claim
		for name := range c.Claims {
			everything = append(everything, fit.Claim{Name: name})
		}
		anyway := claim.DeepCopy()
		for i := range anyway.Spec.Devices.Requests {
			if e := anyway.Spec.Devices.Requests[i].Exactly; e != nil {
				tolerant(e)
			}
			for k := range anyway.Spec.Devices.Requests[i].FirstAvailable {
				anyway.Spec.Devices.Requests[i].FirstAvailable[k].Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
			}
		}
		empty, tolerated = empty || fits(c, claim, everything), tolerated || fits(c, anyway, everything)
		if r.Cause != fit.InUse || r.Node != c.Node.Name {
			continue
		}
		if !fits(c, claim, r.Release) {
			t.Errorf("%s: doesn't fit after the release of %v", which, r.Release)
		}
		for k := range r.Release {
			if fits(c, claim, slices.Delete(slices.Clone(r.Release), k, k+1)) {
				t.Errorf("%s: fits without the release of %v", which, r.Release[k])
			}
		}
	}
	want := map[bool]map[bool]string{true: {true: "InUse"}, false: {true: "Tainted", false: "NoMatch TooMany Constraint"}}[empty][tolerated]
	if !strings.Contains(want, string(r.Cause)) {
		t.Errorf("%s: %+v; without other claims it fits: %v, without taints too: %v", which, r, empty, tolerated)
	}
}
