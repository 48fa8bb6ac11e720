package doctor_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

const (
	boot  = "boot-2"
	first = gpu.UUID("GPU-980fb000-8a10-0135-bada-13f71feaef21")
	other = gpu.UUID("GPU-980fb001-8a10-0135-bada-13f71feaef21")
	caps  = "/proc/driver/nvidia/capabilities"
)

// node is a node without findings: the claim "whole" has the first GPU, "part"
// a partition of the other.
type node struct {
	doctor.Node
	t        *testing.T
	claims   map[string]holding.Record
	gpus     map[gpu.UUID]holding.GPURecord
	specs    map[string]specs.Spec // by file name
	host     map[string]string     // contents of the host's files, by path
	instance gpu.Instance          // the instance of the claim "part"
}

const partName, wholeName = "gpu-980fb001-mig-1g10gb-2", "gpu-980fb000"

func newNode(t *testing.T) *node {
	t.Helper()
	place := gpu.Placement{Start: 2, Size: 1}
	instance := gpu.Instance{UUID: "MIG-9", Profile: "1g.10gb", Placement: place, GPUInstanceID: 9}
	profiles := []gpu.Profile{{Name: "1g.10gb", Placements: []gpu.Placement{place, {Start: 5, Size: 1}}}}
	n := &node{
		t: t, instance: instance,
		claims: map[string]holding.Record{
			"whole": {ClaimUID: "whole", Namespace: "default", Name: "w", BootID: boot, Holdings: []holding.Holding{{Device: wholeName, GPU: first}}},
			"part": {ClaimUID: "part", Namespace: "default", Name: "p", BootID: boot, Holdings: []holding.Holding{
				{Device: partName, GPU: other, Partition: holding.Partition{Profile: "1g.10gb", Start: 2, Size: 1}},
			}},
		},
		gpus: map[gpu.UUID]holding.GPURecord{other: {GPU: other, BootID: boot, ModeSwitched: true, Partitions: []holding.MadePartition{made(instance)}}},
		specs: map[string]specs.Spec{
			"k8s.gpu.nvidia.com-driver.json":      {Kind: "k8s.gpu.nvidia.com/driver", ContainerEdits: edits("/dev/nvidiactl")},
			"k8s.gpu.nvidia.com-claim_whole.json": claimSpec("whole-"+wholeName, edits("/dev/nvidia0")),
			"k8s.gpu.nvidia.com-claim_part.json":  claimSpec("part-"+partName, withCaps(edits("/dev/nvidia1"), 21, 22)),
		},
		host: map[string]string{
			"dev/nvidiactl": "", "dev/nvidia0": "", "dev/nvidia1": "", "lib/libcuda.so.1": "",
			caps[1:] + "/gpu1/mig/gi9/access":     "DeviceFileMinor: 21\nDeviceFileMode: 292\n",
			caps[1:] + "/gpu1/mig/gi9/ci0/access": "DeviceFileMinor: 22\nDeviceFileMode: 292\n",
		},
	}
	common := n.specs["k8s.gpu.nvidia.com-driver.json"]
	common.ContainerEdits.Mounts = []*specs.Mount{{HostPath: "/lib/libcuda.so.1", ContainerPath: "/lib/libcuda.so.1"}}
	n.specs["k8s.gpu.nvidia.com-driver.json"] = common
	dir := t.TempDir()
	n.Node = doctor.Node{
		Journal: filepath.Join(dir, "claims"), CDI: filepath.Join(dir, "cdi"), Host: driverroot.NewHost(filepath.Join(dir, "host")), BootID: boot, Capabilities: caps,
		Hardware: &doctor.Hardware{
			GPUs: []gpu.GPU{{UUID: first, MIG: &gpu.MIG{Profiles: profiles}}, {UUID: other, Minor: 1, MIG: &gpu.MIG{Profiles: profiles}}},
			MIG: map[gpu.UUID]gpu.MIG{
				first: {Profiles: profiles},
				other: {Enabled: true, Pending: true, Profiles: profiles, Instances: []gpu.Instance{instance}},
			},
			NoMIG:        map[gpu.UUID]error{},
			ComputeModes: map[gpu.UUID]nvml.ComputeMode{first: nvml.ComputeDefault, other: nvml.ComputeDefault},
			TimeSlices:   map[gpu.UUID]string{first: "Default", other: "Default"},
		},
	}
	return n
}

