package doctor_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

const (
	boot  = "boot-2"
	first = gpu.UUID("GPU-980fb000-8a10-0135-bada-13f71feaef21")
	other = gpu.UUID("GPU-980fb001-8a10-0135-bada-13f71feaef21")
	caps  = "/proc/driver/nvidia/capabilities"
)

// machine is the hardware of a test.
type machine struct {
	gpus []gpu.GPU
	migs map[gpu.UUID]*gpu.MIG
	err  error // the error of MIG
}

func (m *machine) GPUs() ([]gpu.GPU, error) { return m.gpus, nil }

func (m *machine) MIG(uuid gpu.UUID) (gpu.MIG, error) {
	if m.err != nil {
		return gpu.MIG{}, m.err
	}
	return *m.migs[uuid], nil
}

// node is a node without findings: the claim "whole" has the first GPU, "part"
// a partition of the other.
type node struct {
	doctor.Node
	t        *testing.T
	machine  *machine
	claims   map[string]holding.Record
	gpus     map[gpu.UUID]holding.GPURecord
	specs    map[string]specs.Spec // by file name
	host     fstest.MapFS
	instance gpu.Instance // the instance of the claim "part"
}

const partName, wholeName = "gpu-980fb001-mig-1g10gb-2", "gpu-980fb000"

