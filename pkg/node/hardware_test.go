package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

var installed nodetest.Driver

func TestMain(m *testing.M) {
	os.Exit(nodetest.Run(m, "minorsMove: true\ngpus: [{model: h100-80gb, count: 2}]", func(d nodetest.Driver) { installed = d }))
}

// startHardware runs a hardware on the fake host until the test ends.
func startHardware(t *testing.T) (h *hardware, arrivals chan struct{}) {
	t.Helper()
	h, arrivals = newHardware(t)
	runHardware(t, h)
	return h, arrivals
}

func newHardware(t *testing.T) (h *hardware, arrivals chan struct{}) {
	t.Helper()
	j, err := journal.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	claims := holding.NewClaims(j)
	host := driverroot.NewHost(installed.Host)
	arrivals = make(chan struct{}, 10)
	h = &hardware{
		nodeName: "node-0", host: host, facts: facts.New("node-0"),
		partitions: partition.New(partition.Options{Journal: j, Claims: claims, BootID: "boot"}),
		sharing:    sharing.New(sharing.Options{Journal: j, Claims: claims, BootID: "boot", Daemons: nodetest.NewDaemons(host.Path("/"), "/run/mps/d")}),
		specs:      cdi.New(cdi.Config{Dir: t.TempDir(), HookPath: "/hook", Host: host}),
		conditions: func() map[gpu.UUID][]gpu.Condition { return nil },
		held:       func() []gpu.UUID { return nil },
		arrived:    func(context.Context) { arrivals <- struct{}{} },
		reread:     func(context.Context, gpu.Node) {},
		leaving:    func(context.Context) {},
		wake:       make(chan struct{}, 1), first: make(chan struct{}), opener: nvml.NewOpener(),
	}
	return h, arrivals
}

