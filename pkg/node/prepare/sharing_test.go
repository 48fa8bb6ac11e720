package prepare_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/prepare/preparetest"
)

// of is one result: a device by its name.
func of(request string, device gpu.DeviceName) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driver, Pool: pool, Device: string(device)}
}

// share is one of count equal shares of the n-th GPU.
func share(request string, n, count, number int) resourceapi.DeviceRequestAllocationResult {
	return of(request, preparetest.Device(n)+gpu.DeviceName(fmt.Sprintf("-mps%d-%d", count, number)))
}

func replica(request string, n, count, number int) resourceapi.DeviceRequestAllocationResult {
	return of(request, preparetest.Device(n)+gpu.DeviceName(fmt.Sprintf("-ts%d-%d", count, number)))
}

// shareOf is one of count equal shares of a partition of the n-th GPU.
func shareOf(request string, n int, profile string, start, count, number int) resourceapi.DeviceRequestAllocationResult {
	return of(request, preparetest.Partition(n, profile, start)+gpu.DeviceName(fmt.Sprintf("-mps%d-%d", count, number)))
}

// asked is a share with multiple allocations; device is the shared device.
func asked(request string, device gpu.DeviceName, id, memory, threads string) resourceapi.DeviceRequestAllocationResult {
	r := of(request, device+"-mps")
	r.ShareID = new(types.UID(id))
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{
		"memory": resource.MustParse(memory), "threadPercentage": resource.MustParse(threads), "clients": resource.MustParse("1"),
	}
	return r
}

// configured has the claim say this of its requests; none: of all.
func configured(c *resourceapi.ResourceClaim, sharing string, requests ...string) *resourceapi.ResourceClaim {
	c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: resourceapi.AllocationConfigSourceClaim, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver:     driver,
			Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":` + sharing + `}`)},
		}},
	})
	return c
}

// environment returns what the claim's CDI devices have in their environment.
func environment(t *testing.T, f *fixture, c *resourceapi.ResourceClaim) map[string]string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(f.node.CDI, "k8s.gpu.nvidia.com-claim_"+string(c.UID)+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{}
	for _, d := range spec.Devices {
		env[strings.TrimPrefix(d.Name, string(c.UID)+"-")] = strings.Join(d.ContainerEdits.Env, " ")
	}
	return env
}

const (
	gpu0 = "gpu-980fb000"
	gpu1 = "gpu-980fb001"
)

