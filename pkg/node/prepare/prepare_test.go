package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/prepare/preparetest"
)

const (
	driver = "gpu.nvidia.com"
	pool   = "node-a"
)

// holders answers as a cluster would: by claim UID, or that it can't be told.
type holders struct {
	mu       sync.Mutex
	standing map[types.UID]prepare.Standing
	asked    chan types.UID // one for each question, as far as there is room
}

func newHolders() *holders {
	return &holders{standing: map[types.UID]prepare.Standing{}, asked: make(chan types.UID, 100)}
}

func (h *holders) set(uid types.UID, s prepare.Standing) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.standing[uid] = s
}

func (h *holders) Look(_ context.Context, holder prepare.Holder) (prepare.Standing, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case h.asked <- holder.UID:
	default:
	}
	s, ok := h.standing[holder.UID]
	if !ok {
		return s, errors.New("connection refused")
	}
	return s, nil
}

// fixture is a plugin on a node.
type fixture struct {
	*prepare.Preparer
	node    *preparetest.Node
	journal *journal.Journal
	claims  *holding.Claims
	holders *holders
	sharing *preparetest.Sharing
	changes int
	warned  chan string // the warnings, as far as there is room
	// onPrepared, which may be nil, is the plugin's OnPrepared.
	onPrepared func(kubeletplugin.NamespacedObject, map[gpu.DeviceName]gpu.Prepared)
}

// start starts a plugin on the node, as after a boot or a crash, without
// recovery.
func start(t testing.TB, node *preparetest.Node, bootID string, step func(string)) *fixture {
	t.Helper()
	j, err := journal.Open(node.Journal, step)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	claims := holding.NewClaims(j)
	f := &fixture{node: node, journal: j, claims: claims, holders: newHolders(), sharing: preparetest.NewSharing(node, j, claims), warned: make(chan string, 100)}
	marks := startContainers(t, node)
	node.Mark = marks.Mark
	node.Step, node.BootID, node.InUse = step, bootID, claims.InUse
	f.Preparer = prepare.New(prepare.Config{
		Journal: j, Claims: claims, CDI: node, Inventory: node, Partitions: node, Sharing: f.sharing, Holders: f.holders, Containers: marks,
		Driver: driver, Pool: pool, BootID: bootID,
		Registerer:        prometheus.NewRegistry(),
		ConditionsChanged: func() { f.changes++ },
		OnPrepared: func(c kubeletplugin.NamespacedObject, devices map[gpu.DeviceName]gpu.Prepared) {
			if f.onPrepared != nil {
				f.onPrepared(c, devices)
			}
		},
		Warn: func(c kubeletplugin.NamespacedObject, reason, message string) {
			f.warned <- fmt.Sprintf("%s %s: %s", c.NamespacedName, reason, message)
		},
		Step: step,
	})
	return f
}

// startContainers runs the Containers of a node.
func startContainers(t testing.TB, node *preparetest.Node) *containers.Containers {
	t.Helper()
	c, err := containers.New(node.Marks, func(path string) string { return filepath.Join(node.Root, path) })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return c
}

func newNode(t testing.TB, gpus int) *preparetest.Node {
	t.Helper()
	node, err := preparetest.NewNode(t.TempDir(), gpus)
	if err != nil {
		t.Fatal(err)
	}
	return node
}

func newFixture(t testing.TB, gpus int) *fixture {
	t.Helper()
	return start(t, newNode(t, gpus), "boot-1", nil)
}

func testContext(t testing.TB) context.Context {
	_, ctx := ktesting.NewTestContext(t)
	return ctx
}

// result is one result of an allocation.
func result(request string, n int) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driver, Pool: pool, Device: string(preparetest.Device(n))}
}

func adminResult(request string, n int) resourceapi.DeviceRequestAllocationResult {
	r := result(request, n)
	r.AdminAccess = new(true)
	return r
}

// newClaim is a claim whose UID is its name.
func newClaim(name string, results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}},
		},
	}
}

func named(c *resourceapi.ResourceClaim) kubeletplugin.NamespacedObject {
	return kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}, UID: c.UID}
}

func device(c *resourceapi.ResourceClaim, request string, n int) kubeletplugin.Device {
	name := string(preparetest.Device(n))
	return kubeletplugin.Device{
		Requests: []string{request}, PoolName: pool, DeviceName: name,
		CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=" + string(c.UID) + "-" + name},
	}
}