func runHardware(t *testing.T, h *hardware) {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := h.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
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
func eventually(t *testing.T, h *hardware, what string, holds func() bool) {
	t.Helper()
	for range 500 {
		if holds() {
			return
		}
		h.Wake()
		<-time.After(20 * time.Millisecond)
	}
	t.Fatalf("%s doesn't come to hold; trouble: %v", what, h.facts.Trouble())
}

func firstDevice(t *testing.T) gpu.DeviceName {
	t.Helper()
	var gpus []gpu.GPU
	for _, g := range installed.Machine.GPUs {
		gpus = append(gpus, gpu.GPU{UUID: gpu.UUID(g.UUID)})
	}
	names, err := gpu.NewNames(gpus)
	if err != nil {
		t.Fatal(err)
	}
	name, _ := names.Name(gpu.Whole{GPU: gpus[0].UUID})
	return name
}

func TestDriverComesAndGoes(t *testing.T) {
	back := moveAside(t, installed.Root)
	h, arrivals := startHardware(t)
	<-h.first
	if err := h.facts.Trouble(); err == nil || !strings.Contains(err.Error(), "/run/nvidia/driver") {
		t.Fatalf("without a driver: %v, want an error that says where it was looked for", err)
	}
	name := firstDevice(t)
	if _, _, err := h.facts.Device(name); err == nil {
		t.Error("there is a device without a driver")
	}
	back()
	eventually(t, h, "the driver's arrival", func() bool { return h.facts.Trouble() == nil })
	<-arrivals
	device, g, err := h.facts.Device(name)
	if err != nil {
		t.Fatal(err)
	}
	if g.PCIeRoot != installed.Machine.GPUs[0].PCIeRoot || g.NUMANode == nil || *g.NUMANode != installed.Machine.GPUs[0].NUMANode {
		t.Errorf("GPU is at %q, NUMA node %v; want what sysfs says, %+v", g.PCIeRoot, g.NUMANode, installed.Machine.GPUs[0])
	}
	if _, err := h.specs.Write("claim-1", map[gpu.DeviceName]gpu.Prepared{name: {Device: device}}); err != nil {
		t.Errorf("prepare: %v", err)
	}
	back = moveAside(t, installed.Root)
	eventually(t, h, "the driver's loss", func() bool { return h.facts.Trouble() != nil })
	if _, err := h.specs.Write("claim-2", map[gpu.DeviceName]gpu.Prepared{name: {Device: device}}); err == nil {
		t.Error("a claim was prepared without a driver")
	}
	back()
	eventually(t, h, "the driver's return", func() bool { return h.facts.Trouble() == nil })
	<-arrivals
}

func TestDeviceNodeComesLate(t *testing.T) {
	back := moveAside(t, filepath.Join(installed.Root, "dev/nvidia0"))
	h, _ := startHardware(t)
	name := firstDevice(t)
	missing := func() bool {
		_, g, err := h.facts.Device(name)
		return err == nil && len(g.Conditions) == 1 && g.Conditions[0].Type == gpu.DeviceNodeMissing
	}
	eventually(t, h, "the condition", missing)
	back() // seen without being woken
	for range 500 {
		if !missing() {
			return
		}
		<-time.After(10 * time.Millisecond)
	}
	t.Error("the condition stays though the node is there")
}

// hasConditions says whether the first GPU has these conditions, and no other.
func hasConditions(h *hardware, name gpu.DeviceName, want ...gpu.ConditionType) bool {
	_, g, err := h.facts.Device(name)
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
	h, _ := startHardware(t)
	<-h.first
	if name := firstDevice(t); !hasConditions(h, name) {
		_, g, err := h.facts.Device(name)
		t.Errorf("the GPU has conditions %v, error %v; want none", g.Conditions, err)
	}
}

// TestModuleIsNotLoaded: without the program, the GPU isn't offered.
func TestModuleIsNotLoaded(t *testing.T) {
	moveAside(t, filepath.Join(installed.Root, "usr/bin/nvidia-modprobe"))
	back := moveAside(t, filepath.Join(installed.Root, "dev/nvidia-uvm"))
	h, _ := startHardware(t)
	<-h.first
	name := firstDevice(t)
	if !hasConditions(h, name, gpu.DeviceNodeMissing) {
		t.Errorf("want the condition %s", gpu.DeviceNodeMissing)
	}
	if _, g, _ := h.facts.Device(name); !slices.ContainsFunc(g.Conditions, gpu.Condition.Blocks) {
		t.Error("a GPU that no program can use is offered")
	}
	back()
	eventually(t, h, "no condition", func() bool { return hasConditions(h, name) })
}

// TestCDITroubleIsNoMissingDriver: GPUs stay, with a condition, while CDI
// specifications can't be written, and it is tried again.
func TestCDITroubleIsNoMissingDriver(t *testing.T) {
	h, _ := newHardware(t)
	dir := filepath.Join(t.TempDir(), "cdi")
	h.specs = cdi.New(cdi.Config{Dir: dir, HookPath: "/hook", Host: h.host})
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // not a directory
		t.Fatal(err)
	}
	runHardware(t, h)
	<-h.first
	name := firstDevice(t)
	if err := h.facts.Trouble(); err != nil {
		t.Fatalf("the driver counts as missing: %v", err)
	}
	if !hasConditions(h, name, gpu.CDIFailed) {
		t.Errorf("want the condition %s", gpu.CDIFailed)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	eventually(t, h, "no condition", func() bool { return hasConditions(h, name) })
	if _, err := os.Stat(filepath.Join(dir, "k8s.gpu.nvidia.com-driver.json")); err != nil {
		t.Errorf("the common specification: %v", err)
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
	h, _ := newHardware(t)
	uuid := gpu.UUID(installed.Machine.GPUs[0].UUID)
	h.held = func() []gpu.UUID { return []gpu.UUID{uuid} }
	runHardware(t, h)
	<-h.first
	if _, g, err := h.facts.Device(firstDevice(t)); err == nil || !strings.Contains(err.Error(), string(gpu.Lost)) || g.UUID != uuid {
		t.Errorf("GPU %q, error %v; want %s, and that it is lost", g.UUID, err, uuid)
	}
}

// Containers are restarted without a prepare: their specs have to come back.
func TestWipedCDIDirectory(t *testing.T) {
	h, _ := newHardware(t)
	j, err := journal.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	p := &plugin{journal: j, specs: h.specs, partitions: h.partitions, preparer: prepare.New(prepare.Options{
		Journal: j, Claims: holding.NewClaims(j), CDI: h.specs, Containers: startContainers(t), Inventory: h.facts, Partitions: h.partitions, Driver: gpu.DriverName, Pool: "node-0", BootID: "boot",
	})}
	h.reread = p.mend
	runHardware(t, h)
	<-h.first
	name := firstDevice(t)
	device, _, err := h.facts.Device(name)
	if err != nil {
		t.Fatal(err)
	}
	record := holding.Record{ClaimUID: "claim-1", BootID: "boot", Holdings: []holding.Holding{{Device: name, GPU: device.Parent(), Request: "gpu"}}}
	if err := j.Put(record); err != nil {
		t.Fatal(err)
	}
	eventually(t, h, "the claim's spec", func() bool {
		specs, err := h.specs.Claims()
		return err == nil && slices.Equal(specs, []string{"claim-1"})
	})
}

// A process can't load a second NVML: it must be restarted.
func TestDriverReplaced(t *testing.T) {
	h, _ := newHardware(t)
	_, ctx := ktesting.NewTestContext(t)
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	<-h.first
	root, err := driverroot.Find(h.host, "")
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
	for range 500 {
		select {
		case err := <-done:
			if err == nil || !strings.Contains(err.Error(), "libnvidia-ml.so.999.1") {
				t.Errorf("got %v, want an error that names the other library", err)
			}
			return
		case <-time.After(20 * time.Millisecond):
			h.Wake()
		}
	}
	t.Fatal("the plugin goes on with the library of the driver before")
}
