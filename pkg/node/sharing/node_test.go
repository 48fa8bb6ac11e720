package sharing_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

var (
	_ sharing.Hardware = (*nvml.Session)(nil)
	_ sharing.Daemons  = (*mps.Client)(nil)
)

// node is a plugin's Manager with the journal and the machine below.
type node struct {
	*sharing.Manager
	machine *machine
	journal *journal.Journal
	dir     string
	boot    string
	// unwatch ends Watch, which runs while Run doesn't.
	unwatch func()
}

func newNode(t testing.TB, m *machine) *node {
	return start(t, m, t.TempDir(), "boot-1", nil)
}

func start(t testing.TB, m *machine, dir, boot string, step func(string)) *node {
	t.Helper()
	return startWith(t, m, dir, boot, sharing.Config{Steps: failpoint.Call(step), ExclusiveProcess: m.exclusive})
}

func startWith(t testing.TB, m *machine, dir, boot string, o sharing.Config) *node {
	t.Helper()
	j, err := journal.Open(dir, o.Steps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	o.Journal, o.BootID, o.Daemons, o.Registerer = j, boot, m, prometheus.NewRegistry()
	o.Prepared = m.specs()
	n := &node{machine: m, journal: j, dir: dir, boot: boot, Manager: sharing.New(o)}
	n.SetClosedFor(time.Millisecond)
	n.SetHardware(m, m.smi)
	n.watch(t)
	return n
}

// watch has the Manager know the daemons, without Run.
func (n *node) watch(t testing.TB) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { n.Watch(ctx) })
	n.unwatch = func() { cancel(); wg.Wait() }
	t.Cleanup(n.unwatch)
}

// end ends the plugin.
func (n *node) end() {
	n.unwatch()
	n.journal.Close()
}

// leaveHost is LeaveHost, which is called after Run.
func (n *node) leaveHost(t testing.TB) error {
	n.unwatch()
	defer n.watch(t)
	return n.LeaveHost(t.Context())
}

// restart does the steps of a new start of the plugin.
func (n *node) restart(t testing.TB, boot string) *node {
	t.Helper()
	n.end()
	again := start(t, n.machine, n.dir, boot, nil)
	again.recover(t)
	return again
}

// restartAway is restart without the supervisor.
func (n *node) restartAway(t *testing.T) *node {
	n.end()
	again := start(t, n.machine, n.dir, "boot-1", nil)
	if err := again.Recover(t.Context()); !errors.Is(err, mps.ErrUnavailable) {
		t.Errorf("recover without a supervisor that is needed: got %v", err)
	}
	return again
}

// recover is Recover, and then what prepare's Recover does.
func (n *node) recover(t testing.TB) {
	t.Helper()
	if err := n.Recover(t.Context()); err != nil {
		t.Errorf("recover: %v", err)
	}
	for _, r := range n.journal.Claims().Records() {
		if r.BootID == n.boot {
			if _, err := n.Join(t.Context(), r, given(r)); err != nil {
				t.Errorf("join %s: %v", r.ClaimUID, err)
			}
		}
	}
}

// run runs Run until the returned function is called, and has settings checked once a minute.
func (n *node) run(t *testing.T) (end func()) {
	n.unwatch()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { n.runChecked(ctx) })
	return func() { cancel(); wg.Wait(); n.watch(t) }
}

// runChecked runs Run, and CheckSettings once a minute.
func (n *node) runChecked(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { wait.UntilWithContext(ctx, func(context.Context) { n.CheckSettings() }, time.Minute) })
	n.Run(ctx)
}

// given is the answer of the partitions' Manager.
func given(r holding.Record) map[gpu.Partition]gpu.Instance {
	all := map[gpu.Partition]gpu.Instance{}
	for _, g := range r.Holdings {
		if p, ok := g.Base().(gpu.Partition); ok {
			all[p] = gpu.Instance{UUID: gpu.UUID(fmt.Sprintf("MIG-%s-%d", p.GPU[4:12], p.Placement.Start))}
		}
	}
	return all
}

// hold is the first half of a prepare: the claim's record.
func (n *node) hold(t testing.TB, r holding.Record) holding.Record {
	t.Helper()
	n.journal.ResetPhase(r.ClaimUID)
	r.BootID = n.boot
	if err := n.journal.Put(r); err != nil {
		t.Fatal(err)
	}
	return r
}

func (n *node) prepare(t testing.TB, r holding.Record) map[string]gpu.MPSDirs {
	t.Helper()
	r = n.hold(t, r)
	clients, err := n.Join(t.Context(), r, given(r))
	if err != nil {
		t.Fatalf("join %s: %v", r.ClaimUID, err)
	}
	n.machine.setSpec(r.ClaimUID, true)
	return clients
}

func (n *node) unprepare(t testing.TB, uid string) {
	t.Helper()
	if err := n.giveUp(t.Context(), uid); err != nil {
		t.Errorf("leave %s: %v", uid, err)
	}
}