// TestSharing prepares claims of everything that is shared, twice, and lists
// the environment of their containers, by the names of CDI devices.
func TestSharing(t *testing.T) {
	const tight = `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":10,"defaultPinnedDeviceMemoryLimit":"2Gi"}}`
	big := preparetest.Partition(0, "3g.40gb", 0)
	for name, tc := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  map[string]string
	}{
		"a share":                 {newClaim("c", share("s", 0, 4, 1)), map[string]string{gpu0 + "-mps4-1": "MPS=25% [20480]Mi"}},
		"by firstAvailable":       {newClaim("c", share("s/one", 0, 3, 0)), map[string]string{gpu0 + "-mps3-0": "MPS=33% [27306]Mi"}},
		"a share of a partition":  {newClaim("c", shareOf("s", 0, "3g.40gb", 0, 2, 1)), map[string]string{string(big) + "-mps2-1": "MPS=50% [20480]Mi"}},
		"several of one request":  {newClaim("c", share("s", 0, 4, 1), share("s", 0, 4, 3)), map[string]string{gpu0 + "-mps4-1": "MPS=50% [40960]Mi", gpu0 + "-mps4-3": "MPS=50% [40960]Mi"}},
		"several requests":        {newClaim("c", share("a", 0, 4, 1), share("b", 0, 4, 3)), map[string]string{gpu0 + "-mps4-1": "MPS=25% [20480]Mi", gpu0 + "-mps4-3": "MPS=25% [20480]Mi"}},
		"requests on two daemons": {newClaim("c", share("a", 0, 4, 1), share("b", 1, 2, 0)), map[string]string{gpu0 + "-mps4-1": "MPS=25% [20480]Mi", gpu1 + "-mps2-0": "MPS=50% [40960]Mi"}},
		"as much as asked for":    {newClaim("c", asked("s", gpu0, "s1", "10Gi", "30")), map[string]string{gpu0 + "-mps-s1": "MPS=30% [10240]Mi"}},
		"in a partition":          {newClaim("c", asked("s", big, "s1", "10Gi", "50")), map[string]string{string(big) + "-mps-s1": "MPS=50% [10240]Mi"}},
		"one device for two requests": {
			newClaim("c", asked("a", gpu0, "s1", "10Gi", "30"), asked("b", gpu0, "s2", "1Gi", "100")),
			map[string]string{gpu0 + "-mps-s1": "MPS=30% [10240]Mi", gpu0 + "-mps-s2": "MPS=100% [1024]Mi"},
		},
		"one device twice for a request": {
			newClaim("c", asked("s", gpu0, "s1", "10Gi", "30"), asked("s", gpu0, "s2", "1Gi", "100")),
			map[string]string{gpu0 + "-mps-s1": "MPS=100% [11264]Mi", gpu0 + "-mps-s2": "MPS=100% [11264]Mi"},
		},
		"a stricter configuration":      {configured(newClaim("c", share("s", 0, 4, 1)), tight), map[string]string{gpu0 + "-mps4-1": "MPS=10% [2048]Mi"}},
		"stricter for one request":      {configured(newClaim("c", share("a", 0, 4, 1), share("b", 0, 4, 2)), tight, "b"), map[string]string{gpu0 + "-mps4-1": "MPS=25% [20480]Mi", gpu0 + "-mps4-2": "MPS=10% [2048]Mi"}},
		"stricter than shares together": {configured(newClaim("c", share("s", 0, 4, 1), share("s", 0, 4, 2)), `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50}}`), map[string]string{gpu0 + "-mps4-1": "MPS=50% [40960]Mi", gpu0 + "-mps4-2": "MPS=50% [40960]Mi"}},
		"no limits in it":               {configured(newClaim("c", share("s", 0, 4, 1)), `{"strategy":"MPS"}`), map[string]string{gpu0 + "-mps4-1": "MPS=25% [20480]Mi"}},
		"strict by the GPU's UUID":      {configured(newClaim("c", share("s", 0, 4, 1)), `{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"`+string(preparetest.UUID(0))+`":"3Gi"}}}`), map[string]string{gpu0 + "-mps4-1": "MPS=25% [3072]Mi"}},
		"MPS on whole GPUs": {
			configured(newClaim("c", result("g", 1), result("g", 0)), `{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"2Gi","defaultPerDevicePinnedMemoryLimit":{"0":"5Gi"}}}`),
			map[string]string{gpu0: "MPS=0% [5120 2048]Mi", gpu1: "MPS=0% [5120 2048]Mi"},
		},
		"MPS on whole GPUs, by UUID": {
			configured(newClaim("c", result("g", 1), result("g", 0)), `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":40,"defaultPerDevicePinnedMemoryLimit":{"`+strings.ToUpper(string(preparetest.UUID(0)))[:4]+strings.ToUpper(string(preparetest.UUID(0)))[4:]+`":"5Gi"}}}`),
			map[string]string{gpu0: "MPS=40% [0 5120]Mi", gpu1: "MPS=40% [0 5120]Mi"},
		},
		"MPS on one of two": {
			configured(newClaim("c", result("a", 1), result("b", 0)), `{"strategy":"MPS"}`, "b"), map[string]string{gpu0: "MPS=0% [0]Mi", gpu1: ""},
		},
		"a replica":        {newClaim("c", replica("r", 0, 4, 2), replica("r", 1, 4, 2)), map[string]string{gpu0 + "-ts4-2": "", gpu1 + "-ts4-2": ""}},
		"time slices":      {configured(newClaim("c", result("g", 0)), `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`), map[string]string{gpu0: ""}},
		"a look at shares": {newClaim("c", withAdmin(share("look", 0, 4, 1)), withAdmin(of("look", gpu1+"-mps")), share("s", 0, 4, 3)), map[string]string{gpu0 + "-mps4-1": "", gpu1 + "-mps": "", gpu0 + "-mps4-3": "MPS=25% [20480]Mi"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 2)
			for range 2 {
				var want, got []string
				for _, r := range tc.claim.Status.Allocation.Devices.Results {
					id := r.Device
					if r.ShareID != nil {
						id += "-" + string(*r.ShareID)
					}
					want = append(want, fmt.Sprintf("%s %s [k8s.gpu.nvidia.com/claim=c-%s]", r.Request, r.Device, id))
				}
				for i, d := range mustPrepare(t, f, tc.claim) {
					got = append(got, fmt.Sprintf("%s %s %v", d.Requests[0], d.DeviceName, d.CDIDeviceIDs))
					if !cmp.Equal(d.ShareID, tc.claim.Status.Allocation.Devices.Results[i].ShareID) {
						t.Errorf("share ID: got %v", d.ShareID)
					}
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
				if diff := cmp.Diff(tc.want, environment(t, f, tc.claim)); diff != "" {
					t.Errorf("environment (-want +got):\n%s", diff)
				}
				checkHeld(t, f, "c")
			}
			for range 2 {
				mustUnprepare(t, f, tc.claim)
				checkHeld(t, f)
			}
		})
	}
}

