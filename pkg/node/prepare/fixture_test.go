package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
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
	holders *holders
	sharing *preparetest.Sharing
	metrics *prometheus.Registry
	changes int
	// warned and noted have the warnings and the other events, as far as there is room.
	warned, noted chan string
	// doubles are the reported double allocations, each time; doubleError is the answer.
	doubles     []prepare.DoubleAllocation
	doubleError error
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
	f := &fixture{node: node, journal: j, holders: newHolders(), sharing: preparetest.NewSharing(node, j), warned: make(chan string, 100), noted: make(chan string, 100), metrics: prometheus.NewRegistry()}
	marks := startContainers(t, node)
	node.Mark = marks.Mark
	node.Step, node.BootID, node.InUse = step, bootID, func(base gpu.Device) bool { return j.Claims().InUse(base) }
	f.Preparer = prepare.New(prepare.Config{
		Journal: j, CDI: node, Inventory: node, Partitions: node, Sharing: f.sharing, Holders: f.holders, Containers: marks,
		Driver: driver, Pool: pool, BootID: bootID,
		Registerer:        f.metrics,
		ConditionsChanged: func() { f.changes++ },
		ReportDoubleAllocation: func(_ context.Context, d prepare.DoubleAllocation) error {
			f.doubles = append(f.doubles, d)
			return f.doubleError
		},
		OnPrepared: func(c kubeletplugin.NamespacedObject, devices map[gpu.DeviceName]gpu.Prepared) {
			if f.onPrepared != nil {
				f.onPrepared(c, devices)
			}
		},
		Event: func(about corev1.ObjectReference, eventType, reason, message string) {
			to := f.warned
			if eventType == corev1.EventTypeNormal {
				to = f.noted
			}
			to <- fmt.Sprintf("%s/%s %s: %s", about.Namespace, about.Name, reason, message)
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
	for _, r := range f.journal.Claims() {
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
	for _, r := range f.journal.Claims() {
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
	daemons, intervals := preparetest.Wanted(f.journal, f.node.BootID)
	if diff := cmp.Diff(daemons, f.node.Daemons()); diff != "" {
		t.Errorf("MPS daemons (-wanted +there):\n%s", diff)
	}
	if diff := cmp.Diff(intervals, f.node.Intervals()); diff != "" {
		t.Errorf("time slices (-wanted +there):\n%s", diff)
	}
}
