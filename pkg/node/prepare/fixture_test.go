package prepare_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/claimstatus"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/events"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/report"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
)

const (
	driver = "gpu.nvidia.com"
	pool   = "node-0"
)

// fixture is a plugin on a node.
type fixture struct {
	*prepare.Preparer
	node       *node
	journal    *journal.Journal
	facts      *facts.Facts
	specs      *cdi.Specs
	partitions *partition.Manager
	sharing    *sharing.Manager
	server     *server
	reporter   *report.Reporter
	statuses   *claimstatus.Writer
	events     *events.Events
	written    *written
	metrics    *prometheus.Registry
}

// start starts a plugin on the node, as after a boot or a crash, without
// recovery.
func start(t testing.TB, n *node, bootID string, step func(string)) *fixture {
	t.Helper()
	j, err := journal.Open(n.journal, failpoint.Call(step))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	n.bootID, n.step = bootID, step
	f := &fixture{
		node: n, journal: j, facts: facts.New(pool), server: n.server,
		events: events.New("test", pool), written: newWritten(), metrics: prometheus.NewRegistry(),
	}
	runUntilEnd(t, func(ctx context.Context) error { return f.events.Run(ctx, f.written) })
	f.written.await(f.events)
	client, err := kubernetes.NewForConfig(n.server.config())
	if err != nil {
		t.Fatal(err)
	}
	f.statuses = claimstatus.New(client, driver, pool)
	if f.reporter, err = report.New(report.Config{NodeName: pool, REST: n.server.config(), Facts: f.facts}); err != nil {
		t.Fatal(err)
	}
	f.facts.SawNode(true, "")
	f.facts.Found(gpu.Node{Name: pool, GPUs: n.gpus})
	marks := startContainers(t, n)
	f.specs = cdi.New(cdi.Config{Dir: n.cdi, HookPath: hookPath, Host: host, Mark: marks.Mark})
	f.partitions = partition.New(partition.Config{Journal: j, Specs: f.specs, Facts: f.facts, BootID: bootID, Steps: failpoint.Call(step)})
	f.sharing = sharing.New(sharing.Config{
		Journal: j, BootID: bootID, Daemons: n.daemons, ExclusiveProcess: true, Steps: failpoint.Call(step),
	})
	runUntilEnd(t, func(ctx context.Context) error { f.sharing.Watch(ctx); return nil })
	f.Preparer = prepare.New(prepare.Config{
		Journal: j, Facts: f.facts, Containers: marks, Partitions: f.partitions, Sharing: f.sharing, Specs: f.specs,
		Events: f.events, Statuses: f.statuses, Reporter: f.reporter, Cluster: f.server, Version: f.server,
		Driver: driver, Pool: pool, BootID: bootID, Registerer: f.metrics, Steps: failpoint.Call(step),
	})
	f.partitions.SetHardware(hardware{n.sim.Session, n})
	f.sharing.SetHardware(n.sim.Session, n.smi)
	f.sharing.SetTimeSlices(nil)
	err = f.specs.SetDriver(&cdi.Driver{
		Version: installed.Machine.DriverVersion, Root: root.Path, DevRoot: root.DevRoot, ProcRoot: root.ProcRoot, GPUs: n.gpus, Session: n.sim.Session,
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// startContainers runs the Containers of a node.
func startContainers(t testing.TB, n *node) *containers.Containers {
	t.Helper()
	c, err := containers.New(n.marks, driverroot.NewHost(n.root))
	if err != nil {
		t.Fatal(err)
	}
	runUntilEnd(t, c.Run)
	return c
}

// runUntilEnd runs a part of the plugin until the test ends.
func runUntilEnd(t testing.TB, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func newFixture(t testing.TB, gpus int) *fixture {
	t.Helper()
	return start(t, newNode(t, gpus), "boot-1", nil)
}

// Prepare prepares a claim that the API server knows to be allocated.
func (f *fixture) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	f.server.allocated(c)
	devices, err := f.Preparer.Prepare(ctx, c)
	for i := range devices {
		devices[i].Metadata = nil // TestMetadata of claimstatus and kubelet checks it
	}
	return devices, err
}

// Recover makes the node agree with the journal, as when the driver has been found.
func (f *fixture) Recover(ctx context.Context) error {
	return errors.Join(f.sharing.Recover(ctx), f.partitions.Recover(ctx), f.Preparer.Recover(ctx))
}

// lose makes the plugin see that the n-th GPU fell off the bus.
func (f *fixture) lose(n int) {
	gpus := slices.Clone(f.node.gpus)
	gpus[n].Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "fell off the bus"}}
	f.facts.Found(gpu.Node{Name: pool, GPUs: gpus})
}

// findBack ends lose.
func (f *fixture) findBack() { f.facts.Found(gpu.Node{Name: pool, GPUs: f.node.gpus}) }

func testContext(t testing.TB) context.Context {
	_, ctx := ktesting.NewTestContext(t)
	return ctx
}

// result is one result of an allocation.
func result(request string, n int) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driver, Pool: pool, Device: string(gpuName(n))}
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

// ids are the CDI devices of a claim's device with this name.
func ids(c *resourceapi.ResourceClaim, name string) []string {
	return []string{"k8s.gpu.nvidia.com/claim=" + string(c.UID) + "-" + name, gpu.CDICommonKind + "=common"}
}

func device(c *resourceapi.ResourceClaim, request string, n int) kubeletplugin.Device {
	name := string(gpuName(n))
	return kubeletplugin.Device{Requests: []string{request}, PoolName: pool, DeviceName: name, CDIDeviceIDs: ids(c, name)}
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

// checkHealthy wants the doctor to find nothing but what is excepted, so no partition, MPS daemon
// or setting that no claim needs. The MIG mode of an empty GPU stays on for some seconds.
func checkHealthy(t testing.TB, n *node, except ...string) {
	t.Helper()
	r, err := n.examine()
	r.Findings = slices.DeleteFunc(r.Findings, func(f doctor.Finding) bool {
		return f.Check == "mode-on-for-nothing" || slices.Contains(except, f.Check)
	})
	if err != nil || len(r.Findings) > 0 {
		t.Errorf("the doctor finds: %+v, %v", r.Findings, err)
	}
}

// checkHeld checks the invariants, and who has something in the journal.
func checkHeld(t testing.TB, f *fixture, want ...string) {
	t.Helper()
	checkHealthy(t, f.node)
	if diff := cmp.Diff(want, f.names()); diff != "" {
		t.Errorf("prepared claims (-want +got):\n%s", diff)
	}
}

// names of the claims with a record.
func (f *fixture) names() []string {
	var names []string
	for _, r := range f.journal.Claims() {
		names = append(names, r.Name)
	}
	return names
}

// checkSpecs checks which claims have a CDI specification.
func checkSpecs(t testing.TB, f *fixture, want ...string) {
	t.Helper()
	got, err := f.specs.Claims()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("CDI specifications (-want +got):\n%s", diff)
	}
}
