package node

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/node/usage"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

var installed nodetest.Driver

func TestMain(m *testing.M) {
	os.Exit(nodetest.Run(m, "minorsMove: true\ngpus: [{model: h100-80gb, count: 2}]", func(d nodetest.Driver) { installed = d }))
}

// divided is a plugin without a kubelet and an API server, on the fake host.
type divided struct {
	*hardwareParts
	ctx      context.Context
	host     driverroot.Host
	follower *driver.Follower
	facts    *facts.Facts
	specs    *cdi.Specs
	daemons  *nodetest.Daemons
	// dir and cdi are the journal's and the CDI directory.
	dir, cdi string
	health   *healthmonitor.Monitor
}

// hardwareParts are the parts of a plugin that use the hardware.
type hardwareParts struct {
	journal    *journal.Journal
	partitions *partition.Manager
	sharing    *sharing.Manager
	preparer   *prepare.Preparer
}

// parts of them as the driver has them.
func (p *hardwareParts) parts() *driver.Parts {
	return &driver.Parts{NodeName: "node-0", Journal: p.journal, Partitions: p.partitions, Sharing: p.sharing, Preparer: p.preparer}
}

// patience bounds the wait of a prepare for its devices. It is for machines so busy
// that the kubelet would have to try again.
const patience = 10 * time.Minute

// startDivided runs the plugin's parts that have to do with hardware. end ends
// them and returns when they have.
func startDivided(t *testing.T) (d *divided, end func()) {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancelAll := context.WithTimeout(ctx, patience)
	t.Cleanup(cancelAll)
	host := driverroot.NewHost(installed.Host)
	d = &divided{
		ctx: ctx, host: host, facts: facts.New("node-0"), dir: t.TempDir(), cdi: t.TempDir(),
		daemons: nodetest.NewDaemons(host.Path("/"), filepath.Join("/run/mps", t.Name(), "d")),
	}
	d.facts.SawNode(true, "")
	j, err := journal.Open(d.dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	d.specs = cdi.New(cdi.Config{Dir: d.cdi, HookPath: "/hook", Host: host})
	parts := &hardwareParts{
		journal: j, partitions: partition.New(partition.Config{Journal: j, Specs: d.specs, Facts: d.facts, BootID: "boot"}),
		sharing: sharing.New(sharing.Config{Journal: j, BootID: "boot", Daemons: d.daemons, ExclusiveProcess: true}),
	}
	marks := startContainers(t)
	w, err := newWriters(d.facts)
	if err != nil {
		t.Fatal(err)
	}
	parts.preparer = prepare.New(prepare.Config{
		Journal: j, Facts: d.facts, Containers: marks, Partitions: parts.partitions, Sharing: parts.sharing, Specs: d.specs,
		Events: w.events, Statuses: w.statuses, Reporter: w.reporter, Cluster: claimReader(deletedClaims), Version: claimReader(deletedClaims),
		Driver: gpu.DriverName, Pool: "node-0", BootID: "boot",
	})
	d.health = healthmonitor.New(healthmonitor.Config{
		NodeName: "node-0", BootID: "boot", Journal: j, Facts: d.facts, Containers: marks, Preparer: parts.preparer, Sharing: parts.sharing,
		Readings: usage.NewReadings(d.facts, marks, false), Events: noEvents{},
	})
	d.hardwareParts = parts
	all := parts.parts()
	all.Health = d.health
	follower := driver.New(driver.Config{Parts: *all, BootID: "boot", Opener: driver.NewOpener(host, ""), Specs: d.specs, Facts: d.facts})
	d.follower = follower
	running, cancel := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	tasks.Go(func() {
		if err := follower.Run(running); err != nil {
			t.Error(err)
		}
	})
	tasks.Go(func() { w.run(running) })
	tasks.Go(func() { d.partitions.Run(running) })
	tasks.Go(func() { d.sharing.Run(running) })
	end = sync.OnceFunc(func() { cancel(); tasks.Wait() })
	t.Cleanup(end)
	<-follower.Looked()
	return d, end
}

// awaitReading returns after the next reading of the hardware, as by the event of a change.
func (d *divided) awaitReading() {
	_, changed := d.facts.State()
	<-changed
}

// eventually wakes the driver until the condition holds.
func (d *divided) eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for range 3000 {
		if holds() {
			return
		}
		d.facts.Reread()
		<-time.After(20 * time.Millisecond)
	}
	t.Fatalf("%s doesn't come to hold; trouble: %v", what, d.facts.Trouble())
}