func withAdmin(r resourceapi.DeviceRequestAllocationResult) resourceapi.DeviceRequestAllocationResult {
	r.AdminAccess = new(true)
	return r
}

func TestSharingRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		claim *resourceapi.ResourceClaim
		says  []string
	}{
		"shares of two GPUs in a request": {newClaim("c", share("s/x", 0, 4, 1), share("s/x", 1, 4, 1)), []string{
			`request "s"`, gpu0 + "-mps4-1", gpu1 + "-mps4-1", "one MPS daemon only", "resources.claims[].request", "matchAttribute gpu.nvidia.com/parentUUID",
		}},
		"shares of two partitions":       {newClaim("c", shareOf("s", 0, "1g.10gb", 0, 2, 0), shareOf("s", 0, "1g.10gb", 1, 2, 0)), []string{"one MPS daemon only"}},
		"a share and a GPU in a request": {newClaim("c", share("s", 0, 4, 1), result("s", 1)), []string{"sees no other GPU"}},
		"a share and a replica":          {newClaim("c", replica("s", 1, 4, 1), share("s", 0, 4, 1)), []string{"sees no other GPU"}},
		"more threads than the share has": {configured(newClaim("c", share("s", 0, 4, 1)), `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":26}}`), []string{
			`request "s"`, "sharing.mpsConfig.defaultActiveThreadPercentage is 26", "share has 25", "never larger", "ResourceClaim",
		}},
		"more memory than the share has": {configured(newClaim("c", share("s", 0, 4, 1)), `{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"21Gi"}}`), []string{
			"asks for 21504Mi", "defaultPinnedDeviceMemoryLimit", "has 20480Mi",
		}},
		"more than was asked for": {configured(newClaim("c", asked("s", gpu0, "s1", "10Gi", "30")), `{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"0":"11Gi"}}}`), []string{
			"asks for 11264Mi", "has 10240Mi",
		}},
		"a device the claim doesn't have": {configured(newClaim("c", result("g", 0), result("g", 1)), `{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"2":"1Gi"}}}`), []string{
			"defaultPerDevicePinnedMemoryLimit[2]", "0 (" + gpu0, "1 (" + gpu1,
		}},
		"a share of a GPU without MPS limits": {newClaim("c", share("s", 2, 4, 1)), []string{
			`request "s"`, "compute capability 7.0 (Volta) or later", "Tesla P100-PCIE-16GB has 6.0", "SharingPolicy",
		}},
		"MPS limits where there are none": {configured(newClaim("c", result("g", 2)), `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50}}`), []string{
			"compute capability 7.0 (Volta) or later", "ResourceClaim",
		}},
		"a share without its size": {newClaim("c", of("s", gpu0+"-mps")), []string{"consumedCapacity", "DRAConsumableCapacity"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 3)
			f.node.SetModel(2, gpu.Model{ProductName: "Tesla P100-PCIE-16GB", CUDAComputeCapability: "6.0"})
			_, err := f.Prepare(testContext(t), tc.claim)
			if !errors.Is(err, claim.ErrPermanent) {
				t.Fatalf("got %v, want a refusal", err)
			}
			for _, s := range tc.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("got %q, want it to say %q", err, s)
				}
			}
			checkHeld(t, f)
		})
	}
}

