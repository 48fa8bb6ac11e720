package preparetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
)

const (
	claimKind   = "k8s.gpu.nvidia.com/claim"
	claimPrefix = "k8s.gpu.nvidia.com-claim_"
)

// Node is a node with GPUs, without a driver: its device nodes are plain files
// under Root, its CDI specs, in CDI, have device nodes only, and its MIG
// partitions are there as long as the node isn't booted. It implements
// prepare.CDI, prepare.Inventory and prepare.Partitions.
type Node struct {
	// Node is where its state is, for the doctor, without hardware.
	doctor.Node
	// Root is the node's root directory: where the paths in CDI specs are.
	Root string
	// Marks is the directory of the claims' marks.
	Marks string
	// Mark creates a claim's mark (containers.Containers); nil for none.
	Mark func(claimUID string) (hostPath, containerPath string, err error)
	// Step, which may be nil, is called after each step of a change to the CDI
	// directory or to the partitions, outside of all locks.
	Step func(string)
	// Working, which may be nil, is called before a partition is made or given up;
	// an error is the hardware's answer.
	Working func(ctx context.Context, p gpu.Partition) error
	// InUse, which may be nil, reports whether a claim uses a partition, which isn't
	// released then (holding.Claims.InUse).
	InUse func(gpu.Device) bool

	names   *gpu.Names
	indexes map[gpu.UUID]int
	gpus    []gpu.GPU

	mu        sync.Mutex
	other     error // another driver that serves the GPUs
	lost      map[gpu.UUID]bool
	instances map[gpu.Partition]gpu.Instance
	made      int // partitions ever, for ids that differ
	daemons   map[string]Daemon
	intervals map[gpu.UUID]string // time slices that were set
}

// UUID is that of the node's n-th GPU.
func UUID(n int) gpu.UUID {
	return gpu.UUID(fmt.Sprintf("GPU-%08x-8a10-0135-bada-13f71feaef21", n+0x980fb000))
}

// Device is the name of the node's n-th GPU.
func Device(n int) gpu.DeviceName { return gpu.DeviceName(fmt.Sprintf("gpu-%08x", n+0x980fb000)) }

// NewNode makes a node with GPUs, in directories under dir.
func NewNode(dir string, gpus int) (*Node, error) {
	n := &Node{
		Node: stateIn(dir, ""), Root: filepath.Join(dir, "root"), Marks: filepath.Join(dir, "marks"),
		indexes: map[gpu.UUID]int{}, lost: map[gpu.UUID]bool{}, instances: map[gpu.Partition]gpu.Instance{},
		daemons: map[string]Daemon{}, intervals: map[gpu.UUID]string{},
	}
	for i := range gpus {
		n.gpus = append(n.gpus, gpu.GPU{
			UUID: UUID(i), Minor: i, MIG: &gpu.MIG{Switchable: true, Profiles: profiles()},
			MemoryBytes: (ShareableMiB + reservedMiB + serverMiB) << 20, MemoryReservedBytes: reservedMiB << 20,
		})
		n.indexes[UUID(i)] = i
	}
	var err error
	if n.names, err = gpu.NewNames(n.gpus); err != nil {
		return nil, err
	}
	for _, d := range []string{n.Journal, n.CDI, filepath.Join(n.Root, "dev"), filepath.Join(n.Root, "proc"), n.Marks} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, err
		}
	}
	for i := range gpus {
		if err := os.WriteFile(n.DeviceNode(i), nil, 0o600); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// SetModel has the n-th GPU be of another model.
func (n *Node) SetModel(i int, m gpu.Model) { n.gpus[i].Model = m }

func stateIn(dir, bootID string) doctor.Node {
	return doctor.Node{
		Journal: filepath.Join(dir, "journal"), CDI: filepath.Join(dir, "cdi"),
		Host: hostTree{os.DirFS(filepath.Join(dir, "root"))}, BootID: bootID,
	}
}

// hostTree is a host where programs can be started everywhere.
type hostTree struct{ fs.FS }

func (hostTree) NoExec(string) (bool, error) { return false, nil }

// DeviceNode is where the n-th GPU's device node is.
func (n *Node) DeviceNode(i int) string { return filepath.Join(n.Root, path(i)) }

func path(i int) string { return fmt.Sprintf("/dev/nvidia%d", i) }

// Lose makes the GPU fall off the bus.
func (n *Node) Lose(uuid gpu.UUID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lost[uuid] = true
}

// SetOtherDriver sets the error of prepares beside another driver; nil: there is none.
func (n *Node) SetOtherDriver(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.other = err
}

// MayPrepare implements prepare.Inventory.
func (n *Node) MayPrepare() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.other
}