// claim of devices, whose UID is its name.
func claimOf(name string, devices ...gpu.DeviceName) *resourceapi.ResourceClaim {
	var results []resourceapi.DeviceRequestAllocationResult
	for _, d := range devices {
		results = append(results, resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: gpu.DriverName, Pool: "node-0", Device: string(d)})
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: results},
		}},
	}
}

func (d *divided) unprepare(c *resourceapi.ResourceClaim) error {
	return d.preparer.Unprepare(d.ctx, kubeletplugin.NamespacedObject{UID: c.UID})
}

// another is a session with the hardware as another program has one.
func (d *divided) another(t *testing.T) (driverroot.Root, *nvml.Session) {
	t.Helper()
	root, session, err := driver.Open(d.host, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	return root, session
}

// checkWithDoctor wants no finding, leftovers included.
func (d *divided) checkWithDoctor(t *testing.T) {
	t.Helper()
	root, session := d.another(t)
	hw, err := doctor.ReadHardware(d.ctx, session, sharing.SMI(driver.SMI(d.host, root)))
	if err != nil {
		t.Fatal(err)
	}
	listed, away := d.daemons.List(d.ctx)
	r, err := doctor.Check(doctor.Node{
		Journal: d.dir, CDI: d.cdi, Host: d.host, BootID: "boot", Hardware: hw,
		Capabilities: filepath.Join(root.ProcRoot, "proc/driver/nvidia/capabilities"),
		Sharing:      doctor.SharingOf(listed, away, mps.RunDir(filepath.Join(d.daemons.Host, filepath.Dir(d.daemons.Dir)))),
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range r.Findings {
		if f.Check != "cdi-path-missing" { // the hook, which no test installs
			t.Errorf("the doctor finds %+v", f)
		}
	}
}

// A partition for a claim is made and destroyed, the facts tell nothing of it,
// and a plugin that ends leaves the GPU as it was.
func TestPartitionOnDemand(t *testing.T) {
	d, end := startDivided(t)
	name := installed.Names()[0]
	before := d.gpu(t, name)
	c := claimOf("training", name+"-mig-3g40gb-4")
	if _, err := d.preparer.Prepare(d.ctx, c); err != nil {
		t.Fatal(err)
	}
	d.awaitReading()
	if diff := cmp.Diff(before, d.gpu(t, name)); diff != "" {
		t.Errorf("facts changed with a claim (-before +now):\n%s", diff)
	}
	d.checkWithDoctor(t)
	if err := d.unprepare(c); err != nil {
		t.Fatal(err)
	}
	end()
	d.checkWithDoctor(t)
	machine, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	if err := machine.Init(); err != nil {
		t.Fatal(err)
	}
	if on, _, err := machine.GPUs()[0].MIGMode(); err != nil || on {
		t.Errorf("MIG mode is %v, %v after the plugin has ended", on, err)
	}
}

// TestMinorThatCannotBeRead checks that a claim gets the device node that its GPU
// has since its MIG mode was switched, or none, when the node's number can't be
// read at first.
func TestMinorThatCannotBeRead(t *testing.T) {
	d, _ := startDivided(t)
	name := installed.Names()[0]
	machine, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { machine.Close() })
	if err := machine.Init(); err != nil {
		t.Fatal(err)
	}
	if err := machine.Fault(nvmlsim.Fault{Call: "DeviceGetMinorNumber", GPU: 0, Code: nvmlsim.Unknown}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := machine.ClearFaults(); err != nil {
			t.Error(err)
		}
	})
	c := claimOf("training", name+"-mig-3g40gb-4")
	if _, err := d.preparer.Prepare(d.ctx, c); err == nil {
		t.Fatal("a claim was prepared while the GPU's device node was unknown")
	}
	if err := machine.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	d.eventually(t, "the prepare", func() bool {
		_, err := d.preparer.Prepare(d.ctx, c)
		return err == nil
	})
	minor, err := machine.GPUs()[0].MinorNumber()
	if err != nil {
		t.Fatal(err)
	}
	spec, err := os.ReadFile(filepath.Join(d.cdi, "k8s.gpu.nvidia.com-claim_training.json"))
	if err != nil {
		t.Fatal(err)
	}
	if node := fmt.Sprintf(`"/dev/nvidia%d"`, minor); !strings.Contains(string(spec), node) {
		t.Errorf("the claim's spec doesn't have %s:\n%s", node, spec)
	}
	d.checkWithDoctor(t)
	if err := d.unprepare(c); err != nil {
		t.Error(err)
	}
}

// A destroyed partition of a prepared claim is created again soon, because the
// kubelet restarts containers without preparing their claims again.
func TestPartitionIsDestroyedFromOutside(t *testing.T) {
	d, _ := startDivided(t)
	c := claimOf("training", installed.Names()[0]+"-mig-3g40gb-0", installed.Names()[0]+"-mig-3g40gb-4")
	if _, err := d.preparer.Prepare(d.ctx, c); err != nil {
		t.Fatal(err)
	}
	_, session := d.another(t)
	uuid := gpu.UUID(installed.Machine.GPUs[0].UUID)
	before, err := session.MIG(uuid)
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range before.Instances {
		if err := session.DestroyInstance(uuid, i); err != nil {
			t.Fatal(err)
		}
	}
	for now := (gpu.MIG{}); len(now.Instances) < 2; {
		d.awaitReading() // by the events of the destruction
		if now, err = session.MIG(uuid); err != nil {
			t.Fatal(err)
		}
	}
	d.checkWithDoctor(t)
	if err := d.unprepare(c); err != nil {
		t.Error(err)
	}
}

func (d *divided) gpu(t *testing.T, name gpu.DeviceName) gpu.GPU {
	t.Helper()
	_, g, err := d.facts.Device(name)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// TestPartitionsOfManyClaims has claims for parts of GPUs and for whole ones come
// and go at once, each waiting for those it overlaps with. It seeds itself and
// says how.
func TestPartitionsOfManyClaims(t *testing.T) {
	d, end := startDivided(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var wg sync.WaitGroup
	for n := range 8 {
		random := rand.New(rand.NewPCG(seed, uint64(n)))
		wg.Go(func() {
			for i := range 6 {
				one := installed.Names()[random.IntN(2)]
				devices := [][]gpu.DeviceName{
					{one}, {one + "-mig-3g40gb-0"}, {one + "-mig-3g40gb-4"}, {one + "-mig-7g80gb-0"},
					{one + gpu.DeviceName(fmt.Sprintf("-mig-1g10gb-%d", n%6)), installed.Names()[0] + "-mig-1g10gbme-6"},
				}[random.IntN(5)]
				slices.Sort(devices)
				c := claimOf(fmt.Sprintf("claim-%d-%d", n, i), slices.Compact(devices)...)
				if _, err := d.preparer.Prepare(d.ctx, c); err != nil {
					t.Errorf("prepare %v: %v", devices, err)
				}
				if err := d.unprepare(c); err != nil {
					t.Errorf("unprepare %v: %v", devices, err)
				}
			}
		})
	}
	wg.Wait()
	end()
	d.checkWithDoctor(t)
}

// TestFillAGPU has seven claims share one GPU, and an eighth take it whole when
// they have gone.
func TestFillAGPU(t *testing.T) {
	d, end := startDivided(t)
	one := installed.Names()[0]
	var claims []*resourceapi.ResourceClaim
	for n := range 7 {
		claims = append(claims, claimOf(fmt.Sprintf("part-%d", n), one+gpu.DeviceName(fmt.Sprintf("-mig-1g10gb-%d", n))))
	}
	var wg sync.WaitGroup
	start := time.Now()
	for _, c := range claims {
		wg.Go(func() {
			if _, err := d.preparer.Prepare(d.ctx, c); err != nil {
				t.Errorf("prepare %s: %v", c.Name, err)
			}
		})
	}
	wg.Wait()
	t.Logf("seven partitions of one GPU in %v", time.Since(start))
	d.checkWithDoctor(t)
	whole := claimOf("whole", one)
	prepared := make(chan error, 1)
	go func() {
		_, err := d.preparer.Prepare(d.ctx, whole)
		prepared <- err
	}()
	for _, c := range claims {
		if err := d.unprepare(c); err != nil {
			t.Errorf("unprepare %s: %v", c.Name, err)
		}
	}
	if err := <-prepared; err != nil {
		t.Errorf("prepare the whole GPU: %v", err)
	}
	d.checkWithDoctor(t)
	if err := d.unprepare(whole); err != nil {
		t.Error(err)
	}
	end()
	d.checkWithDoctor(t)
}
