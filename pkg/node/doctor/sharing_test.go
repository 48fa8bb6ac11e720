package doctor_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// sharedNode is a node without findings: two claims share the first GPU, one
// has a share of a partition of the other.
type sharedNode struct {
	*node
	settings []holding.Settings
}

func newSharedNode(t *testing.T) *sharedNode {
	n := &sharedNode{node: newNode(t)}
	n.Hardware.ComputeModes[first] = nvml.ComputeExclusiveProcess
	clear(n.claims)
	n.specs = map[string]specs.Spec{"k8s.gpu.nvidia.com-driver.json": n.specs["k8s.gpu.nvidia.com-driver.json"]}
	n.Sharing = &doctor.Sharing{Dir: "/run/mps/d"}
	n.settings = []holding.Settings{{GPU: first, BootID: boot, ComputeModeBefore: "default"}}
	n.run(mps.Daemon{Name: "gpu-980fb000", Devices: []gpu.UUID{first}, ThreadPercentage: 50, MemoryMiB: []int64{1000}})
	n.run(mps.Daemon{Name: partName, Devices: []gpu.UUID{"MIG-9"}, ThreadPercentage: 50, MemoryMiB: []int64{100}})
	share := func(device gpu.DeviceName, uuid gpu.UUID, mib int64) holding.Holding {
		return holding.Holding{Device: device, GPU: uuid, Share: &holding.Part{}, MPS: &holding.MPS{ThreadPercentage: 50, MemoryMiB: mib}}
	}
	n.claim("a", "gpu-980fb000", edits("/dev/nvidia0"), share("gpu-980fb000-mps", first, 500))
	n.claim("b", "gpu-980fb000", edits("/dev/nvidia0"), share("gpu-980fb000-mps", first, 1000))
	part := share(partName+"-mps", other, 100)
	part.Partition = holding.Partition{Profile: "1g.10gb", Start: 2, Size: 1}
	n.claim("c", partName, withCaps(edits("/dev/nvidia1"), 21, 22), part)
	return n
}

// run adds a running daemon.
func (n *sharedNode) run(d mps.Daemon) {
	n.Sharing.Daemons = append(n.Sharing.Daemons, mps.State{Daemon: d, Phase: mps.Running, PipeDir: "/run/mps/d/" + d.Name + "/pipe"})
	n.Sharing.Remains = append(n.Sharing.Remains, d.Name)
	n.host["run/mps/d/"+d.Name+"/pipe/socket"] = ""
}

// daemon is the daemon of that name, to be changed.
func (n *sharedNode) daemon(name string) *mps.State {
	return &n.Sharing.Daemons[slices.IndexFunc(n.Sharing.Daemons, func(s mps.State) bool { return s.Name == name })]
}

// claim adds a prepared claim that is a client of a daemon.
func (n *sharedNode) claim(uid, daemon string, e specs.ContainerEdits, g holding.Holding) {
	n.claims[uid] = holding.Record{ClaimUID: uid, Namespace: "default", Name: uid, BootID: boot, Holdings: []holding.Holding{g}}
	if daemon != "" {
		e.Mounts = append(e.Mounts, &specs.Mount{HostPath: "/run/mps/d/" + daemon + "/pipe", ContainerPath: "/tmp/nvidia-mps"})
	}
	n.specs["k8s.gpu.nvidia.com-claim_"+uid+".json"] = claimSpec(uid+"-"+string(g.Device), e)
}

// unprepare removes the claims.
func (n *sharedNode) unprepare(uids ...string) {
	for _, uid := range uids {
		delete(n.claims, uid)
		delete(n.specs, "k8s.gpu.nvidia.com-claim_"+uid+".json")
	}
}

func (n *sharedNode) stop(name string) {
	n.Sharing.Daemons = slices.DeleteFunc(n.Sharing.Daemons, func(s mps.State) bool { return s.Name == name })
	n.Sharing.Remains = slices.DeleteFunc(n.Sharing.Remains, func(s string) bool { return s == name })
}

func (n *sharedNode) writeSettings() {
	n.t.Helper()
	j, err := journal.Open(n.Journal, nil)
	if err != nil {
		n.t.Fatal(err)
	}
	for _, s := range n.settings {
		err = errors.Join(err, j.PutSettings(s))
	}
	if err = errors.Join(err, j.Close()); err != nil {
		n.t.Fatal(err)
	}
}

