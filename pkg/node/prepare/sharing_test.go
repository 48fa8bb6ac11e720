package prepare_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// of is one result: a device by its name.
func of(request, device string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driver, Pool: pool, Device: device}
}

// share is one of count equal shares of the n-th GPU.
func share(request string, n, count, number int) resourceapi.DeviceRequestAllocationResult {
	return of(request, fmt.Sprintf("%s-mps%d-%d", gpuName(n), count, number))
}

func replica(request string, n, count, number int) resourceapi.DeviceRequestAllocationResult {
	return of(request, fmt.Sprintf("%s-ts%d-%d", gpuName(n), count, number))
}

// shareOf is one of count equal shares of a partition of the n-th GPU.
func shareOf(request string, n int, profile string, start, count, number int) resourceapi.DeviceRequestAllocationResult {
	return of(request, fmt.Sprintf("%s-mps%d-%d", partitionName(n, profile, start), count, number))
}

// asked is a share with multiple allocations; device is the shared device.
func asked(request, device, id, memory, threads string) resourceapi.DeviceRequestAllocationResult {
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

// shareable is how much memory the shares of the n-th GPU have together, or those of a partition
// of it, in MiB.
func shareable(t *testing.T, n int, profile string) int64 {
	t.Helper()
	node := newNode(t, n+1)
	var of gpu.Device = gpu.Whole{GPU: uuidOf(n)}
	if profile != "" {
		of = gpu.Partition{GPU: uuidOf(n), Profile: profile}
	}
	mib, err := gpu.ShareableMiB(node.gpus[n], of)
	if err != nil {
		t.Fatal(err)
	}
	return mib
}

// env is what a client of an MPS daemon has in its environment: a percentage of threads, and its
// memory on each of the daemon's devices, in MiB; 0 for no limit.
func env(threads int, memory ...int64) string {
	text := "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"
	if threads > 0 && threads < 100 {
		text += fmt.Sprintf(" CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", threads)
	}
	var limits []string
	for i, mib := range memory {
		if mib > 0 {
			limits = append(limits, fmt.Sprintf("%d=%dM", i, mib))
		}
	}
	if limits != nil {
		text += " CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + strings.Join(limits, ",")
	}
	return text
}

// environment returns what the claim's CDI devices have in their environment, of MPS.
func environment(t *testing.T, f *fixture, c *resourceapi.ResourceClaim) map[string]string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(f.node.cdi, "k8s.gpu.nvidia.com-claim_"+string(c.UID)+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{}
	for _, d := range spec.Devices {
		isMPS := func(variable string) bool { return strings.HasPrefix(variable, "CUDA_MPS_") }
		env[strings.TrimPrefix(d.Name, string(c.UID)+"-")] = strings.Join(slices.DeleteFunc(d.ContainerEdits.Env, func(v string) bool { return !isMPS(v) }), " ")
	}
	return env
}

// TestSharing prepares claims of everything that is shared, twice, and lists
// the environment of their containers, by the names of CDI devices.
func TestSharing(t *testing.T) {
	const tight = `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":10,"defaultPinnedDeviceMemoryLimit":"2Gi"}}`
	big := string(partitionName(0, "3g.40gb", 0))
	all, half := shareable(t, 0, ""), shareable(t, 0, "3g.40gb")
	for name, tc := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  map[string]string
	}{
		"a share":                 {newClaim("c", share("s", 0, 4, 1)), map[string]string{gpu0 + "-mps4-1": env(25, all/4)}},
		"by firstAvailable":       {newClaim("c", share("s/one", 0, 3, 0)), map[string]string{gpu0 + "-mps3-0": env(33, all/3)}},
		"a share of a partition":  {newClaim("c", shareOf("s", 0, "3g.40gb", 0, 2, 1)), map[string]string{big + "-mps2-1": env(50, half/2)}},
		"several of one request":  {newClaim("c", share("s", 0, 4, 1), share("s", 0, 4, 3)), map[string]string{gpu0 + "-mps4-1": env(50, 2*(all/4)), gpu0 + "-mps4-3": env(50, 2*(all/4))}},
		"several requests":        {newClaim("c", share("a", 0, 4, 1), share("b", 0, 4, 3)), map[string]string{gpu0 + "-mps4-1": env(25, all/4), gpu0 + "-mps4-3": env(25, all/4)}},
		"requests on two daemons": {newClaim("c", share("a", 0, 4, 1), share("b", 1, 2, 0)), map[string]string{gpu0 + "-mps4-1": env(25, all/4), gpu1 + "-mps2-0": env(50, all/2)}},
		"as much as asked for":    {newClaim("c", asked("s", gpu0, "s1", "10Gi", "30")), map[string]string{gpu0 + "-mps-s1": env(30, 10240)}},
		"in a partition":          {newClaim("c", asked("s", big, "s1", "10Gi", "50")), map[string]string{big + "-mps-s1": env(50, 10240)}},
		"one device for two requests": {
			newClaim("c", asked("a", gpu0, "s1", "10Gi", "30"), asked("b", gpu0, "s2", "1Gi", "100")),
			map[string]string{gpu0 + "-mps-s1": env(30, 10240), gpu0 + "-mps-s2": env(100, 1024)},
		},
		"one device twice for a request": {
			newClaim("c", asked("s", gpu0, "s1", "10Gi", "30"), asked("s", gpu0, "s2", "1Gi", "100")),
			map[string]string{gpu0 + "-mps-s1": env(100, 11264), gpu0 + "-mps-s2": env(100, 11264)},
		},
		"a stricter configuration":      {configured(newClaim("c", share("s", 0, 4, 1)), tight), map[string]string{gpu0 + "-mps4-1": env(10, 2048)}},
		"stricter for one request":      {configured(newClaim("c", share("a", 0, 4, 1), share("b", 0, 4, 2)), tight, "b"), map[string]string{gpu0 + "-mps4-1": env(25, all/4), gpu0 + "-mps4-2": env(10, 2048)}},
		"stricter than shares together": {configured(newClaim("c", share("s", 0, 4, 1), share("s", 0, 4, 2)), `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50}}`), map[string]string{gpu0 + "-mps4-1": env(50, 2*(all/4)), gpu0 + "-mps4-2": env(50, 2*(all/4))}},
		"no limits in it":               {configured(newClaim("c", share("s", 0, 4, 1)), `{"strategy":"MPS"}`), map[string]string{gpu0 + "-mps4-1": env(25, all/4)}},
		"strict by the GPU's UUID":      {configured(newClaim("c", share("s", 0, 4, 1)), `{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"`+string(uuidOf(0))+`":"3Gi"}}}`), map[string]string{gpu0 + "-mps4-1": env(25, 3072)}},
		"MPS on whole GPUs": {
			configured(newClaim("c", result("g", 1), result("g", 0)), `{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"2Gi","defaultPerDevicePinnedMemoryLimit":{"0":"5Gi"}}}`),
			map[string]string{gpu0: env(0, 5120, 2048), gpu1: env(0, 5120, 2048)},
		},
		"MPS on whole GPUs, by UUID": {
			configured(newClaim("c", result("g", 1), result("g", 0)), `{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":40,"defaultPerDevicePinnedMemoryLimit":{"`+strings.ToUpper(string(uuidOf(0)))[:4]+strings.ToUpper(string(uuidOf(0)))[4:]+`":"5Gi"}}}`),
			map[string]string{gpu0: env(40, 0, 5120), gpu1: env(40, 0, 5120)},
		},
		"MPS on one of two": {
			configured(newClaim("c", result("a", 1), result("b", 0)), `{"strategy":"MPS"}`, "b"), map[string]string{gpu0: env(0, 0), gpu1: ""},
		},
		"a replica":        {newClaim("c", replica("r", 0, 4, 2), replica("r", 1, 4, 2)), map[string]string{gpu0 + "-ts4-2": "", gpu1 + "-ts4-2": ""}},
		"time slices":      {configured(newClaim("c", result("g", 0)), `{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`), map[string]string{gpu0: ""}},
		"a look at shares": {newClaim("c", withAdmin(share("look", 0, 4, 1)), withAdmin(of("look", gpu1+"-mps")), share("s", 0, 4, 3)), map[string]string{gpu0 + "-mps4-1": "", gpu1 + "-mps": "", gpu0 + "-mps4-3": env(25, all/4)}},
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
					want = append(want, fmt.Sprintf("%s %s %v", r.Request, r.Device, ids(tc.claim, id)))
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
	d := installed.Machine
	d.GPUs = slices.Clone(d.GPUs[:3])
	d.GPUs[2].Model = "p100-16gb"
	all := shareable(t, 0, "")
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
			"asks for 21504Mi", "defaultPinnedDeviceMemoryLimit", fmt.Sprintf("has %dMi", all/4),
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
			f := start(t, newNodeOf(t, d), "boot-1", nil)
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
	big := string(partitionName(0, "3g.40gb", 4))
	for name, claims := range map[string][]*resourceapi.ResourceClaim{
		"a GPU":                             {newClaim("a", share("s", 0, 4, 0)), newClaim("b", share("s", 0, 4, 1)), newClaim("c", share("s", 0, 4, 3))},
		"a GPU, as much as asked for":       {newClaim("a", asked("s", gpu0, "1", "10Gi", "25")), newClaim("b", asked("s", gpu0, "2", "20Gi", "100")), newClaim("c", asked("s", gpu0, "3", "40Gi", "100"))},
		"a partition":                       {newClaim("a", shareOf("s", 0, "3g.40gb", 4, 3, 0)), newClaim("b", shareOf("s", 0, "3g.40gb", 4, 3, 1)), newClaim("c", shareOf("s", 0, "3g.40gb", 4, 3, 2))},
		"a partition, as much as asked for": {newClaim("a", asked("s", big, "1", "10Gi", "50")), newClaim("b", asked("s", big, "2", "20Gi", "50")), newClaim("c", asked("s", big, "3", "5Gi", "50"))},
		"by replicas":                       {newClaim("a", replica("r", 0, 3, 0)), newClaim("b", replica("r", 0, 3, 1)), newClaim("c", replica("r", 0, 3, 2))},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			for _, c := range claims {
				mustPrepare(t, f, c)
			}
			daemons, partitions := f.node.runningDaemons(t), f.node.instances(t)
			f.server.set("a", inUse)
			f.server.set("b", inUse)
			f.server.set("c", inUse)
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
			if diff := cmp.Diff(daemons, f.node.runningDaemons(t)); diff != "" {
				t.Errorf("daemons (-before +now):\n%s", diff)
			}
			if diff := cmp.Diff(partitions, f.node.instances(t)); diff != "" {
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
	f.server.set("a", inUse)
	f.server.set("b", inUse)
	_, err := f.Prepare(testContext(t), c)
	if !errors.Is(err, prepare.ErrHeld) {
		t.Fatalf("got %v, want ErrHeld", err)
	}
	for _, s := range []string{"have 11264Mi", fmt.Sprintf("of the %dMi", shareable(t, 0, "")), "71680Mi are taken (claim default/a 30720Mi, claim default/b 40960Mi)", "delete"} {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("got %q, want it to say %q", err, s)
		}
	}
	for len(f.server.asked) > 0 {
		<-f.server.asked
	}
	f.server.set("b", deleted)
	got := inBackground(testContext(t), f, c)
	<-f.server.asked
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
	f.node.reboot(t)
	f = start(t, f.node, "boot-2", nil)
	f.server.set("old", deleted)
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
	if diff := cmp.Diff(map[string]string{gpu0 + "-mps4-0": env(24, 20000)}, environment(t, f, c)); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}
}

// TestSharesAreTold checks that a claim's status has the limits of its MPS share.
func TestSharesAreTold(t *testing.T) {
	f := newFixture(t, 1)
	runUntilEnd(t, f.statuses.Run)
	mustPrepare(t, f, newClaim("c", asked("s", gpu0, "s1", "10Gi", "30")))
	want := fmt.Sprintf(`"device":"%s-mps","shareID":"s1","data":{"parentUUID":"%s","mps":{"threadPercentage":30,"memoryMiB":[10240]}}`, gpu0, uuidOf(0))
	if got := <-f.server.statuses; !strings.Contains(got, want) {
		t.Errorf("status %s, want in it %s", got, want)
	}
}

// TestAShareOfAllIsTheWhole checks that a claim with all memory and all
// multiprocessors of a GPU gets it without MPS, and a claim with less doesn't.
func TestAShareOfAllIsTheWhole(t *testing.T) {
	f := newFixture(t, 1)
	all := shareable(t, 0, "")
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
			if _, whole := grant.Of().(gpu.Whole); whole != tc.whole || (grant.MPS == nil) != tc.whole {
				t.Errorf("got %+v", grant)
			}
			mustPrepare(t, f, c) // the kubelet's next try
			checkHeld(t, f, "c")
			mustUnprepare(t, f, c)
			checkHeld(t, f)
		})
	}
}
