package preparetest

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// Memory of a GPU of the node, in MiB. A partition has as much less as its profile
// says: an eighth, a half, or all of ShareableMiB.
const (
	// ShareableMiB is the memory of all shares of a GPU together.
	ShareableMiB = 80 << 10
	reservedMiB  = 600
	serverMiB    = 128
)

// Daemon is an MPS daemon that runs.
type Daemon struct {
	// On are the GPUs and partitions it has, by its own index.
	On []gpu.Device
}

// Sharing implements prepare.Sharing on a Node: its MPS daemons, whose directories
// are under the node's root, and time slices, run on when a plugin ends.
type Sharing struct {
	Node    *Node
	Journal *journal.Journal
	// Fail, which may be nil, is asked before anything is done ("join", "unshared", "leave"); an
	// error is the answer.
	Fail func(ctx context.Context, op string, r holding.Record) error

	// settling is held while something is changed: Join and Leave wait for each
	// other.
	settling chan struct{}
}

// NewSharing returns what shares the node's GPUs by the journal.
func NewSharing(n *Node, j *journal.Journal) *Sharing {
	return &Sharing{Node: n, Journal: j, settling: make(chan struct{}, 1)}
}

// Join implements prepare.Sharing.
func (s *Sharing) Join(ctx context.Context, r holding.Record, given map[gpu.DeviceName]gpu.Prepared) (map[gpu.DeviceName]gpu.MPSDirs, error) {
	unlock, err := s.begin(ctx, "join", r)
	if err != nil {
		return nil, err
	}
	defer unlock()
	daemons, intervals := Wanted(s.Journal, s.Node.BootID)
	clients := map[gpu.DeviceName]gpu.MPSDirs{}
	for _, g := range r.Holdings {
		if interval := intervals[g.GPU]; interval != "" {
			s.Node.setInterval(g.GPU, interval)
		}
		name := DaemonOf(r, g)
		if name == "" {
			continue
		}
		if i, ok := s.Node.isPartitionThere(g.Base()); !ok || i != given[g.Device].Instance {
			return nil, fmt.Errorf("%s is to be on %+v, which is %+v", name, given[g.Device].Instance, i)
		}
		if err := s.Node.startDaemon(name, daemons[name]); err != nil {
			return nil, err
		}
		clients[g.Device] = gpu.MPSDirs{PipeDir: pipeDir(name)}
	}
	return clients, nil
}

// EnsureUnshared implements prepare.Sharing: daemons and intervals end in Leave.
func (s *Sharing) EnsureUnshared(ctx context.Context, _ ...gpu.UUID) error {
	unlock, err := s.begin(ctx, "unshared", holding.Record{})
	if err != nil {
		return err
	}
	unlock()
	return nil
}

// AwaitDaemonEnds returns at once: daemons end in Leave.
func (s *Sharing) AwaitDaemonEnds(context.Context, gpu.UUID) error { return nil }

// Leave implements prepare.Sharing.
func (s *Sharing) Leave(ctx context.Context, r holding.Record) error {
	unlock, err := s.begin(ctx, "leave", r)
	if err != nil {
		return err
	}
	defer unlock()
	daemons, intervals := Wanted(s.Journal, s.Node.BootID)
	for name, d := range s.Node.Daemons() {
		of := func(d gpu.Device) bool { return slices.Contains(r.GPUs(), d.Parent()) }
		if _, wanted := daemons[name]; !wanted && slices.ContainsFunc(d.On, of) {
			if err := s.Node.stopDaemon(name); err != nil {
				return err
			}
		}
	}
	for _, uuid := range r.GPUs() {
		s.Node.setInterval(uuid, intervals[uuid])
	}
	return nil
}