func TestCheckSharing(t *testing.T) {
	for name, tc := range map[string]struct {
		before func(n *sharedNode) // changes the node before it is written
		after  func(t *testing.T, n *sharedNode)
		want   []string
	}{
		"as it should be":        {before: func(*sharedNode) {}, want: []string{}},
		"nobody asks about MPS":  {before: func(n *sharedNode) { n.Sharing, n.settings = nil, nil }, want: []string{}},
		"a daemon without claim": {before: func(n *sharedNode) { n.run(mps.Daemon{Name: "claim-x", Devices: []gpu.UUID{other}}) }, want: []string{"trouble mps-daemon-without-claim "}},
		"daemons of claims that have left": {
			before: func(n *sharedNode) { n.unprepare("a", "b", "c") },
			want:   []string{"leftover compute-mode-for-nothing ", "leftover instance-idle ", "trouble mps-daemon-without-claim ", "trouble mps-daemon-without-claim "},
		},
		"a daemon that isn't there": {before: func(n *sharedNode) { n.stop(partName) }, want: []string{"trouble mps-daemon-missing default/c"}},
		"a daemon that failed": {
			before: func(n *sharedNode) {
				n.daemon(partName).Phase = mps.Failed
			},
			want: []string{"trouble mps-daemon-failed default/c"},
		},
		"a daemon that takes no clients": {
			before: func(n *sharedNode) {
				n.daemon(partName).Trouble = "it has no server"
			},
			want: []string{"trouble mps-daemon-failed default/c"},
		},
		"a daemon that is being stopped": {
			before: func(n *sharedNode) {
				n.run(mps.Daemon{Name: "claim-x", Devices: []gpu.UUID{other}})
				n.daemon("claim-x").Phase = mps.Ending
			},
			want: []string{"leftover mps-daemon-ending "},
		},
		"shared memory with a file system of its own": {
			before: func(n *sharedNode) {
				n.withSharedMemory()
				n.mount("run/mps/d/"+partName+"/shm", 0)
			},
			want: []string{},
		},
		"shared memory on the host's": {before: func(n *sharedNode) { n.withSharedMemory() }, want: []string{"trouble mps-shm-unbounded default/c"}},
		"a daemon of another instance": {
			before: func(n *sharedNode) {
				n.stop(partName)
				n.run(mps.Daemon{Name: partName, Devices: []gpu.UUID{"MIG-8"}, ThreadPercentage: 50, MemoryMiB: []int64{100}})
			},
			want: []string{"trouble mps-daemon-differs default/c"},
		},
		"other limits": {
			before: func(n *sharedNode) {
				n.stop(partName)
				n.run(mps.Daemon{Name: partName, Devices: []gpu.UUID{"MIG-9"}, MemoryMiB: []int64{100}})
			},
			want: []string{"leftover mps-limits-differ default/c"},
		},
		"no pipe directory": {
			before: func(n *sharedNode) { delete(n.host, "run/mps/d/"+partName+"/pipe/socket") },
			want:   []string{"trouble cdi-path-missing ", "trouble mps-pipe-missing default/c"},
		},
		"a directory that nobody knows": {before: func(n *sharedNode) { n.Sharing.Remains = append(n.Sharing.Remains, "gpu-980fb001") }, want: []string{"trouble mps-directory-left "}},
		"a spec without the pipe": {
			before: func(n *sharedNode) {
				n.specs["k8s.gpu.nvidia.com-claim_a.json"] = claimSpec("a-gpu-980fb000-mps", edits("/dev/nvidia0"))
			},
			want: []string{"trouble cdi-mps-missing default/a"},
		},
		"no supervisor": {
			before: func(n *sharedNode) { n.Sharing.Away = mps.ErrUnavailable },
			want:   []string{"trouble mps-supervisor-away "},
		},
		"no supervisor, and nobody needs one": {
			before: func(n *sharedNode) {
				n.unprepare("a", "b", "c")
				n.Sharing.Away, n.Sharing.Remains, n.settings, n.Hardware.ComputeModes[first] = mps.ErrUnavailable, nil, nil, nvml.ComputeDefault
			},
			want: []string{"leftover instance-idle "},
		},
		"no supervisor, and something left": {
			before: func(n *sharedNode) { n.unprepare("c"); n.Sharing.Away = mps.ErrUnavailable },
			want:   []string{"leftover instance-idle ", "trouble mps-daemon-without-claim ", "trouble mps-supervisor-away "},
		},
		"compute mode set by others": {
			before: func(n *sharedNode) { n.Hardware.ComputeModes[other] = nvml.ComputeProhibited },
			want:   []string{"note compute-mode-of-others "},
		},
		"compute mode changed by others": {
			before: func(n *sharedNode) { n.Hardware.ComputeModes[first] = nvml.ComputeDefault },
			want:   []string{"trouble compute-mode-changed "},
		},
		"closed while the daemon is away": {
			before: func(n *sharedNode) {
				n.settings[0].Closed = true
				n.Hardware.ComputeModes[first] = nvml.ComputeProhibited
				n.daemon("gpu-980fb000").Phase = mps.Starting
			},
			want: []string{"trouble mps-daemon-failed default/a"},
		},
		"compute mode found exclusive": {
			before: func(n *sharedNode) { n.settings = nil },
			want:   []string{"note compute-mode-of-others "},
		},
		"of an earlier boot": {
			before: func(n *sharedNode) {
				n.settings = append(n.settings, holding.Settings{GPU: other, BootID: "boot-1", TimeSliceBefore: "Long"})
			},
			want: []string{"leftover settings-record-of-earlier-boot "},
		},
		"time slice for nothing": {
			before: func(n *sharedNode) {
				n.settings = append(n.settings, holding.Settings{GPU: other, BootID: boot, TimeSliceBefore: "Default"})
				n.Hardware.TimeSlices[other] = "Short"
			},
			want: []string{"leftover time-slice-for-nothing "},
		},
		"time slice of others": {before: func(n *sharedNode) { n.Hardware.TimeSlices[other] = "Short" }, want: []string{"note time-slice-of-others "}},
		"no time slices":       {before: func(n *sharedNode) { delete(n.Hardware.TimeSlices, other) }, want: []string{}},
		"a claim's time slice": {
			before: func(n *sharedNode) {
				n.withSlice("Short")
				n.Hardware.TimeSlices[first] = "Short"
			},
			want: []string{},
		},
		"a claim's time slice, changed": {
			before: func(n *sharedNode) { n.withSlice("Short") },
			want:   []string{"trouble time-slice-changed "},
		},
		"settings damaged": {
			before: func(*sharedNode) {},
			after:  func(t *testing.T, n *sharedNode) { truncate(t, journal.SettingsFile(n.Journal, first)) },
			want:   []string{"leftover settings-record-unreadable ", "note compute-mode-of-others "},
		},
		"a claim's file damaged": {
			before: func(*sharedNode) {},
			after:  func(t *testing.T, n *sharedNode) { truncate(t, filepath.Join(n.Journal, "c.json")) },
			want:   []string{"leftover instance-idle ", "trouble claim-record-unreadable c"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newSharedNode(t)
			tc.before(n)
			n.write()
			n.writeSettings()
			if tc.after != nil {
				tc.after(t, n)
			}
			if diff := cmp.Diff(tc.want, found(t, n.Node)); diff != "" {
				t.Errorf("findings (-want +got):\n%s", diff)
			}
		})
	}
}