func mustPrepare(t testing.TB, f *fixture, c *resourceapi.ResourceClaim) []kubeletplugin.Device {
	t.Helper()
	devices, err := f.Prepare(testContext(t), c)
	if err != nil {
		t.Fatalf("prepare %s: %v", c.Name, err)
	}
	return devices
}

func mustUnprepare(t testing.TB, f *fixture, c *resourceapi.ResourceClaim) {
	t.Helper()
	if err := f.Unprepare(testContext(t), named(c)); err != nil {
		t.Fatalf("unprepare %s: %v", c.Name, err)
	}
}

// checkHealthy wants the doctor to find nothing.
func checkHealthy(t testing.TB, n *preparetest.Node) {
	t.Helper()
	r, err := doctor.Check(n.Node)
	if err != nil || len(r.Findings) > 0 {
		t.Errorf("the doctor finds: %+v, %v", r.Findings, err)
	}
}

// checkHeld checks the invariants, and who has something in the journal.
func checkHeld(t testing.TB, f *fixture, want ...string) {
	t.Helper()
	checkHealthy(t, f.node)
	var got []string
	for _, r := range f.journal.All() {
		got = append(got, r.Name)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("prepared claims (-want +got):\n%s", diff)
	}
	checkPartitions(t, f)
}

// checkPartitions checks that the partitions, MPS daemons and time slices there
// are, and no others, are held by claims that were prepared in this boot.
func checkPartitions(t testing.TB, f *fixture) {
	t.Helper()
	held := []gpu.Partition{}
	for _, r := range f.journal.All() {
		for _, g := range r.Holdings {
			if p, ok := g.Base().(gpu.Partition); ok && !g.Admin && r.BootID == f.node.BootID && !slices.Contains(held, p) {
				held = append(held, p)
			}
		}
	}
	preparetest.SortPartitions(held)
	if diff := cmp.Diff(held, f.node.Instances()); diff != "" {
		t.Errorf("partitions (-held +there):\n%s", diff)
	}
	daemons, intervals := preparetest.Wanted(f.journal, f.claims, f.node.BootID)
	if diff := cmp.Diff(daemons, f.node.Daemons()); diff != "" {
		t.Errorf("MPS daemons (-wanted +there):\n%s", diff)
	}
	if diff := cmp.Diff(intervals, f.node.Intervals()); diff != "" {
		t.Errorf("time slices (-wanted +there):\n%s", diff)
	}
}

func TestPrepare(t *testing.T) {
	for name, results := range map[string][]resourceapi.DeviceRequestAllocationResult{
		"one GPU":                  {result("gpu", 0)},
		"allocationMode All":       {result("all", 0), result("all", 1), result("all", 2), result("all", 3)},
		"several requests":         {result("big", 3), result("small", 1)},
		"firstAvailable":           {result("gpu/cheap", 2)},
		"admin access":             {adminResult("look", 0), adminResult("look", 1)},
		"admin access to its own":  {result("gpu", 0), adminResult("look", 0)},
		"with another driver's":    {result("gpu", 0), {Request: "nic", Driver: "nic.example.com", Pool: pool, Device: "eth0"}},
		"with another node's pool": {result("gpu", 0), {Request: "far", Driver: driver, Pool: "node-b", Device: "gpu-00000000"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 4)
			c := newClaim("training", results...)
			var want []kubeletplugin.Device
			for _, r := range results {
				for n := range 4 {
					if r.Pool == pool && r.Device == string(preparetest.Device(n)) {
						want = append(want, device(c, r.Request, n))
					}
				}
			}
			for range 2 { // twice: pods share claims, kubelets restart
				if diff := cmp.Diff(want, mustPrepare(t, f, c)); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
				checkHeld(t, f, "training")
			}
			for range 2 {
				mustUnprepare(t, f, c)
				checkHeld(t, f)
			}
		})
	}
}