// FindBack ends Lose.
func (n *Node) FindBack(uuid gpu.UUID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.lost, uuid)
}

// Device implements prepare.Inventory.
func (n *Node) Device(name gpu.DeviceName) (gpu.Device, gpu.GPU, error) {
	d, err := n.names.Device(name)
	if err != nil {
		return nil, gpu.GPU{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.lost[d.Parent()] {
		lost := n.gpus[n.indexes[d.Parent()]]
		lost.Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "fell off the bus"}}
		return d, lost, fmt.Errorf("GPU %s is lost", d.Parent())
	}
	return d, n.gpus[n.indexes[d.Parent()]], nil
}

// Write implements prepare.CDI.
func (n *Node) Write(claimUID string, devices map[gpu.DeviceName]gpu.Prepared) (map[gpu.DeviceName][]string, error) {
	if n.Mark != nil {
		if _, _, err := n.Mark(claimUID); err != nil {
			return nil, err
		}
		n.step("cdi.marked")
	}
	spec := specs.Spec{Version: "0.5.0", Kind: claimKind}
	ids := map[gpu.DeviceName][]string{}
	for name, d := range devices {
		node := path(n.indexes[d.Device.Parent()])
		if _, err := os.Stat(filepath.Join(n.Root, node)); err != nil {
			return nil, err
		}
		nodes := []*specs.DeviceNode{{Path: node}}
		if p, ok := gpu.Base(d.Device).(gpu.Partition); ok {
			if now, ok := n.instance(p); !ok || now != d.Instance {
				return nil, fmt.Errorf("%s is to be %+v and is %+v", name, d.Instance, now)
			}
			nodes = append(nodes, &specs.DeviceNode{
				Path: fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", d.Instance.GPUInstanceID), Type: "c", Major: 509, Minor: int64(d.Instance.GPUInstanceID),
			})
		}
		device := claimUID + "-" + string(name)
		ids[name] = []string{claimKind + "=" + device}
		edits, err := n.mps(d.MPS)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		edits.DeviceNodes = nodes
		spec.Devices = append(spec.Devices, specs.Device{Name: device, ContainerEdits: edits})
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	temp := n.spec(claimUID) + ".tmp"
	if err := os.WriteFile(temp, data, 0o600); err != nil {
		return nil, err
	}
	n.step("cdi.written")
	if err := os.Rename(temp, n.spec(claimUID)); err != nil {
		return nil, err
	}
	n.step("cdi.renamed")
	return ids, nil
}

// Remove implements prepare.CDI.
func (n *Node) Remove(claimUID string) error {
	if err := os.Remove(n.spec(claimUID)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	n.step("cdi.removed")
	return nil
}

// Claims implements prepare.CDI.
func (n *Node) Claims() ([]string, error) {
	entries, err := os.ReadDir(n.CDI)
	var uids []string
	for _, e := range entries {
		if uid, ok := strings.CutPrefix(strings.TrimSuffix(e.Name(), ".json"), claimPrefix); ok {
			uids = append(uids, uid)
		}
	}
	return uids, err
}

// Crash returns the node as it would be found if everything had stopped now:
// a copy, in directories under dir, with the partitions there are. GPUs that
// were lost are back.
func (n *Node) Crash(dir string) (*Node, error) {
	for _, sub := range []string{"journal", "cdi", "root", "marks"} {
		if err := os.CopyFS(filepath.Join(dir, sub), os.DirFS(filepath.Join(filepath.Dir(n.Journal), sub))); err != nil {
			return nil, err
		}
	}
	// A file that is never renamed stays behind; that is the CDI writer's to
	// tidy, and runtimes read *.json only.
	temps, err := filepath.Glob(filepath.Join(dir, "cdi", "*.tmp"))
	for _, t := range temps {
		err = errors.Join(err, os.Remove(t))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return &Node{
		Node: stateIn(dir, n.BootID), Root: filepath.Join(dir, "root"), Marks: filepath.Join(dir, "marks"),
		names: n.names, indexes: n.indexes, gpus: n.gpus, lost: map[gpu.UUID]bool{}, instances: maps.Clone(n.instances), made: n.made,
		daemons: maps.Clone(n.daemons), intervals: maps.Clone(n.intervals),
	}, err
}

func (n *Node) spec(claimUID string) string {
	return filepath.Join(n.CDI, claimPrefix+claimUID+".json")
}

func (n *Node) step(name string) {
	if n.Step != nil {
		n.Step(name)
	}
}
