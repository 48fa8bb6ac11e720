package driver

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/node/usage"
)

var installed nodetest.Driver

func TestMain(m *testing.M) {
	os.Exit(nodetest.Run(m, "minorsMove: true\ngpus: [{model: h100-80gb, count: 2}]", func(d nodetest.Driver) { installed = d }))
}

// fixture is a Follower on the fake host, whose parts have nothing to do but what a
// test prepares.
type fixture struct {
	Config
	*Follower
	dir string // of the journal
	// metrics of the parts.
	metrics *prometheus.Registry
	stop    func()
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	dir := t.TempDir()
	j, err := journal.Open(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	f := &fixture{dir: dir, metrics: prometheus.NewRegistry()}
	host, known := driverroot.NewHost(installed.Host), facts.New("node-0")
	f.Config = Config{BootID: "boot", Opener: NewOpener(host, ""), Facts: known}
	f.Specs = cdi.New(cdi.Config{Dir: t.TempDir(), HookPath: "/hook", Host: host})
	daemons := nodetest.NewDaemons(host.Path("/"), filepath.Join("/run/mps", t.Name(), "d"))
	marks, err := containers.New(t.TempDir(), host)
	if err != nil {
		t.Fatal(err)
	}
	shared := sharing.New(sharing.Config{Journal: j, BootID: "boot", Daemons: daemons})
	f.Parts = Parts{
		NodeName: "node-0", Journal: j, Partitions: partition.New(partition.Config{Journal: j, Specs: f.Specs, Facts: known, BootID: "boot"}),
		Sharing: shared,
		Health: healthmonitor.New(healthmonitor.Config{
			NodeName: "node-0", BootID: "boot", Journal: j, Facts: known, Sharing: shared, Readings: usage.NewReadings(known, marks, false), Registerer: f.metrics,
		}),
	}
	f.Preparer = prepare.New(prepare.Config{
		Journal: j, Specs: f.Specs, Containers: marks, Facts: known, Partitions: f.Partitions, Sharing: f.Sharing,
		Driver: gpu.DriverName, Pool: "node-0", BootID: "boot",
	})
	return f
}

// awaitHardware returns when the parts have a driver.
func (f *fixture) awaitHardware(t *testing.T) {
	t.Helper()
	eventually(t, f, "a driver", func() bool { return !errors.Is(f.find(t), gpu.ErrNoDriver) })
}

// find looks for a partition of the first GPU, which doesn't have it.
func (f *fixture) find(t *testing.T) error {
	_, err := f.Partitions.Find(t.Context(), gpu.Partition{GPU: gpu.UUID(installed.Machine.GPUs[0].UUID), Profile: "1g.10gb", Placement: gpu.Placement{Size: 1}})
	return err
}

// build makes the Follower.
func (f *fixture) build() {
	f.Follower = New(f.Config)
}

// start runs the Follower until stop is called, or the test ends.
func (f *fixture) start(t *testing.T) {
	t.Helper()
	f.build()
	f.run(t)
}

// run is start for a Follower that has been built.
func (f *fixture) run(t *testing.T) {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go f.Sharing.Watch(ctx)
	go func() {
		defer close(done)
		if err := f.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	f.stop = func() { cancel(); <-done }
	t.Cleanup(f.stop)
}

func startFixture(t *testing.T) *fixture {
	t.Helper()
	f := newFixture(t)
	f.start(t)
	return f
}

// moveAside renames a path of the fake host, and returns a function that
// restores it.
func moveAside(t *testing.T, path string) (back func()) {
	t.Helper()
	path = filepath.Join(installed.Host, path)
	if err := os.Rename(path, path+".aside"); err != nil {
		t.Fatal(err)
	}
	back = func() { os.Rename(path+".aside", path) }
	t.Cleanup(back)
	return back
}

// eventually wakes the hardware until the condition holds.
func eventually(t *testing.T, f *fixture, what string, holds func() bool) {
	t.Helper()
	for range 3000 {
		if holds() {
			return
		}
		f.Facts.Reread()
		<-time.After(20 * time.Millisecond)
	}
	t.Fatalf("%s doesn't come to hold; trouble: %v", what, f.Facts.Trouble())
}

func TestDriverComesAndGoes(t *testing.T) {
	back := moveAside(t, installed.Root)
	f := startFixture(t)
	<-f.Looked()
	if err := f.Facts.Trouble(); err == nil || !strings.Contains(err.Error(), "/run/nvidia/driver") {
		t.Fatalf("without a driver: %v, want an error that says where it was looked for", err)
	}
	name := installed.Names()[0]
	if _, _, err := f.Facts.Device(name); err == nil {
		t.Error("there is a device without a driver")
	}
	back()
	eventually(t, f, "the driver's arrival", func() bool { return f.Facts.Trouble() == nil })
	f.awaitHardware(t)
	device, g, err := f.Facts.Device(name)
	if err != nil {
		t.Fatal(err)
	}
	if g.PCIeRoot != installed.Machine.GPUs[0].PCIeRoot || g.NUMANode == nil || *g.NUMANode != installed.Machine.GPUs[0].NUMANode {
		t.Errorf("GPU is at %q, NUMA node %v; want what sysfs says, %+v", g.PCIeRoot, g.NUMANode, installed.Machine.GPUs[0])
	}
	if _, err := f.Specs.Write(holding.Realized{Record: holding.Record{ClaimUID: "claim-1", Holdings: []holding.Holding{holding.New(name, device)}}}); err != nil {
		t.Errorf("prepare: %v", err)
	}
	back = moveAside(t, installed.Root)
	eventually(t, f, "the driver's loss", func() bool { return f.Facts.Trouble() != nil })
	if _, err := f.Specs.Write(holding.Realized{Record: holding.Record{ClaimUID: "claim-2", Holdings: []holding.Holding{holding.New(name, device)}}}); err == nil {
		t.Error("a claim was prepared without a driver")
	}
	back()
	eventually(t, f, "the driver's return", func() bool { return f.Facts.Trouble() == nil })
	f.awaitHardware(t)
}

func TestDeviceNodeComesLate(t *testing.T) {
	back := moveAside(t, filepath.Join(installed.Root, "dev/nvidia0"))
	f := startFixture(t)
	name := installed.Names()[0]
	missing := func() bool {
		_, g, err := f.Facts.Device(name)
		return err == nil && len(g.Conditions) == 1 && g.Conditions[0].Type == gpu.DeviceNodeMissing
	}
	eventually(t, f, "the condition", missing)
	back() // seen without being woken
	for range 3000 {
		if !missing() {
			return
		}
		<-time.After(10 * time.Millisecond)
	}
	t.Error("the condition stays though the node is there")
}

// hasConditions reports whether the first GPU has these conditions, and no other.
func hasConditions(f *fixture, name gpu.DeviceName, want ...gpu.ConditionType) bool {
	_, g, err := f.Facts.Device(name)
	var have []gpu.ConditionType
	for _, c := range g.Conditions {
		have = append(have, c.Type)
	}
	return err == nil && slices.Equal(have, want)
}

// TestModuleIsLoaded: the device node of nvidia-uvm, which nothing makes at boot on
// some hosts, is made by the driver's own program.
func TestModuleIsLoaded(t *testing.T) {
	moveAside(t, filepath.Join(installed.Root, "dev/nvidia-uvm"))
	f := startFixture(t)
	<-f.Looked()
	if name := installed.Names()[0]; !hasConditions(f, name) {
		_, g, err := f.Facts.Device(name)
		t.Errorf("the GPU has conditions %v, error %v; want none", g.Conditions, err)
	}
}

// TestModuleIsNotLoaded: without the program, the GPU isn't offered.
func TestModuleIsNotLoaded(t *testing.T) {
	moveAside(t, filepath.Join(installed.Root, "usr/bin/nvidia-modprobe"))
	back := moveAside(t, filepath.Join(installed.Root, "dev/nvidia-uvm"))
	f := startFixture(t)
	<-f.Looked()
	name := installed.Names()[0]
	if !hasConditions(f, name, gpu.DeviceNodeMissing) {
		t.Errorf("want the condition %s", gpu.DeviceNodeMissing)
	}
	if _, g, _ := f.Facts.Device(name); !slices.ContainsFunc(g.Conditions, gpu.Condition.Blocks) {
		t.Error("a GPU that no program can use is offered")
	}
	back()
	eventually(t, f, "no condition", func() bool { return hasConditions(f, name) })
}

// TestCDITroubleIsNoMissingDriver: GPUs stay, with a condition, while CDI
// specifications can't be written, and it is tried again.
func TestCDITroubleIsNoMissingDriver(t *testing.T) {
	f := newFixture(t)
	dir := filepath.Join(t.TempDir(), "cdi")
	f.Specs = cdi.New(cdi.Config{Dir: dir, HookPath: "/hook", Host: f.Opener.host})
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // not a directory
		t.Fatal(err)
	}
	f.start(t)
	<-f.Looked()
	name := installed.Names()[0]
	if err := f.Facts.Trouble(); err != nil {
		t.Fatalf("the driver counts as missing: %v", err)
	}
	if !hasConditions(f, name, gpu.CDIFailed) {
		t.Errorf("want the condition %s", gpu.CDIFailed)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	eventually(t, f, "no condition", func() bool { return hasConditions(f, name) })
	if _, err := os.Stat(filepath.Join(dir, "k8s.gpu.nvidia.com-driver.json")); err != nil {
		t.Errorf("the common specification: %v", err)
	}
}

// TestCDITroubleWithoutADeviceNode: a GPU that no CDI specification is for doesn't blame CDI.
func TestCDITroubleWithoutADeviceNode(t *testing.T) {
	f := newFixture(t)
	f.build()
	f.cdiFailed = errors.New("no libcuda.so")
	n := f.withConditions(gpu.Node{GPUs: []gpu.GPU{{UUID: "GPU-1"}, {UUID: "GPU-2", Minor: gpu.NoMinor}}})
	if all := n.GPUs[0].Conditions; len(all) != 1 || all[0].Type != gpu.CDIFailed {
		t.Errorf("conditions %v, want %s", all, gpu.CDIFailed)
	}
	if all := n.GPUs[1].Conditions; len(all) != 0 {
		t.Errorf("conditions %v of a GPU without a device node, want none", all)
	}
}

// TestGPUIsLostBeforeTheDriverIsOpened: the GPU that a claim's record names is
// reported as lost.
func TestGPUIsLostBeforeTheDriverIsOpened(t *testing.T) {
	machine, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	defer machine.Close()
	if err := machine.Lose(0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := machine.Reboot(); err != nil {
			t.Error(err)
		}
	})
	f := newFixture(t)
	uuid := gpu.UUID(installed.Machine.GPUs[0].UUID)
	if err := f.Journal.Put(holding.Record{ClaimUID: "claim-1", Holdings: []holding.Holding{{GPU: uuid}}}); err != nil {
		t.Fatal(err)
	}
	f.start(t)
	<-f.Looked()
	if _, g, err := f.Facts.Device(installed.Names()[0]); err == nil || !strings.Contains(err.Error(), string(gpu.Lost)) || g.UUID != uuid {
		t.Errorf("GPU %q, error %v; want %s, and that it is lost", g.UUID, err, uuid)
	}
}

// Containers are restarted without a prepare: their specs have to come back.
func TestWipedCDIDirectory(t *testing.T) {
	f := newFixture(t)
	f.start(t)
	<-f.Looked()
	name := installed.Names()[0]
	device, _, err := f.Facts.Device(name)
	if err != nil {
		t.Fatal(err)
	}
	record := holding.Record{ClaimUID: "claim-1", BootID: "boot", Holdings: []holding.Holding{{Device: name, GPU: device.Parent(), Request: "gpu"}}}
	if err := f.Journal.Put(record); err != nil {
		t.Fatal(err)
	}
	eventually(t, f, "the claim's spec", func() bool {
		specs, err := f.Specs.Claims()
		return err == nil && slices.Equal(specs, []string{"claim-1"})
	})
}

// A process can't load a second NVML: it must be restarted.
func TestDriverReplaced(t *testing.T) {
	f := newFixture(t)
	_, ctx := ktesting.NewTestContext(t)
	done := make(chan error, 1)
	f.build()
	go func() { done <- f.Run(ctx) }()
	<-f.Looked()
	root, err := f.Opener.find()
	if err != nil {
		t.Fatal(err)
	}
	library := filepath.Join(installed.Host, root.Library)
	link := filepath.Join(filepath.Dir(library), "libnvidia-ml.so.1")
	move := func(from, to string) error {
		return errors.Join(os.Rename(from, to), os.Remove(link), os.Symlink(filepath.Base(to), link))
	}
	newer := filepath.Join(filepath.Dir(library), "libnvidia-ml.so.999.1")
	if err := move(library, newer); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := move(newer, library); err != nil {
			t.Error(err)
		}
	})
	for range 3000 {
		select {
		case err := <-done:
			if err == nil || !strings.Contains(err.Error(), "libnvidia-ml.so.999.1") {
				t.Errorf("got %v, want an error that names the other library", err)
			}
			return
		case <-time.After(20 * time.Millisecond):
			f.Facts.Reread()
		}
	}
	t.Fatal("the plugin goes on with the library of the driver before")
}

// saw makes GPUs those of the last reading of the plugin before.
func (f *fixture) saw(t *testing.T, bootID string, gpus ...gpu.GPU) {
	t.Helper()
	if err := f.Journal.PutSeen(holding.Seen{BootID: bootID, GPUs: gpus}); err != nil {
		t.Fatal(err)
	}
}

// readAgain returns when the hardware was read again.
func (f *fixture) readAgain(t *testing.T) {
	t.Helper()
	_, changed := f.Facts.State()
	f.Facts.Reread()
	<-changed
	f.Facts.Reread()
	_, changed = f.Facts.State()
	<-changed // the reading before has ended
}

// reopenJournal reads the journal as the next plugin does.
func (f *fixture) reopenJournal(t *testing.T) *journal.Journal {
	t.Helper()
	if err := f.Journal.Close(); err != nil {
		t.Fatal(err)
	}
	j, err := journal.Open(f.dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	f.Journal = j
	return j
}