func TestPrepareRefuses(t *testing.T) {
	withConfig := newClaim("c", result("gpu", 0))
	withConfig.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{
			Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driver},
		},
	}}
	withConfig.Status.Allocation.Devices.Config[0].Opaque.Parameters.Raw = []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"NoSuchConfig"}`)
	for name, tc := range map[string]struct {
		claim *resourceapi.ResourceClaim
		is    error
		says  string
	}{
		"a GPU that isn't there":  {newClaim("c", result("gpu", 0), result("gpu", 7)), nil, `request "gpu" was given device "gpu-980fb007"`},
		"a lost GPU":              {newClaim("c", result("gpu", 1)), nil, "lost"},
		"a missing device node":   {newClaim("c", result("gpu", 0), result("gpu", 2)), os.ErrNotExist, "/dev/nvidia2"},
		"a config it can't read":  {withConfig, claim.ErrPermanent, `request "gpu"`},
		"a claim that isn't ours": {newClaim("c"), nil, "no device of driver"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 3)
			f.node.Lose(preparetest.UUID(1))
			if err := os.Remove(f.node.DeviceNode(2)); err != nil {
				t.Fatal(err)
			}
			_, err := f.Prepare(testContext(t), tc.claim)
			if err == nil || !strings.Contains(err.Error(), tc.says) || (tc.is != nil && !errors.Is(err, tc.is)) {
				t.Errorf("got %v, want an error that is %v and says %q", err, tc.is, tc.says)
			}
			checkHeld(t, f)
		})
	}
}

func TestPrepareSucceedsByItselfOnceTheDeviceNodeIsThere(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("training", result("gpu", 0))
	if err := os.Remove(f.node.DeviceNode(0)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Prepare(testContext(t), c); err == nil {
		t.Fatal("prepared without a device node")
	}
	if err := os.WriteFile(f.node.DeviceNode(0), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	mustPrepare(t, f, c)
	checkHeld(t, f, "training")
}

func TestAdminAccessNeitherHoldsNorWaits(t *testing.T) {
	f := newFixture(t, 1)
	user, admin, other := newClaim("user", result("gpu", 0)), newClaim("admin", adminResult("look", 0)), newClaim("other", result("gpu", 0))
	mustPrepare(t, f, user)
	mustPrepare(t, f, admin)
	checkHeld(t, f, "admin", "user")
	mustUnprepare(t, f, user)
	mustPrepare(t, f, other)
	checkHeld(t, f, "admin", "other")
}

func TestPreparedAnewWithOtherDevices(t *testing.T) {
	old, anew := newClaim("c", result("gpu", 0)), newClaim("c", result("gpu", 1))
	t.Run("in the same boot a container may still use the old ones", func(t *testing.T) {
		f := newFixture(t, 2)
		mustPrepare(t, f, old)
		if _, err := f.Prepare(testContext(t), anew); err == nil || !strings.Contains(err.Error(), "allocated again") {
			t.Errorf("got %v, want a refusal", err)
		}
		mustUnprepare(t, f, old)
		mustPrepare(t, f, anew)
		checkHeld(t, f, "c")
	})
	t.Run("after a reboot nothing does", func(t *testing.T) {
		f := newFixture(t, 2)
		mustPrepare(t, f, old)
		f.journal.Close()
		f = start(t, f.node, "boot-2", nil)
		mustPrepare(t, f, anew)
		checkHeld(t, f, "c")
	})
}

func TestFullDisk(t *testing.T) {
	node := newNode(t, 2)
	if err := unix.Mount("tmpfs", node.Journal, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatalf("mount a small tmpfs (run the tests as root): %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(node.Journal, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	f := start(t, node, "boot-1", nil)
	before, c := newClaim("before", result("gpu", 0)), newClaim("training", result("gpu", 1))
	mustPrepare(t, f, before)
	fill := filepath.Join(node.Journal, "fill")
	if err := os.WriteFile(fill, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("filling the disk: got %v, want ENOSPC", err)
	}
	if _, err := f.Prepare(testContext(t), c); !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), node.Journal) {
		t.Errorf("got %v, want ENOSPC naming the directory", err)
	}
	mustPrepare(t, f, before)
	checkHeld(t, f, "before")
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	mustPrepare(t, f, c)
	checkHeld(t, f, "before", "training")
}

func TestRecover(t *testing.T) {
	f := newFixture(t, 3)
	for n := range 3 {
		mustPrepare(t, f, newClaim(fmt.Sprintf("claim-%d", n), result("gpu", n)))
	}
	if err := os.RemoveAll(f.node.CDI); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(f.node.CDI, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := f.node.Write("orphan", map[gpu.DeviceName]gpu.Prepared{preparetest.Device(0): {Device: gpu.Whole{GPU: preparetest.UUID(0)}}}); err != nil {
		t.Fatal(err)
	}
	f.journal.Close()
	f.node.Lose(preparetest.UUID(1))
	f = start(t, f.node, "boot-2", nil)
	err := f.Recover(testContext(t))
	if err == nil || !strings.Contains(err.Error(), "default/claim-1") || strings.Contains(err.Error(), "claim-2") {
		t.Errorf("got %v, want an error about claim-1 alone", err)
	}
	specs, err := f.node.Claims()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"claim-0", "claim-2"}, specs); diff != "" {
		t.Errorf("specs (-want +got):\n%s", diff)
	}
	if got := len(f.journal.All()); got != 3 {
		t.Errorf("%d records, want all 3", got)
	}
	mustUnprepare(t, f, newClaim("claim-1"))
	checkHeld(t, f, "claim-0", "claim-2")
}

func TestUnreadableRecord(t *testing.T) {
	// broken is a node where claim "broken" has GPU 0 and a damaged record.
	broken := func(t *testing.T) *fixture {
		f := newFixture(t, 2)
		mustPrepare(t, f, newClaim("broken", result("gpu", 0)))
		f.journal.Close()
		path := filepath.Join(f.node.Journal, "broken.json")
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data[:len(data)-4], 0o600); err != nil {
			t.Fatal(err)
		}
		f = start(t, f.node, "boot-1", nil)
		if err := f.Recover(testContext(t)); err != nil {
			t.Errorf("recover: %v", err)
		}
		return f
	}
	t.Run("is a condition of its GPU and keeps its spec", func(t *testing.T) {
		f := broken(t)
		got := f.Conditions()
		if len(got) != 1 || len(got[preparetest.UUID(0)]) != 1 || got[preparetest.UUID(0)][0].Type != gpu.StateUnreadable {
			t.Errorf("conditions: got %v, want GPU 0 StateUnreadable", got)
		}
		specs, err := f.node.Claims()
		if err != nil || !cmp.Equal(specs, []string{"broken"}) {
			t.Errorf("specs: got %v, %v, want broken's", specs, err)
		}
		mustPrepare(t, f, newClaim("elsewhere", result("gpu", 1)))
		f.holders.set("broken", prepare.Standing{Reason: "pod default/trainer uses it"})
		if _, err := f.Prepare(testContext(t), newClaim("thief", result("gpu", 0))); !errors.Is(err, prepare.ErrHeld) {
			t.Errorf("another claim: got %v, want ErrHeld", err)
		}
	})
	t.Run("is mended by a prepare", func(t *testing.T) {
		f := broken(t)
		mustPrepare(t, f, newClaim("broken", result("gpu", 0)))
		checkHeld(t, f, "broken")
		if len(f.Conditions()) != 0 || f.changes != 1 {
			t.Errorf("conditions: got %v after %d changes, want none after 1", f.Conditions(), f.changes)
		}
	})
	t.Run("holds on when a prepare fails", func(t *testing.T) {
		f := broken(t)
		node := f.node.DeviceNode(0)
		if err := os.Rename(node, node+".aside"); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Prepare(testContext(t), newClaim("broken", result("gpu", 0))); err == nil {
			t.Error("prepared without a device node")
		}
		if err := os.Rename(node+".aside", node); err != nil {
			t.Fatal(err)
		}
		checkHeld(t, f, "broken")
	})
	t.Run("is settled by an unprepare", func(t *testing.T) {
		f := broken(t)
		mustUnprepare(t, f, newClaim("broken"))
		checkHeld(t, f)
		if len(f.Conditions()) != 0 || f.changes != 1 {
			t.Errorf("conditions: got %v after %d changes, want none after 1", f.Conditions(), f.changes)
		}
	})
}

func BenchmarkPrepare(b *testing.B) {
	for _, before := range []int{0, 112} {
		b.Run(fmt.Sprintf("prepared=%d", before), func(b *testing.B) {
			f := newFixture(b, before+1)
			for n := range before {
				mustPrepare(b, f, newClaim(fmt.Sprintf("claim-%d", n), result("gpu", n)))
			}
			c := newClaim("training", result("gpu", before))
			for b.Loop() {
				mustPrepare(b, f, c)
				b.StopTimer()
				mustUnprepare(b, f, c)
				b.StartTimer()
			}
		})
	}
}

func BenchmarkPrepareEightAtOnce(b *testing.B) {
	f, ctx := newFixture(b, 8), testContext(b)
	for b.Loop() {
		var wg sync.WaitGroup
		for n := range 8 {
			c := newClaim(fmt.Sprintf("claim-%d", n), result("gpu", n))
			wg.Go(func() {
				if _, err := f.Prepare(ctx, c); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
		b.StopTimer()
		for n := range 8 {
			mustUnprepare(b, f, newClaim(fmt.Sprintf("claim-%d", n)))
		}
		b.StartTimer()
	}
}

func BenchmarkUnprepare(b *testing.B) {
	f := newFixture(b, 1)
	c := newClaim("training", result("gpu", 0))
	for b.Loop() {
		b.StopTimer()
		mustPrepare(b, f, c)
		b.StartTimer()
		mustUnprepare(b, f, c)
	}
}