// withSharedMemory gives the partition's daemon a /dev/shm for its clients.
func (n *sharedNode) withSharedMemory() {
	dir := "run/mps/d/" + partName + "/shm"
	n.daemon(partName).ShmDir = "/" + dir
	n.host[dir+"/file"] = ""
}

// withSlice grants the first GPU as a whole, with a time slice.
func (n *sharedNode) withSlice(interval string) {
	n.unprepare("a", "b")
	n.stop("gpu-980fb000")
	n.Hardware.ComputeModes[first] = nvml.ComputeDefault
	n.settings = []holding.Settings{{GPU: first, BootID: boot, TimeSliceBefore: "Default"}}
	n.claim("w", "", edits("/dev/nvidia0"), holding.Holding{Device: wholeName, GPU: first, TimeSlice: interval})
}

func TestReportCountsDaemons(t *testing.T) {
	n := newSharedNode(t)
	n.write()
	n.writeSettings()
	r, err := doctor.Check(n.Node)
	if err != nil || r.Daemons != 2 {
		t.Error(fmt.Errorf("%d daemons: %w", r.Daemons, err))
	}
}

// TestSettingPutBackMeanwhile has the plugin put a compute mode back, and forget it, after the
// hardware was read.
func TestSettingPutBackMeanwhile(t *testing.T) {
	n := newSharedNode(t)
	n.write()
	n.writeSettings()
	r, err := doctor.Examine(t.Context(), doctor.Options{Looks: 1}, n.Node, func(*doctor.Node) error {
		return os.Remove(journal.SettingsFile(n.Journal, first))
	})
	if err != nil || len(r.Findings) != 0 {
		t.Errorf("got %+v, %v, want nothing found", r.Findings, err)
	}
}