func (s *Sharing) begin(ctx context.Context, op string, r holding.Record) (unlock func(), _ error) {
	select {
	case s.settling <- struct{}{}:
		unlock = func() { <-s.settling }
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if s.Fail != nil {
		if err := s.Fail(ctx, op, r); err != nil {
			unlock()
			return nil, err
		}
	}
	return unlock, nil
}

// DaemonOf is the name of the MPS daemon that the holding needs; empty for none.
func DaemonOf(r holding.Record, g holding.Holding) string {
	switch {
	case g.Admin || g.MPS == nil:
		return ""
	case g.Share == nil:
		return "claim-" + r.ClaimUID
	default:
		return fmt.Sprintf("%s-%s-%d", g.GPU, g.Partition.Profile, g.Partition.Start)
	}
}

// Wanted returns the needs of claims that were prepared in the boot and stay:
// MPS daemons by name, and time slices.
func Wanted(j *journal.Journal, bootID string) (map[string]Daemon, map[gpu.UUID]string) {
	daemons, intervals := map[string]Daemon{}, map[gpu.UUID]string{}
	for _, c := range j.Claims() {
		for _, g := range c.Holdings {
			if !c.IsOf(bootID) || c.Phase >= holding.Leaving || g.Admin {
				continue
			}
			if g.TimeSlice != "" {
				intervals[g.GPU] = g.TimeSlice
			}
			if g.Replica != nil {
				intervals[g.GPU] = "of the policy"
			}
			if name := DaemonOf(c.Record, g); name != "" {
				d := daemons[name]
				if !slices.Contains(d.On, g.Base()) {
					d.On = append(d.On, g.Base())
				}
				daemons[name] = d
			}
		}
	}
	return daemons, intervals
}

// Daemons are the MPS daemons that run, by name.
func (n *Node) Daemons() map[string]Daemon {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.daemons)
}

// Intervals are the time slices that were set, by GPU.
func (n *Node) Intervals() map[gpu.UUID]string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.intervals)
}

func pipeDir(daemon string) string { return filepath.Join("/run/tessera/mps/d", daemon, "pipe") }

// isPartitionThere returns the instance that a partition is; a whole GPU is always
// there.
func (n *Node) isPartitionThere(d gpu.Device) (gpu.Instance, bool) {
	p, ok := d.(gpu.Partition)
	if !ok {
		return gpu.Instance{}, true
	}
	return n.instance(p)
}

func (n *Node) startDaemon(name string, d Daemon) error {
	if err := os.MkdirAll(filepath.Join(n.Root, pipeDir(name)), 0o755); err != nil {
		return err
	}
	n.mu.Lock()
	n.daemons[name] = d
	n.mu.Unlock()
	n.step("mps.started")
	return nil
}

func (n *Node) stopDaemon(name string) error {
	n.mu.Lock()
	delete(n.daemons, name)
	n.mu.Unlock()
	if err := os.RemoveAll(filepath.Dir(filepath.Join(n.Root, pipeDir(name)))); err != nil {
		return err
	}
	n.step("mps.stopped")
	return nil
}

// setInterval sets a GPU's time slice, or restores the original one.
func (n *Node) setInterval(uuid gpu.UUID, interval string) {
	n.mu.Lock()
	changed := n.intervals[uuid] != interval
	if interval == "" {
		delete(n.intervals, uuid)
	} else {
		n.intervals[uuid] = interval
	}
	n.mu.Unlock()
	if changed {
		n.step("timeslice.set")
	}
}

// mps are the edits of a client.
func (n *Node) mps(c *gpu.MPSClient) (specs.ContainerEdits, error) {
	if c == nil {
		return specs.ContainerEdits{}, nil
	}
	if _, err := os.Stat(filepath.Join(n.Root, c.PipeDir)); err != nil {
		return specs.ContainerEdits{}, err
	}
	return specs.ContainerEdits{
		Env:    []string{fmt.Sprintf("MPS=%d%% %vMi", c.ThreadPercentage, c.MemoryMiB)},
		Mounts: []*specs.Mount{{HostPath: c.PipeDir, ContainerPath: "/tmp/nvidia-mps"}},
	}, nil
}
