package doctor_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

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
		"a claim that was given up": {
			before: func(n *node) {
				r := n.claims["part"]
				r.GivenUp = &health.Load{Boot: boot, Driver: "1"}
				n.claims["part"] = r
				delete(n.specs, "k8s.gpu.nvidia.com-claim_part.json")
			},
			want: []string{"note claim-given-up default/p"},
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
		"hook that the host can't start": {
			before: func(n *node) {
				common := n.specs["k8s.gpu.nvidia.com-driver.json"]
				common.ContainerEdits.Hooks = []*specs.Hook{{HookName: "createContainer", Path: "/noexec/hook"}}
				n.specs["k8s.gpu.nvidia.com-driver.json"], n.host["noexec/hook"] = common, ""
				n.mount("noexec", unix.MS_NOEXEC)
			},
			want: []string{"trouble cdi-hook-noexec "},
		},
		"no directory for the hook": {
			before: func(n *node) { n.NoHookDir = errors.New("all are mounted noexec") },
			want:   []string{"trouble cdi-hook-noexec "},
		},
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
			before: func(n *node) { n.instances() },
			want:   []string{"trouble instance-missing default/p"},
		},
		"instance destroyed by somebody, idle": {
			before: func(n *node) { n.forget("part"); n.instances() },
			want:   []string{"trouble instance-missing "},
		},
		"another one in its place": {
			before: func(n *node) { n.Hardware.MIG[other].Instances[0].ComputeInstanceID = 3 },
			want: []string{
				"note instance-of-others default/p", "trouble capability-unreadable default/p", "trouble instance-differs default/p",
			},
		},
		"half made, nothing there yet": {
			before: func(n *node) {
				n.gpus[other].Partitions[0].Made = nil
				n.instances()
			},
			want: []string{"trouble partition-half-made default/p"},
		},
		"half made, instance there": {
			before: func(n *node) { n.gpus[other].Partitions[0].Made = nil },
			want:   []string{"trouble partition-half-made default/p"},
		},
		"no compute instance": {
			before: func(n *node) {
				i := &n.Hardware.MIG[other].Instances[0]
				i.UUID, i.ComputeInstanceID = "", gpu.NoComputeInstance
			},
			want: []string{"trouble instance-without-compute default/p"},
		},
		"held and never made": {
			before: func(n *node) { delete(n.gpus, other); n.instances() },
			want:   []string{"trouble partition-missing default/p"},
		},
		"instances of others": {
			before: func(n *node) {
				delete(n.gpus, other)
				n.instances(n.instance, gpu.Instance{
					Profile: "1g.10gb", Placement: gpu.Placement{Start: 5, Size: 1}, GPUInstanceID: 3, ComputeInstanceID: gpu.NoComputeInstance,
				})
			},
			want: []string{"note instance-of-others ", "note instance-of-others default/p"},
		},
		"mode on for nothing": {
			before: func(n *node) {
				n.forget("part")
				n.instances()
				n.gpus[other] = holding.GPURecord{GPU: other, BootID: boot, ModeSwitched: true}
			},
			want: []string{"leftover mode-on-for-nothing "},
		},
		"mode switched off by somebody": {
			before: func(n *node) {
				n.forget("part")
				n.Hardware.MIG[other] = gpu.MIG{}
				n.gpus[other] = holding.GPURecord{GPU: other, BootID: boot, ModeSwitched: true}
			},
			want: []string{"leftover gpu-record-empty "},
		},
		"rebooted, the kubelet hasn't come yet": {
			before: func(n *node) {
				n.BootID = "boot-3"
				n.Hardware.MIG[other] = gpu.MIG{}
				delete(n.specs, "k8s.gpu.nvidia.com-claim_part.json")
			},
			want: []string{"leftover gpu-record-of-earlier-boot "},
		},
		"GPU lost": {
			before: func(n *node) { n.Hardware.GPUs = n.Hardware.GPUs[:1] },
			want:   []string{"note gpu-gone ", "trouble gpu-gone default/p"},
		},
		"GPU lost, and known": {
			before: func(n *node) { n.Hardware.GPUs[1].Conditions = []gpu.Condition{{Type: gpu.Lost}} },
			want:   []string{"note gpu-gone ", "trouble gpu-gone default/p"},
		},
		"an attribute of a GPU can't be read": {
			before: func(n *node) { n.Hardware.GPUs[1].Conditions = []gpu.Condition{{Type: gpu.AttributesUnreadable}} },
			want:   []string{},
		},
		"MIG doesn't answer": {
			before: func(n *node) {
				clear(n.Hardware.MIG)
				n.Hardware.NoMIG[first], n.Hardware.NoMIG[other] = errors.New("unknown error"), errors.New("unknown error")
			},
			want: []string{"trouble mig-unreadable ", "trouble mig-unreadable "},
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

// TestExamine checks a node that changes.
func TestExamine(t *testing.T) {
	n := newNode(t)
	n.write()
	good, gone := n.Hardware.MIG[other], gpu.MIG{Enabled: true}
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
			looks := tc.looks
			r, err := doctor.Examine(t.Context(), doctor.Options{Looks: 3, Strict: tc.strict}, tc.node.Node, func(n *doctor.Node) error {
				n.Hardware.MIG[other], looks = looks[0], looks[min(1, len(looks)-1):]
				return nil
			})
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
		i := slices.IndexFunc(r.Findings, func(f doctor.Finding) bool { return f.Check == "unsafe-scheduler" })
		if !r.Healthy || noted != (i >= 0) || noted && !strings.Contains(r.Findings[i].What, version) {
			t.Errorf("%q: got %+v", version, r)
		}
	}
}