// TestClaimsShare: daemons and settings of several claims stay until the last
// has left.
func TestClaimsShare(t *testing.T) {
	big := preparetest.Partition(0, "3g.40gb", 4)
	for name, claims := range map[string][]*resourceapi.ResourceClaim{
		"a GPU":                             {newClaim("a", share("s", 0, 4, 0)), newClaim("b", share("s", 0, 4, 1)), newClaim("c", share("s", 0, 4, 3))},
		"a GPU, as much as asked for":       {newClaim("a", asked("s", gpu0, "1", "10Gi", "25")), newClaim("b", asked("s", gpu0, "2", "20Gi", "100")), newClaim("c", asked("s", gpu0, "3", "50Gi", "100"))},
		"a partition":                       {newClaim("a", shareOf("s", 0, "3g.40gb", 4, 3, 0)), newClaim("b", shareOf("s", 0, "3g.40gb", 4, 3, 1)), newClaim("c", shareOf("s", 0, "3g.40gb", 4, 3, 2))},
		"a partition, as much as asked for": {newClaim("a", asked("s", big, "1", "10Gi", "50")), newClaim("b", asked("s", big, "2", "20Gi", "50")), newClaim("c", asked("s", big, "3", "10Gi", "50"))},
		"by replicas":                       {newClaim("a", replica("r", 0, 3, 0)), newClaim("b", replica("r", 0, 3, 1)), newClaim("c", replica("r", 0, 3, 2))},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			for _, c := range claims {
				mustPrepare(t, f, c)
			}
			daemons, partitions := f.node.Daemons(), f.node.Instances()
			f.holders.set("a", prepare.Standing{Reason: "pod default/a uses it"})
			f.holders.set("b", prepare.Standing{Reason: "pod default/b uses it"})
			f.holders.set("c", prepare.Standing{Reason: "pod default/c uses it"})
			for _, other := range []resourceapi.DeviceRequestAllocationResult{result("g", 0), share("s", 0, 2, 0), replica("r", 0, 2, 0), part("p", 0, "7g.80gb", 0)} {
				if _, err := f.Prepare(testContext(t), newClaim("other", other)); !errors.Is(err, prepare.ErrHeld) {
					t.Errorf("%s: got %v, want ErrHeld", other.Device, err)
				}
			}
			checkHeld(t, f, "a", "b", "c")
			mustUnprepare(t, f, claims[1])
			checkHeld(t, f, "a", "c")
			mustUnprepare(t, f, claims[0])
			checkHeld(t, f, "c")
			if diff := cmp.Diff(daemons, f.node.Daemons()); diff != "" {
				t.Errorf("daemons (-before +now):\n%s", diff)
			}
			if diff := cmp.Diff(partitions, f.node.Instances()); diff != "" {
				t.Errorf("partitions (-before +now):\n%s", diff)
			}
			mustPrepare(t, f, claims[1])
			mustUnprepare(t, f, claims[2])
			checkHeld(t, f, "b")
			mustUnprepare(t, f, claims[1])
			checkHeld(t, f)
			mustPrepare(t, f, newClaim("whole", result("g", 0)))
			checkHeld(t, f, "whole")
		})
	}
}

// TestMoreMemoryThanThereIs is refused while those who have it stay, and waited
// for where one of them goes.
func TestMoreMemoryThanThereIs(t *testing.T) {
	f := newFixture(t, 1)
	a, b, c := newClaim("a", asked("s", gpu0, "1", "30Gi", "50")), newClaim("b", asked("x", gpu0, "2", "20Gi", "50"), asked("y", gpu0, "3", "20Gi", "50")), newClaim("c", asked("s", gpu0, "4", "11Gi", "50"))
	mustPrepare(t, f, a)
	mustPrepare(t, f, b)
	f.holders.set("a", prepare.Standing{Reason: "pod default/a uses it"})
	f.holders.set("b", prepare.Standing{Reason: "pod default/b uses it"})
	_, err := f.Prepare(testContext(t), c)
	if !errors.Is(err, prepare.ErrHeld) {
		t.Fatalf("got %v, want ErrHeld", err)
	}
	for _, s := range []string{"have 11264Mi", "of the 81920Mi", "71680Mi are taken (claim default/a 30720Mi, claim default/b 40960Mi)", "delete"} {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("got %q, want it to say %q", err, s)
		}
	}
	for len(f.holders.asked) > 0 {
		<-f.holders.asked
	}
	f.holders.set("b", prepare.Standing{AwaitsUnprepare: true, Reason: "the claim was deleted"})
	got := inBackground(testContext(t), f, c)
	<-f.holders.asked
	mustUnprepare(t, f, b)
	if a := <-got; a.err != nil {
		t.Error(a.err)
	}
	mustPrepare(t, f, c) // and again: it keeps its share
	checkHeld(t, f, "a", "c")
	if _, err := f.Prepare(testContext(t), newClaim("d", asked("s", gpu0, "5", "100Gi", "50"))); !errors.Is(err, prepare.ErrHeld) {
		t.Errorf("more than the GPU has: got %v", err)
	}
}