func (n *node) giveUp(ctx context.Context, uid string) error {
	r, _ := n.journal.Claim(uid)
	n.machine.setSpec(uid, false)
	n.journal.AdvancePhase(uid, holding.Leaving)
	if err := n.Leave(ctx, r.Record); err != nil {
		return err
	}
	return n.journal.Delete(uid)
}

// claim is a record without its boot.
func claim(uid string, grants ...holding.Holding) holding.Record {
	return holding.Record{ClaimUID: uid, Namespace: "default", Name: uid, Holdings: grants}
}

func name(uuid gpu.UUID) string { return "gpu-" + string(uuid[4:12]) }

// share is number n of four of a GPU.
func share(uuid gpu.UUID, n int) holding.Holding {
	return holding.Holding{
		Device: gpu.DeviceName(fmt.Sprintf("%s-mps4-%d", name(uuid), n)), GPU: uuid,
		Share: &holding.Part{Count: 4, Number: n}, MPS: &holding.MPS{ThreadPercentage: 25, MemoryMiB: 1000},
	}
}

// some is part of a GPU as a claim asked for it.
func some(uuid gpu.UUID, threads int, mib int64) holding.Holding {
	return holding.Holding{
		Device: gpu.DeviceName(name(uuid) + "-mps"), GPU: uuid,
		Share: &holding.Part{}, MPS: &holding.MPS{ThreadPercentage: threads, MemoryMiB: mib},
	}
}

// ofPartition is a share of the partition at a memory slice.
func ofPartition(uuid gpu.UUID, at int) holding.Holding {
	return holding.Holding{
		Device: gpu.DeviceName(fmt.Sprintf("%s-mig-1g18gb-%d-mps", name(uuid), at)), GPU: uuid, Partition: holding.Partition{Profile: "1g.18gb", Start: at, Size: 1},
		Share: &holding.Part{}, MPS: &holding.MPS{ThreadPercentage: 50, MemoryMiB: 500},
	}
}

func whole(uuid gpu.UUID) holding.Holding {
	return holding.Holding{Device: gpu.DeviceName(name(uuid)), GPU: uuid}
}

func wholeMPS(uuid gpu.UUID, mib int64) holding.Holding {
	g := whole(uuid)
	g.MPS = &holding.MPS{ThreadPercentage: 50, MemoryMiB: mib}
	return g
}

func wholeSlice(uuid gpu.UUID, interval string) holding.Holding {
	g := whole(uuid)
	g.TimeSlice = interval
	return g
}

func replica(uuid gpu.UUID, n int) holding.Holding {
	return holding.Holding{Device: gpu.DeviceName(fmt.Sprintf("%s-ts4-%d", name(uuid), n)), GPU: uuid, Replica: &holding.Part{Count: 4, Number: n}}
}

func admin(g holding.Holding) holding.Holding {
	g.Admin = true
	return g
}

// is is how a machine is to be.
type is struct {
	Daemons   []mps.Daemon
	Modes     map[gpu.UUID]nvml.ComputeMode // other than the default
	Intervals map[gpu.UUID]string           // other than the default
	Settings  []holding.Settings
}

func (n *node) check(t testing.TB, want is) {
	t.Helper()
	n.machine.mu.Lock()
	got := is{Modes: map[gpu.UUID]nvml.ComputeMode{}, Intervals: map[gpu.UUID]string{}, Settings: n.journal.AllSettings()}
	for _, name := range slices.Sorted(maps.Keys(n.machine.daemons)) {
		got.Daemons = append(got.Daemons, n.machine.daemons[name].Daemon)
	}
	for uuid, mode := range n.machine.modes {
		if mode != nvml.ComputeDefault {
			got.Modes[uuid] = mode
		}
	}
	for uuid, interval := range n.machine.intervals {
		if interval != "Default" {
			got.Intervals[uuid] = interval
		}
	}
	faults := n.machine.faults
	n.machine.mu.Unlock()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("the machine (-want +got):\n%s", diff)
	}
	for _, f := range faults {
		t.Error(f)
	}
}

func changedMode(uuid gpu.UUID) holding.Settings {
	return holding.Settings{GPU: uuid, BootID: "boot-1", ComputeModeBefore: "default"}
}

func changedSlice(uuid gpu.UUID, before string) holding.Settings {
	return holding.Settings{GPU: uuid, BootID: "boot-1", TimeSliceBefore: before}
}

var exclusive0 = map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeExclusiveProcess}

// closed0 is how the first GPU is while its daemon is away.
var closed0 = is{
	Modes:    map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeProhibited},
	Settings: []holding.Settings{{GPU: gpu0, BootID: "boot-1", ComputeModeBefore: "default", Closed: true}},
}

// daemonOf0 is the first GPU's with a claim's share.
var daemonOf0 = []mps.Daemon{{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}}}

func wantError(t testing.TB, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Error("no error")
		return
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q doesn't say %q", err, part)
		}
	}
}