func made(i gpu.Instance) holding.MadePartition {
	return holding.MadePartition{
		Partition: holding.Partition{Profile: i.Profile, Start: i.Placement.Start, Size: i.Placement.Size},
		Made:      &holding.MadeInstance{GPUInstanceID: i.GPUInstanceID, ComputeInstanceID: i.ComputeInstanceID, UUID: i.UUID},
	}
}

func edits(nodes ...string) specs.ContainerEdits {
	var e specs.ContainerEdits
	for _, n := range nodes {
		e.DeviceNodes = append(e.DeviceNodes, &specs.DeviceNode{Path: n})
	}
	return e
}

func withCaps(e specs.ContainerEdits, minors ...int64) specs.ContainerEdits {
	for _, m := range minors {
		e.DeviceNodes = append(e.DeviceNodes, &specs.DeviceNode{Path: fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", m), Type: "c", Major: 509, Minor: m})
	}
	return e
}

func claimSpec(device string, e specs.ContainerEdits) specs.Spec {
	return specs.Spec{Kind: "k8s.gpu.nvidia.com/claim", Devices: []specs.Device{{Name: device, ContainerEdits: e}}}
}

// write writes the node to disk.
func (n *node) write() {
	n.t.Helper()
	j, err := journal.Open(n.Journal, nil)
	if err != nil {
		n.t.Fatal(err)
	}
	for _, r := range n.claims {
		err = errors.Join(err, j.Put(r))
	}
	for _, r := range n.gpus {
		err = errors.Join(err, j.PutGPU(r))
	}
	err = errors.Join(err, j.Close(), os.MkdirAll(n.CDI, 0o755))
	for name, spec := range n.specs {
		data, marshalErr := json.Marshal(spec)
		err = errors.Join(err, marshalErr, os.WriteFile(filepath.Join(n.CDI, name), data, 0o600))
	}
	for path, data := range n.host {
		path = n.Host.Path(path)
		err = errors.Join(err, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(data), 0o600))
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// mount mounts a file system of its own at a directory of the host. It needs root.
func (n *node) mount(dir string, flags uintptr) {
	n.t.Helper()
	dir = n.Host.Path(dir)
	if err := errors.Join(os.MkdirAll(dir, 0o755), unix.Mount("tmpfs", dir, "tmpfs", flags, "size=64k")); err != nil {
		n.t.Fatalf("mount a tmpfs (run the tests as root): %v", err)
	}
	n.t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			n.t.Error(err)
		}
	})
}

// instances of the other GPU.
func (n *node) instances(now ...gpu.Instance) {
	mig := n.Hardware.MIG[other]
	mig.Instances = now
	n.Hardware.MIG[other] = mig
}

// found returns the findings of a check: level, rule and subject.
func found(t *testing.T, n doctor.Node) []string {
	t.Helper()
	r, err := doctor.Check(n)
	if err != nil {
		t.Fatal(err)
	}
	list := []string{}
	for _, f := range r.Findings {
		if f.Level == doctor.Trouble && f.Do == "" {
			t.Errorf("%s: no word on what to do", f.Check)
		}
		list = append(list, fmt.Sprintf("%s %s %s", f.Level, f.Check, f.Claim))
	}
	slices.Sort(list)
	return list
}

// forget removes the claim and its spec.
func (n *node) forget(claim string) {
	delete(n.claims, claim)
	delete(n.specs, "k8s.gpu.nvidia.com-claim_"+claim+".json")
}

func truncate(t *testing.T, path string) {
	t.Helper()
	if err := os.Truncate(path, 40); err != nil {
		t.Fatal(err)
	}
}