// TestRoomOfAnEarlierBoot is taken from claims that nothing wants any more.
func TestRoomOfAnEarlierBoot(t *testing.T) {
	f := newFixture(t, 1)
	mustPrepare(t, f, newClaim("old", asked("s", gpu0, "1", "50Gi", "50")))
	f.journal.Close()
	f.node.Reboot()
	f = start(t, f.node, "boot-2", nil)
	f.holders.set("old", prepare.Standing{AwaitsUnprepare: true, Reason: "the claim was deleted"})
	mustPrepare(t, f, newClaim("new", asked("s", gpu0, "1", "50Gi", "50")))
	checkHeld(t, f, "new")
}

// TestLimitsStayWhileAClaimIsPrepared: their inputs change with the driver, and
// a claim that is prepared again keeps its limits.
func TestLimitsStayWhileAClaimIsPrepared(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("c", share("s", 0, 4, 0))
	mustPrepare(t, f, c)
	r, _ := f.journal.Claim("c")
	r.Holdings[0].MPS = &holding.MPS{ThreadPercentage: 24, MemoryMiB: 20000}
	if err := f.journal.Put(r.Record); err != nil {
		t.Fatal(err)
	}
	mustPrepare(t, f, c)
	if diff := cmp.Diff(map[string]string{gpu0 + "-mps4-0": "MPS=24% [20000]Mi"}, environment(t, f, c)); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}
}

func TestSharesAreTold(t *testing.T) {
	f := newFixture(t, 1)
	var told []gpu.Prepared
	f.onPrepared = func(_ kubeletplugin.NamespacedObject, devices map[gpu.DeviceName]gpu.Prepared) {
		for _, g := range devices {
			told = append(told, g)
		}
	}
	mustPrepare(t, f, newClaim("c", asked("s", gpu0, "s1", "10Gi", "30")))
	want := []gpu.Prepared{{
		Device: gpu.Share{Of: gpu.Whole{GPU: preparetest.UUID(0)}}, Name: gpu0 + "-mps", ShareID: "s1",
		MPS: &gpu.MPSClient{MPSDirs: gpu.MPSDirs{PipeDir: "/run/tessera/mps/d/" + string(preparetest.UUID(0)) + "--0/pipe"}, ThreadPercentage: 30, MemoryMiB: []int64{10240}},
	}}
	if diff := cmp.Diff(want, told); diff != "" {
		t.Errorf("-want +told:\n%s", diff)
	}
}

// TestAShareOfAllIsTheWhole checks that a claim with all memory and all
// multiprocessors of a GPU gets it without MPS, and a claim with less doesn't.
func TestAShareOfAllIsTheWhole(t *testing.T) {
	f := newFixture(t, 1)
	_, facts, err := f.node.Device(preparetest.Device(0))
	if err != nil {
		t.Fatal(err)
	}
	all, err := gpu.ShareableMiB(facts, gpu.Whole{GPU: facts.UUID})
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		memory  int64
		threads string
		whole   bool
	}{
		"all":                     {all, "100", true},
		"a little less memory":    {all - 1, "100", false},
		"not all multiprocessors": {all, "99", false},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClaim("c", asked("s", gpu0, "1", fmt.Sprintf("%dMi", tc.memory), tc.threads))
			devices := mustPrepare(t, f, c)
			if len(devices) != 1 || devices[0].DeviceName != gpu0+"-mps" || devices[0].ShareID == nil {
				t.Errorf("the kubelet is told of %+v", devices)
			}
			grant := f.journal.Claims()[0].Holdings[0]
			if _, whole := grant.DeviceHeld().(gpu.Whole); whole != tc.whole || (grant.MPS == nil) != tc.whole {
				t.Errorf("got %+v", grant)
			}
			mustPrepare(t, f, c) // the kubelet's next try
			checkHeld(t, f, "c")
			mustUnprepare(t, f, c)
			checkHeld(t, f)
		})
	}
}