func newNode(t *testing.T) *node {
	t.Helper()
	place := gpu.Placement{Start: 2, Size: 1}
	instance := gpu.Instance{UUID: "MIG-9", Profile: "1g.10gb", Placement: place, GPUInstanceID: 9}
	profiles := []gpu.Profile{{Name: "1g.10gb", Placements: []gpu.Placement{place, {Start: 5, Size: 1}}}}
	n := &node{
		t: t, instance: instance,
		machine: &machine{
			gpus: []gpu.GPU{{UUID: first, MIG: &gpu.MIG{Profiles: profiles}}, {UUID: other, Minor: 1, MIG: &gpu.MIG{Profiles: profiles}}},
			migs: map[gpu.UUID]*gpu.MIG{
				first: {Profiles: profiles},
				other: {Enabled: true, Pending: true, Profiles: profiles, Instances: []gpu.Instance{instance}},
			},
		},
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
		host: fstest.MapFS{
			"dev/nvidiactl": {}, "dev/nvidia0": {}, "dev/nvidia1": {}, "lib/libcuda.so.1": {},
			caps[1:] + "/gpu1/mig/gi9/access":     {Data: []byte("DeviceFileMinor: 21\nDeviceFileMode: 292\n")},
			caps[1:] + "/gpu1/mig/gi9/ci0/access": {Data: []byte("DeviceFileMinor: 22\nDeviceFileMode: 292\n")},
		},
	}
	common := n.specs["k8s.gpu.nvidia.com-driver.json"]
	common.ContainerEdits.Mounts = []*specs.Mount{{HostPath: "/lib/libcuda.so.1", ContainerPath: "/lib/libcuda.so.1"}}
	n.specs["k8s.gpu.nvidia.com-driver.json"] = common
	dir := t.TempDir()
	n.Node = doctor.Node{
		Journal: filepath.Join(dir, "claims"), CDI: filepath.Join(dir, "cdi"), Host: n.host, BootID: boot, Hardware: n.machine, Capabilities: caps,
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
	if err != nil {
		n.t.Fatal(err)
	}
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

func TestCheck(t *testing.T) {
	for name, tc := range map[string]struct {
		before func(n *node) // changes the node before it is written
		after  func(t *testing.T, n *node)
		want   []string
	}{
		"as it should be": {want: []string{}},
		"nothing there": {
			before: func(n *node) { n.Journal, n.CDI, n.Hardware = n.Journal+"x", n.CDI+"x", nil },
			after:  func(_ *testing.T, n *node) { n.Journal, n.CDI = n.Journal+"y", n.CDI+"y" },
			want:   []string{},
		},
		"claim's file damaged": {
			after: func(t *testing.T, n *node) { truncate(t, filepath.Join(n.Journal, "whole.json")) },
			want:  []string{"trouble claim-record-unreadable whole"},
		},
		"GPU's file damaged": {
			after: func(t *testing.T, n *node) { truncate(t, journal.GPUFile(n.Journal, other)) },
			want:  []string{"note instance-of-others default/p", "trouble gpu-record-unreadable "},
		},
		"GPU's file unreadable": {
			after: func(t *testing.T, n *node) {
				from := journal.GPUFile(n.Journal, other)
				truncate(t, from)
				if err := os.Rename(from, from[:len(from)-len(".json")]+".corrupt"); err != nil {
					t.Fatal(err)
				}
			},
			want: []string{"note instance-of-others default/p", "trouble gpu-record-unreadable "},
		},
		"temporary files": {
			after: func(t *testing.T, n *node) {
				for _, f := range []string{n.Journal + "/a.json.1.tmp", n.Journal + "/gpus/b.json.1.tmp", n.CDI + "/k8s.gpu.nvidia.com-claim_a.json.tmp", n.CDI + "/vendor.com-x.tmp"} {
					if err := os.WriteFile(f, nil, 0o600); err != nil {
						t.Fatal(err)
					}
				}
			},
			want: []string{"trouble temporary-file ", "trouble temporary-file ", "trouble temporary-file "},
		},
		"two holders": {
			before: func(n *node) {
				n.claims["twin"] = holding.Record{ClaimUID: "twin", BootID: boot, Holdings: []holding.Holding{{Device: "gpu-980fb001", GPU: other}}}
				n.specs["k8s.gpu.nvidia.com-claim_twin.json"] = claimSpec("twin-gpu-980fb001", edits("/dev/nvidia1"))
			},
			want: []string{"trouble two-holders twin", "trouble whole-gpu-in-mig-mode twin"},
		},
		"an administrator looks on": {
			before: func(n *node) {
				n.claims["admin"] = holding.Record{ClaimUID: "admin", BootID: boot, Holdings: []holding.Holding{{Device: "gpu-980fb001", GPU: other, Admin: true}}}
				n.specs["k8s.gpu.nvidia.com-claim_admin.json"] = claimSpec("admin-gpu-980fb001", edits("/dev/nvidia1"))
			},
			want: []string{},
		},
		"CDI directory wiped": {
			before: func(n *node) { clear(n.specs) },
			want:   []string{"trouble cdi-device-missing default/p", "trouble cdi-device-missing default/w"},
		},
		"common CDI spec missing": {
			before: func(n *node) { delete(n.specs, "k8s.gpu.nvidia.com-driver.json") },
			want:   []string{"trouble cdi-common-missing "},
		},
		"CDI spec without a record": {
			before: func(n *node) { delete(n.claims, "whole") },
			want:   []string{"trouble cdi-device-without-claim "},
		},
		"CDI spec without devices": {
			before: func(n *node) {
				n.specs["k8s.gpu.nvidia.com-claim_whole.json"] = claimSpec("whole-"+wholeName, edits())
			},
			want: []string{"trouble cdi-device-empty default/w"},
		},
		"CDI spec damaged": {
			after: func(t *testing.T, n *node) { truncate(t, filepath.Join(n.CDI, "k8s.gpu.nvidia.com-claim_whole.json")) },
			want:  []string{"trouble cdi-device-missing default/w", "trouble cdi-spec-unreadable "},
		},
		"device node missing": {before: func(n *node) { delete(n.host, "dev/nvidia0") }, want: []string{"trouble cdi-path-missing "}},
		"library missing":     {before: func(n *node) { delete(n.host, "lib/libcuda.so.1") }, want: []string{"trouble cdi-path-missing "}},
		"capability of another instance": {
			before: func(n *node) {
				n.specs["k8s.gpu.nvidia.com-claim_part.json"] = claimSpec("part-"+partName, withCaps(edits("/dev/nvidia1"), 21, 23))
			},
			want: []string{"trouble cdi-capability-wrong default/p"},
		},
		"capability missing": {
			before: func(n *node) { delete(n.host, caps[1:]+"/gpu1/mig/gi9/ci0/access") },
			want:   []string{"trouble capability-unreadable default/p"},
		},
		"instance idle": {
			before: func(n *node) { n.forget("part") },
			want:   []string{"leftover instance-idle "},
		},
		"instance destroyed by somebody, held": {
			before: func(n *node) { n.machine.migs[other].Instances = nil },
			want:   []string{"trouble instance-missing default/p"},
		},
		"instance destroyed by somebody, idle": {
			before: func(n *node) { n.forget("part"); n.machine.migs[other].Instances = nil },
			want:   []string{"trouble instance-missing "},
		},
		"another one in its place": {
			before: func(n *node) { n.machine.migs[other].Instances[0].ComputeInstanceID = 3 },
			want: []string{
				"note instance-of-others default/p", "trouble capability-unreadable default/p", "trouble instance-differs default/p",
			},
		},
		"half made, nothing there yet": {
			before: func(n *node) {
				n.gpus[other].Partitions[0].Made = nil
				n.machine.migs[other].Instances = nil
			},
			want: []string{"trouble partition-half-made default/p"},
		},
		"half made, instance there": {
			before: func(n *node) { n.gpus[other].Partitions[0].Made = nil },
			want:   []string{"trouble partition-half-made default/p"},
		},
		"no compute instance": {
			before: func(n *node) {
				i := &n.machine.migs[other].Instances[0]
				i.UUID, i.ComputeInstanceID = "", gpu.NoComputeInstance
			},
			want: []string{"trouble instance-without-compute default/p"},
		},
		"held and never made": {
			before: func(n *node) { delete(n.gpus, other); n.machine.migs[other].Instances = nil },
			want:   []string{"trouble partition-missing default/p"},
		},
		"instances of others": {
			before: func(n *node) {
				delete(n.gpus, other)
				n.machine.migs[other].Instances = append(n.machine.migs[other].Instances, gpu.Instance{
					Profile: "1g.10gb", Placement: gpu.Placement{Start: 5, Size: 1}, GPUInstanceID: 3, ComputeInstanceID: gpu.NoComputeInstance,
				})
			},
			want: []string{"note instance-of-others ", "note instance-of-others default/p"},
		},
		"mode on for nothing": {
			before: func(n *node) {
				n.forget("part")
				n.machine.migs[other].Instances = nil
				n.gpus[other] = holding.GPURecord{GPU: other, BootID: boot, ModeSwitched: true}
			},
			want: []string{"leftover mode-on-for-nothing "},
		},
		"mode switched off by somebody": {
			before: func(n *node) {
				n.forget("part")
				*n.machine.migs[other] = gpu.MIG{}
				n.gpus[other] = holding.GPURecord{GPU: other, BootID: boot, ModeSwitched: true}
			},
			want: []string{"leftover gpu-record-empty "},
		},
		"rebooted, the kubelet hasn't come yet": {
			before: func(n *node) {
				n.BootID = "boot-3"
				*n.machine.migs[other] = gpu.MIG{}
				delete(n.specs, "k8s.gpu.nvidia.com-claim_part.json")
			},
			want: []string{"leftover gpu-record-of-earlier-boot "},
		},
		"GPU lost": {
			before: func(n *node) { n.machine.gpus = n.machine.gpus[:1] },
			want:   []string{"note gpu-gone ", "trouble gpu-gone default/p"},
		},
		"MIG doesn't answer": {
			before: func(n *node) { n.machine.err = errors.New("unknown error") },
			want:   []string{"trouble mig-unreadable ", "trouble mig-unreadable "},
		},
		"no driver": {
			before: func(n *node) { n.Hardware, n.NoHardware = nil, errors.New("no driver") },
			want:   []string{"trouble no-driver "},
		},
		"no driver, no claims": {
			before: func(n *node) {
				n.Hardware, n.NoHardware = nil, errors.New("no driver")
				n.forget("part")
				n.forget("whole")
				delete(n.gpus, other)
			},
			want: []string{"note no-driver "},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if tc.before != nil {
				tc.before(n)
			}
			n.write()
			if tc.after != nil {
				tc.after(t, n)
			}
			if diff := cmp.Diff(tc.want, found(t, n.Node)); diff != "" {
				t.Errorf("found (-want +got):\n%s", diff)
			}
		})
	}
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

// changing is hardware that differs in each check.
type changing struct {
	machine
	looks []gpu.MIG
}

func (c *changing) MIG(uuid gpu.UUID) (gpu.MIG, error) {
	if uuid != other {
		return c.machine.MIG(uuid)
	}
	now := c.looks[0]
	c.looks = c.looks[min(1, len(c.looks)-1):]
	return now, nil
}

// TestExamine checks a node that changes.
func TestExamine(t *testing.T) {
	n := newNode(t)
	n.write()
	good, gone := *n.machine.migs[other], gpu.MIG{Enabled: true}
	half := gpu.MIG{Enabled: true, Instances: []gpu.Instance{{
		Profile: "1g.10gb", Placement: n.instance.Placement, GPUInstanceID: 9, ComputeInstanceID: gpu.NoComputeInstance,
	}}}
	idle := newNode(t)
	idle.forget("part")
	idle.write()
	for name, tc := range map[string]struct {
		node    *node
		looks   []gpu.MIG
		strict  bool
		healthy bool
		want    int // number of checks
	}{
		"healthy":               {node: n, looks: []gpu.MIG{good}, healthy: true, want: 1},
		"a prepare is going on": {node: n, looks: []gpu.MIG{gone, half, good}, healthy: true, want: 3},
		"trouble that changes":  {node: n, looks: []gpu.MIG{gone, half, gone}, want: 3},
		"trouble that stays":    {node: n, looks: []gpu.MIG{gone}, want: 3},
		"trouble that ends":     {node: n, looks: []gpu.MIG{gone, gone, good}, healthy: true, want: 3},
		"idle":                  {node: idle, looks: []gpu.MIG{good}, healthy: true, want: 1},
		"idle, strictly":        {node: idle, looks: []gpu.MIG{good}, strict: true, want: 3},
	} {
		t.Run(name, func(t *testing.T) {
			look := tc.node.Node
			look.Hardware = &changing{machine: *n.machine, looks: tc.looks}
			r, err := doctor.Examine(t.Context(), look, doctor.Options{Looks: 3, Strict: tc.strict})
			if err != nil {
				t.Fatal(err)
			}
			if r.Healthy != tc.healthy || r.Looks != tc.want || !r.Healthy && len(r.Findings) == 0 {
				t.Errorf("got %+v, want healthy %t after %d looks", r, tc.healthy, tc.want)
			}
		})
	}
}

// TestLeavesJournalAlone checks a node while a plugin has the journal open.
func TestLeavesJournalAlone(t *testing.T) {
	n := newNode(t)
	n.write()
	j, err := journal.Open(n.Journal, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if err := os.WriteFile(filepath.Join(n.Journal, "a.json.1.tmp"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	found(t, n.Node)
	if _, err := os.Stat(filepath.Join(n.Journal, "a.json.1.tmp")); err != nil {
		t.Error(err)
	}
	if _, err := journal.Open(n.Journal, nil); err == nil {
		t.Error("the journal isn't locked any more")
	}
}

// TestServer checks that the version is a note, because nothing on the node is
// wrong.
func TestServer(t *testing.T) {
	n := newNode(t)
	n.write()
	for version, noted := range map[string]bool{"v1.36.1": true, "v1.34.13": true, "v1.36.2": false, "v1.37.1": false, "": false} {
		look := n.Node
		look.Kubernetes = version
		r, err := doctor.Check(look)
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(r.Findings, func(f doctor.Finding) bool { return f.Check == "scheduler-allocates-twice" })
		if !r.Healthy || noted != (i >= 0) || noted && !strings.Contains(r.Findings[i].What, version) {
			t.Errorf("%q: got %+v", version, r)
		}
	}
}
