package sharing_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

var (
	_ sharing.Hardware = (*nvml.Session)(nil)
	_ sharing.Daemons  = (*mps.Client)(nil)
	_ prepare.Sharing  = (*sharing.Manager)(nil)
)

// node is a plugin's Manager with the journal and the machine below.
type node struct {
	*sharing.Manager
	machine *machine
	journal *journal.Journal
	claims  *holding.Claims
	dir     string
	boot    string
}

func newNode(t testing.TB, m *machine) *node {
	return start(t, m, t.TempDir(), "boot-1", nil)
}

func start(t testing.TB, m *machine, dir, boot string, step func(string)) *node {
	t.Helper()
	return startWith(t, m, dir, boot, sharing.Options{Step: step, ExclusiveProcess: m.exclusive})
}

func startWith(t testing.TB, m *machine, dir, boot string, o sharing.Options) *node {
	t.Helper()
	j, err := journal.Open(dir, o.Step)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	o.Journal, o.Claims, o.BootID, o.Daemons, o.Remains, o.Registerer = j, holding.NewClaims(j), boot, m, m.remains, prometheus.NewRegistry()
	n := &node{machine: m, journal: j, claims: o.Claims, dir: dir, boot: boot, Manager: sharing.New(o)}
	n.SetClosedFor(time.Millisecond)
	n.SetHardware(m, m.smi)
	return n
}

// restart does the steps of a new start of the plugin.
func (n *node) restart(t testing.TB, boot string) *node {
	t.Helper()
	n.journal.Close()
	again := start(t, n.machine, n.dir, boot, nil)
	again.recover(t)
	return again
}

// recover is Recover, and then what prepare's Recover does.
func (n *node) recover(t testing.TB) {
	t.Helper()
	if err := n.Recover(t.Context()); err != nil {
		t.Errorf("recover: %v", err)
	}
	for _, r := range n.journal.All() {
		if r.BootID == n.boot {
			if _, err := n.Join(t.Context(), r, given(r)); err != nil {
				t.Errorf("join %s: %v", r.ClaimUID, err)
			}
		}
	}
}

// given is the answer of the partitions' Manager.
func given(r holding.Record) map[gpu.DeviceName]gpu.Prepared {
	all := map[gpu.DeviceName]gpu.Prepared{}
	for _, g := range r.Holdings {
		if p, ok := g.Base().(gpu.Partition); ok {
			uuid := gpu.UUID(fmt.Sprintf("MIG-%s-%d", p.GPU[4:12], p.Placement.Start))
			all[g.Device] = gpu.Prepared{Device: g.Of(), Instance: gpu.Instance{UUID: uuid}}
		}
	}
	return all
}

// hold is the first half of a prepare: the claim's record.
func (n *node) hold(t testing.TB, r holding.Record) holding.Record {
	t.Helper()
	n.claims.SetStaying(r.ClaimUID)
	r.BootID = n.boot
	if err := n.journal.Put(r); err != nil {
		t.Fatal(err)
	}
	return r
}

func (n *node) prepare(t testing.TB, r holding.Record) map[gpu.DeviceName]*gpu.MPSClient {
	t.Helper()
	r = n.hold(t, r)
	clients, err := n.Join(t.Context(), r, given(r))
	if err != nil {
		t.Fatalf("join %s: %v", r.ClaimUID, err)
	}
	return clients
}

func (n *node) unprepare(t testing.TB, uid string) {
	t.Helper()
	if err := n.giveUp(t.Context(), uid); err != nil {
		t.Errorf("leave %s: %v", uid, err)
	}
}

func (n *node) giveUp(ctx context.Context, uid string) error {
	r, _ := n.journal.Get(uid)
	n.claims.SetLeaving(uid)
	if err := n.Leave(ctx, r); err != nil {
		return err
	}
	err := n.journal.Delete(uid)
	n.claims.SetStaying(uid)
	return err
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

// TestWanted: the claims' grants → daemons and settings; and nothing once they
// are gone.
func TestWanted(t *testing.T) {
	both := map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeExclusiveProcess, gpu1: nvml.ComputeExclusiveProcess}
	for name, tc := range map[string]struct {
		claims []holding.Record
		policy map[gpu.UUID]string
		want   is
	}{
		"nothing":   {},
		"whole GPU": {claims: []holding.Record{claim("a", whole(gpu0))}},
		"equal shares of four claims": {
			claims: []holding.Record{claim("a", share(gpu0, 0)), claim("b", share(gpu0, 1)), claim("c", share(gpu0, 2)), claim("d", share(gpu0, 3))},
			want: is{
				Daemons: []mps.Daemon{{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}}},
				Modes:   exclusive0, Settings: []holding.Settings{changedMode(gpu0)},
			},
		},
		"the loosest limit binds the daemon": {
			claims: []holding.Record{claim("a", some(gpu0, 30, 10240)), claim("b", some(gpu0, 50, 20480)), claim("c", some(gpu0, 20, 5))},
			want: is{
				Daemons: []mps.Daemon{{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 50, MemoryMiB: []int64{20480}}},
				Modes:   exclusive0, Settings: []holding.Settings{changedMode(gpu0)},
			},
		},
		"no limit is the loosest": {
			claims: []holding.Record{claim("a", some(gpu0, 30, 10240)), claim("b", some(gpu0, 0, 0))},
			want: is{
				Daemons: []mps.Daemon{{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}}},
				Modes:   exclusive0, Settings: []holding.Settings{changedMode(gpu0)},
			},
		},
		"shares of two GPUs": {
			claims: []holding.Record{claim("a", share(gpu0, 0), share(gpu1, 0))},
			want: is{
				Daemons: []mps.Daemon{
					{Name: "gpu-11111111", Devices: []gpu.UUID{gpu1}, ThreadPercentage: 25, MemoryMiB: []int64{1000}},
					{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}},
				},
				Modes: both, Settings: []holding.Settings{changedMode(gpu1), changedMode(gpu0)},
			},
		},
		"shares of partitions leave the mode alone": {
			claims: []holding.Record{claim("a", ofPartition(gpu0, 0)), claim("b", ofPartition(gpu0, 0)), claim("c", ofPartition(gpu0, 3))},
			want: is{Daemons: []mps.Daemon{
				{Name: "gpu-980fb007-mig-1g18gb-0", Devices: []gpu.UUID{"MIG-980fb007-0"}, ThreadPercentage: 50, MemoryMiB: []int64{500}},
				{Name: "gpu-980fb007-mig-1g18gb-3", Devices: []gpu.UUID{"MIG-980fb007-3"}, ThreadPercentage: 50, MemoryMiB: []int64{500}},
			}},
		},
		"MPS of one claim over two GPUs, in its order": {
			claims: []holding.Record{claim("a", wholeMPS(gpu0, 100), wholeMPS(gpu1, 0))},
			want: is{
				Daemons: []mps.Daemon{{Name: "claim-a", Devices: []gpu.UUID{gpu0, gpu1}, ThreadPercentage: 50, MemoryMiB: []int64{100, 0}}},
				Modes:   both, Settings: []holding.Settings{changedMode(gpu1), changedMode(gpu0)},
			},
		},
		"admin access needs nothing": {claims: []holding.Record{claim("a", admin(share(gpu0, 0)), admin(wholeSlice(gpu1, "Long")))}},
		"a claim's time slice": {
			claims: []holding.Record{claim("a", wholeSlice(gpu0, "Long"))},
			want:   is{Intervals: map[gpu.UUID]string{gpu0: "Long"}, Settings: []holding.Settings{changedSlice(gpu0, "Default")}},
		},
		"a claim's default":         {claims: []holding.Record{claim("a", wholeSlice(gpu0, "Default"))}},
		"replicas without a policy": {claims: []holding.Record{claim("a", replica(gpu0, 0)), claim("b", replica(gpu0, 1))}},
		"replicas": {
			claims: []holding.Record{claim("a", replica(gpu0, 0)), claim("b", replica(gpu0, 1))},
			policy: map[gpu.UUID]string{gpu0: "Short", gpu1: "Long"},
			want:   is{Intervals: map[gpu.UUID]string{gpu0: "Short"}, Settings: []holding.Settings{changedSlice(gpu0, "Default")}},
		},
		"a policy's default": {claims: []holding.Record{claim("a", replica(gpu0, 0))}, policy: map[gpu.UUID]string{gpu0: "Default"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newMachine())
			n.SetTimeSlices(tc.policy)
			for range 2 {
				for _, r := range tc.claims {
					n.prepare(t, r)
				}
				n.check(t, tc.want)
			}
			n = n.restart(t, "boot-1")
			n.SetTimeSlices(tc.policy)
			n.check(t, tc.want)
			for _, r := range tc.claims {
				n.unprepare(t, r.ClaimUID)
			}
			n.check(t, is{})
			if got, _ := filepath.Glob(filepath.Join(n.dir, "settings", "*")); len(got) > 0 {
				t.Errorf("files left: %v", got)
			}
		})
	}
}

func TestClients(t *testing.T) {
	n := newNode(t, newMachine())
	r := claim("a", share(gpu0, 1), ofPartition(gpu1, 0), admin(share(gpu1, 2)))
	want := map[gpu.DeviceName]*gpu.MPSClient{
		"gpu-980fb007-mps4-1":           {PipeDir: "/run/d/gpu-980fb007/pipe"},
		"gpu-11111111-mig-1g18gb-0-mps": {PipeDir: "/run/d/gpu-11111111-mig-1g18gb-0/pipe"},
	}
	if diff := cmp.Diff(want, n.prepare(t, r)); diff != "" {
		t.Errorf("clients (-want +got):\n%s", diff)
	}
	if got := n.prepare(t, claim("b", whole(gpu1))); len(got) > 0 {
		t.Errorf("clients of a whole GPU: %v", got)
	}
}

// TestBoundsFollowTheClaims while some come and go.
func TestBoundsFollowTheClaims(t *testing.T) {
	n := newNode(t, newMachine())
	bound := func() mps.Daemon {
		n.machine.mu.Lock()
		defer n.machine.mu.Unlock()
		return n.machine.daemons["gpu-980fb007"].Daemon
	}
	n.prepare(t, claim("a", some(gpu0, 30, 100)))
	n.prepare(t, claim("b", some(gpu0, 60, 50)))
	if got := bound(); got.ThreadPercentage != 60 || got.MemoryMiB[0] != 100 {
		t.Errorf("two claims: %+v", got)
	}
	n.unprepare(t, "b")
	if got := bound(); got.ThreadPercentage != 30 || got.MemoryMiB[0] != 100 {
		t.Errorf("one claim: %+v", got)
	}
	before := n.machine.count("ensure")
	n.prepare(t, claim("c", some(gpu0, 10, 10)))
	n.machine.do(func() { n.machine.away = true })
	n.unprepare(t, "c") // the daemon stays as it is: nobody has to be asked
	if got := n.machine.count("ensure") - before; got != 1 {
		t.Errorf("asked the supervisor %d times, want once", got)
	}
}

// TestFoundSettings: settings of others from before.
func TestFoundSettings(t *testing.T) {
	for name, tc := range map[string]struct {
		mode     nvml.ComputeMode
		interval string
		claim    holding.Record
		during   is
	}{
		"exclusive already": {
			mode: nvml.ComputeExclusiveProcess, interval: "Default", claim: claim("a", wholeMPS(gpu0, 0)),
			during: is{Modes: exclusive0},
		},
		"long, and the claim wants short": {
			mode: nvml.ComputeDefault, interval: "Long", claim: claim("a", wholeSlice(gpu0, "Short")),
			during: is{Intervals: map[gpu.UUID]string{gpu0: "Short"}, Settings: []holding.Settings{changedSlice(gpu0, "Long")}},
		},
		"long already": {
			mode: nvml.ComputeDefault, interval: "Long", claim: claim("a", wholeSlice(gpu0, "Long")),
			during: is{Intervals: map[gpu.UUID]string{gpu0: "Long"}},
		},
		"long, and the claim wants the default": {
			mode: nvml.ComputeDefault, interval: "Long", claim: claim("a", wholeSlice(gpu0, "Default")),
			during: is{Intervals: map[gpu.UUID]string{gpu0: "Long"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine()
			m.modes[gpu0], m.intervals[gpu0] = tc.mode, tc.interval
			n := newNode(t, m)
			n.prepare(t, tc.claim)
			m.do(func() { clear(m.daemons) })
			n.check(t, tc.during)
			n.unprepare(t, "a")
			if m.modes[gpu0] != tc.mode || m.intervals[gpu0] != tc.interval || len(n.journal.AllSettings()) > 0 {
				t.Errorf("afterwards: %s, %s, %v", m.modes[gpu0], m.intervals[gpu0], n.journal.AllSettings())
			}
		})
	}
}

func TestProhibited(t *testing.T) {
	m := newMachine()
	m.modes[gpu0] = nvml.ComputeProhibited
	n := newNode(t, m)
	_, err := n.Join(t.Context(), n.hold(t, claim("a", share(gpu0, 0))), nil)
	wantError(t, err, "prohibited", "nvidia-smi -i "+string(gpu0), string(gpu0))
	n.check(t, is{Modes: map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeProhibited}})
	n.unprepare(t, "a")
	n.check(t, is{Modes: map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeProhibited}})
}

// TestChangedMeanwhile: a mode that another program sets while a daemon runs
// stays.
func TestChangedMeanwhile(t *testing.T) {
	n := newNode(t, newMachine())
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.machine.do(func() { n.machine.modes[gpu0] = nvml.ComputeProhibited })
	n.unprepare(t, "a")
	n.check(t, is{Modes: map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeProhibited}})
}

// TestModeUnchanged: --mps-compute-mode=unchanged, also where it was another before.
func TestModeUnchanged(t *testing.T) {
	m := newMachine()
	n := newNode(t, m)
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.journal.Close()
	m.exclusive = false
	m.faults = nil
	n = startWith(t, m, n.dir, "boot-1", sharing.Options{})
	n.recover(t)
	m.faults = nil // the mode is put back beside the daemon: that is what is asked for
	n.check(t, is{Daemons: []mps.Daemon{{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}}}})
	n.unprepare(t, "a")
	n.prepare(t, claim("b", share(gpu0, 0)))
	if m.modes[gpu0] != nvml.ComputeDefault {
		t.Errorf("mode: %s", m.modes[gpu0])
	}
	n.unprepare(t, "b")
	n.check(t, is{})
}

func TestWithoutComputeModes(t *testing.T) {
	m := newMachine()
	m.exclusive = false // can't be
	m.fault = func(call string) error {
		if strings.HasPrefix(call, "mode") {
			return nvml.ErrNotSupported
		}
		return nil
	}
	n := startWith(t, m, t.TempDir(), "boot-1", sharing.Options{ExclusiveProcess: true})
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.unprepare(t, "a")
	n.check(t, is{})
}

// TestFaultsOfTheMachine: a call fails once; the next attempt does it.
func TestFaultsOfTheMachine(t *testing.T) {
	for _, broken := range []string{"mode", "set mode", "ensure", "--list", "--set-timeslice"} {
		t.Run(broken, func(t *testing.T) {
			m := newMachine()
			n := newNode(t, m)
			n.SetTimeSlices(map[gpu.UUID]string{gpu1: "Long"})
			r := n.hold(t, claim("a", share(gpu0, 0), replica(gpu1, 0)))
			fail := errors.New("broken")
			m.fault = func(call string) error {
				if strings.HasPrefix(call, broken) {
					return fail
				}
				return nil
			}
			if _, err := n.Join(t.Context(), r, nil); !errors.Is(err, fail) && !strings.Contains(fmt.Sprint(err), "Not Supported") {
				t.Errorf("got %v", err)
			}
			m.fault = nil
			n.prepare(t, r)
			n.unprepare(t, "a")
			n.check(t, is{})
		})
	}
}

// TestPutBackLater: a claim may go although the GPU doesn't answer; a new claim
// waits until the settings are restored, and Run restores them without one.
func TestPutBackLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		n.prepare(t, claim("a", share(gpu0, 0)))
		m.fault = func(call string) error {
			if strings.HasPrefix(call, "mode") {
				return nvml.ErrLost
			}
			return nil
		}
		n.unprepare(t, "a")
		n.check(t, is{Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
		n.hold(t, claim("b", whole(gpu0)))
		err := n.EnsureUnshared(t.Context(), gpu0)
		if !errors.Is(err, nvml.ErrLost) {
			t.Errorf("a whole GPU that isn't as it was: got %v", err)
		}
		end := n.run(t)
		time.Sleep(time.Minute)
		m.mu.Lock()
		m.fault = nil
		m.mu.Unlock()
		time.Sleep(2 * time.Minute)
		end()
		n.check(t, is{})
	})
}

// run runs Run until the returned function is called.
func (n *node) run(t *testing.T) (end func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { n.Run(ctx) })
	return func() { cancel(); wg.Wait() }
}

// TestSupervisorAway: new claims fail with a remedy, prepared ones continue,
// and when it is back daemons and settings are as wanted.
func TestSupervisorAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.prepare(t, claim("b", ofPartition(gpu1, 0)))
		m.do(func() { m.away = true })
		_, err := n.Join(t.Context(), n.hold(t, claim("c", share(gpu0, 1))), nil)
		if !errors.Is(err, mps.ErrUnavailable) {
			t.Errorf("join: got %v", err)
		}
		n.unprepare(t, "c") // others need the daemon
		if err := n.giveUp(t.Context(), "a"); !errors.Is(err, mps.ErrUnavailable) {
			t.Errorf("leave: got %v", err)
		}
		n.claims.SetStaying("a")
		end := n.run(t)
		time.Sleep(time.Minute)
		m.do(func() {
			m.away = false
			clear(m.daemons) // its run directory was wiped
			m.daemons["gpu-22222222"] = mps.State{Daemon: mps.Daemon{Name: "gpu-22222222", Devices: []gpu.UUID{"GPU-2"}}}
			m.daemons["claim-x"] = mps.State{Daemon: mps.Daemon{Name: "claim-x", Devices: []gpu.UUID{"MIG-2"}}}
		})
		time.Sleep(2 * time.Minute)
		n.check(t, is{
			Daemons: []mps.Daemon{
				{Name: "gpu-11111111-mig-1g18gb-0", Devices: []gpu.UUID{"MIG-11111111-0"}, ThreadPercentage: 50, MemoryMiB: []int64{500}},
				{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}},
			},
			Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)},
		})
		end()
		n.unprepare(t, "a")
		n.unprepare(t, "b")
		n.check(t, is{})
	})
}

// TestNoSupervisorAtAll: on a node without one, claims that don't need it
// succeed, and failed ones can be released.
func TestNoSupervisorAtAll(t *testing.T) {
	m := newMachine()
	m.away = true
	n := newNode(t, m)
	if err := n.Recover(t.Context()); err != nil {
		t.Error(err)
	}
	n.prepare(t, claim("a", whole(gpu0)))
	n.unprepare(t, "a")
	_, err := n.Join(t.Context(), n.hold(t, claim("b", share(gpu0, 0))), nil)
	wantError(t, err, "tessera-mps")
	n.unprepare(t, "b")
	n.check(t, is{})
	_, _ = n.Join(t.Context(), n.hold(t, claim("c", share(gpu0, 0))), nil)
	n = n.restartAway(t)
	n.unprepare(t, "c")
	if err := n.LeaveHost(t.Context()); err != nil {
		t.Error(err)
	}
	n.check(t, is{})
}

// TestLeftDaemonOfAClaim: a daemon that an earlier plugin has left for one claim keeps
// only the GPUs that it may be on waiting for the supervisor.
func TestLeftDaemonOfAClaim(t *testing.T) {
	made := holding.MadePartition{Partition: holding.Partition{Profile: "1g.18gb", Size: 1}, Made: &holding.MadeInstance{UUID: "MIG-11111111-0"}}
	for title, c := range map[string]struct {
		devices []gpu.UUID // none: the record can't be read
		blocked []gpu.UUID
	}{
		"GPU":              {[]gpu.UUID{gpu0}, []gpu.UUID{gpu0}},
		"both GPUs":        {[]gpu.UUID{gpu0, gpu1}, []gpu.UUID{gpu0, gpu1}},
		"partition":        {[]gpu.UUID{"MIG-11111111-0"}, []gpu.UUID{gpu1}},
		"unknown instance": {[]gpu.UUID{"MIG-2"}, []gpu.UUID{gpu0, gpu1}},
		"unreadable":       {nil, []gpu.UUID{gpu0, gpu1}},
	} {
		t.Run(title, func(t *testing.T) {
			m := newMachine()
			m.away = true
			m.daemons["claim-x"] = mps.State{Daemon: mps.Daemon{Name: "claim-x", Devices: c.devices}}
			n := newNode(t, m)
			if err := n.journal.PutGPU(holding.GPURecord{GPU: gpu1, BootID: "boot-1", Partitions: []holding.MadePartition{made}}); err != nil {
				t.Fatal(err)
			}
			for _, uuid := range []gpu.UUID{gpu0, gpu1} {
				blocked := slices.Contains(c.blocked, uuid)
				_, joined := n.Join(t.Context(), n.hold(t, claim(string(uuid), replica(uuid, 0))), nil)
				for what, err := range map[string]error{
					"EnsureUnshared": n.EnsureUnshared(t.Context(), uuid), "AwaitEnds": n.AwaitEnds(t.Context(), uuid), "Join of a replica": joined,
				} {
					if errors.Is(err, mps.ErrUnavailable) != blocked || err != nil && !blocked {
						t.Errorf("%s on GPU %s: got %v, want an error: %v", what, uuid, err, blocked)
					}
				}
			}
		})
	}
}

// restartAway is restart without the supervisor.
func (n *node) restartAway(t *testing.T) *node {
	n.journal.Close()
	again := start(t, n.machine, n.dir, "boot-1", nil)
	if err := again.Recover(t.Context()); !errors.Is(err, mps.ErrUnavailable) {
		t.Errorf("recover without a supervisor that is needed: got %v", err)
	}
	return again
}

func TestDaemonFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		changes := 0
		n := startWith(t, m, t.TempDir(), "boot-1", sharing.Options{ExclusiveProcess: true, ConditionsChanged: func() { changes++ }})
		n.prepare(t, claim("a", wholeMPS(gpu0, 0), wholeMPS(gpu1, 0)))
		end := n.run(t)
		defer end()
		set := func(phase mps.Phase, restarts int) {
			m.do(func() {
				s := m.daemons["claim-a"]
				s.Phase, s.Restarts, s.Message = phase, restarts, "out of luck"
				m.daemons["claim-a"] = s
			})
			synctest.Wait()
		}
		synctest.Wait()
		for i, step := range []struct {
			phase    mps.Phase
			restarts int
			want     bool
		}{{mps.Starting, 0, false}, {mps.Running, 0, false}, {mps.Failed, 0, true}, {mps.Starting, 1, true}, {mps.Running, 1, false}} {
			set(step.phase, step.restarts)
			for _, uuid := range []gpu.UUID{gpu0, gpu1} {
				got := n.Conditions()[uuid]
				if (len(got) == 1) != step.want {
					t.Errorf("step %d: conditions %v", i, got)
				}
				for _, c := range got {
					if c.Type != gpu.MPSDaemonFailed || c.Blocks() || !strings.Contains(c.Message, "out of luck") {
						t.Errorf("condition %+v", c)
					}
				}
			}
		}
		if changes != 2 {
			t.Errorf("told of %d changes, want 2", changes)
		}
		m.do(func() {
			s := m.daemons["claim-a"]
			s.Trouble = "it has no server"
			m.daemons["claim-a"] = s
		})
		synctest.Wait()
		if got := n.Conditions()[gpu1]; len(got) != 1 || got[0].Type != gpu.MPSDaemonFailed ||
			!strings.Contains(got[0].Message, "it has no server") || !strings.Contains(got[0].Message, "delete the pods") {
			t.Errorf("a daemon without a server: %v", got)
		}
		set(mps.Failed, 2)
		n.unprepare(t, "a")
		if got := n.Conditions(); len(got) > 0 {
			t.Errorf("after the claim: %v", got)
		}
	})
}

// TestOutageIsWarnedOf: the claims of a daemon are warned once about an outage, however
// often the daemon is restarted in it, and about the next outage again.
func TestOutageIsWarnedOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		var warned []string
		n := startWith(t, m, t.TempDir(), "boot-1", sharing.Options{ExclusiveProcess: true, Warn: func(r holding.Record, reason, message string) {
			if !strings.Contains(message, string(gpu0)) || !strings.Contains(message, "restart those") && !strings.Contains(message, "delete the pods") {
				t.Errorf("message %q doesn't name the GPU or doesn't say what to do", message)
			}
			warned = append(warned, r.Namespace+"/"+r.Name+" "+reason)
		}})
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.prepare(t, claim("b", share(gpu0, 1)))
		n.prepare(t, claim("other", share(gpu1, 0)))
		end := n.run(t)
		defer end()
		pid := 7
		set := func(phase mps.Phase, restarts int, trouble string, server int) {
			m.do(func() {
				s := m.daemons["gpu-980fb007"]
				s.PID, s.Phase, s.Restarts, s.Trouble, s.ServerPID = pid, phase, restarts, trouble, server
				m.daemons["gpu-980fb007"] = s
			})
			synctest.Wait()
		}
		both := []string{"default/a MPSDaemonFailed", "default/b MPSDaemonFailed"}
		set(mps.Running, 0, "", 20)
		for _, step := range []struct {
			name string
			do   func()
			want []string
		}{
			{"no server", func() { set(mps.Running, 0, "it has no server", 0) }, both},
			{"another reason", func() { set(mps.Running, 0, "another process has the GPU", 0) }, nil},
			{"restarted", func() { set(mps.Starting, 1, "", 0) }, nil},
			{"without a server yet", func() { set(mps.Running, 1, "", 0) }, nil},
			{"which it doesn't get", func() { set(mps.Running, 1, "it has no server", 0) }, nil},
			{"another claim", func() { n.prepare(t, claim("c", share(gpu0, 2))) }, nil},
			{"in trouble again", func() { set(mps.Running, 1, "it has no server", 0) }, []string{"default/c MPSDaemonFailed"}},
			{"served", func() { set(mps.Running, 1, "", 21) }, nil},
			{"ended", func() { n.unprepare(t, "c"); set(mps.Failed, 1, "", 0) }, both},
			{"served again", func() { set(mps.Running, 2, "", 22) }, nil},
			{"replaced between two reports", func() { pid++; set(mps.Running, 3, "", 23) }, both},
			{"the same", func() { set(mps.Running, 3, "", 23) }, nil},
		} {
			warned = nil
			step.do()
			if diff := cmp.Diff(step.want, warned, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s: warned (-want +got):\n%s", step.name, diff)
			}
		}
	})
}

// TestNextDaemonIsNoOutage: a claim whose daemon starts when the last share's has
// ended, between two reports of the supervisor, isn't warned of.
func TestNextDaemonIsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.lingers = true
		var warned []string
		n := startWith(t, m, t.TempDir(), "boot-1", sharing.Options{
			ExclusiveProcess: true, Warn: func(r holding.Record, _, message string) { warned = append(warned, r.Name+": "+message) },
		})
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.unprepare(t, "a")
		time.AfterFunc(time.Second, m.end)
		n.prepare(t, claim("b", share(gpu0, 1)))
		if pid := m.daemons["gpu-980fb007"].PID; pid != 2 || len(warned) > 0 {
			t.Errorf("with daemon %d: warned %v", pid, warned)
		}
	})
}

func TestTimeSliceUnsupported(t *testing.T) {
	m := newMachine()
	changes := 0
	n := startWith(t, m, t.TempDir(), "boot-1", sharing.Options{ConditionsChanged: func() { changes++ }})
	n.SetTimeSlices(map[gpu.UUID]string{gpu0: "Long"})
	m.fault = func(call string) error {
		if strings.HasPrefix(call, "--set") {
			return errors.New("exit status 2")
		}
		return nil
	}
	for range 2 {
		_, err := n.Join(t.Context(), n.hold(t, claim("a", replica(gpu0, 0))), nil)
		wantError(t, err, "can't be set on this GPU", "Not Supported")
		n.unprepare(t, "a")
		if got := n.Conditions()[gpu0]; len(got) != 1 || got[0].Type != gpu.TimeSliceUnsupported || got[0].Blocks() {
			t.Errorf("conditions: %v", got)
		}
	}
	n.SetTimeSlices(map[gpu.UUID]string{gpu0: "Default"})
	if got := n.Conditions(); len(got) > 0 {
		t.Errorf("after the policy asks for the default: %v", got)
	}
	n.prepare(t, claim("a", replica(gpu0, 0)))
	if changes != 2 {
		t.Errorf("told of %d changes, want 2", changes)
	}
	n.unprepare(t, "a")
	n.check(t, is{})
}

// TestPolicyChanges while claims have replicas.
func TestPolicyChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		n.prepare(t, claim("a", replica(gpu0, 0)))
		for _, want := range []string{"Long", "Short", "Default", "Medium"} {
			n.SetTimeSlices(map[gpu.UUID]string{gpu0: want})
			synctest.Wait()
			m.mu.Lock()
			if got := m.intervals[gpu0]; got != want {
				t.Errorf("interval: got %s, want %s", got, want)
			}
			m.mu.Unlock()
		}
		runs := m.count("--")
		n.prepare(t, claim("b", replica(gpu0, 1)))
		if got := m.count("--"); got != runs {
			t.Errorf("nvidia-smi ran %d times for nothing", got-runs)
		}
		end()
		n = n.restart(t, "boot-1") // what policies want isn't known yet
		n.check(t, is{Intervals: map[gpu.UUID]string{gpu0: "Medium"}, Settings: []holding.Settings{changedSlice(gpu0, "Default")}})
		n.unprepare(t, "a")
		n.unprepare(t, "b")
		n.check(t, is{})
	})
}

// TestAnotherBoot: records of another boot are ignored.
func TestAnotherBoot(t *testing.T) {
	m := newMachine()
	n := newNode(t, m)
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.prepare(t, claim("b", wholeSlice(gpu1, "Long")))
	m.reboot()
	m.modes[gpu0], m.intervals[gpu1] = nvml.ComputeExclusiveProcess, "Short" // set by others since
	n = n.restart(t, "boot-2")
	others := is{Modes: exclusive0, Intervals: map[gpu.UUID]string{gpu1: "Short"}}
	n.check(t, others)
	m.do(func() { m.away = true })
	n.unprepare(t, "a") // there can't be a daemon any more
	n.unprepare(t, "b")
	n.check(t, others)
}

// TestUnreadable records keep what they may need.
func TestUnreadable(t *testing.T) {
	for name, contents := range map[string]string{"nothing can be made out": "{", "the device can be": `"device":"gpu-980fb007-mps4-0","gpu":"` + string(gpu0) + `","request":"r"`} {
		t.Run(name, func(t *testing.T) {
			m := newMachine()
			n := newNode(t, m)
			n.prepare(t, claim("a", share(gpu0, 0)))
			want := is{
				Daemons: []mps.Daemon{{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}}},
				Modes:   exclusive0, Settings: []holding.Settings{changedMode(gpu0)},
			}
			n.journal.Close()
			if err := os.WriteFile(filepath.Join(n.dir, "a.json"), []byte(contents), 0o600); err != nil {
				t.Fatal(err)
			}
			n = n.restart(t, "boot-1")
			n.check(t, want)
			u := n.journal.Unreadable()
			if len(u) != 1 {
				t.Fatalf("unreadable: %v", u)
			}
			n.claims.SetLeaving("a")
			if err := n.Leave(t.Context(), u[0].Record); err != nil {
				t.Error(err)
			}
			if err := n.journal.Delete("a"); err != nil {
				t.Error(err)
			}
			n.recover(t) // at the latest
			n.check(t, is{})
		})
	}
}

// TestUnreadableLeaves: a daemon that a claim may have had whose record can't be
// read is not left behind where there is nobody to stop it.
func TestUnreadableLeaves(t *testing.T) {
	m := newMachine()
	n := newNode(t, m)
	g := ofPartition(gpu0, 0)
	n.prepare(t, claim("a", g))
	n.journal.Close()
	if err := os.WriteFile(filepath.Join(n.dir, "a.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.away = true
	n = start(t, m, n.dir, "boot-1", nil)
	n.claims.SetLeaving("a")
	r := claim("a", g) // by the device's name; not which boot it is of
	if err := n.Leave(t.Context(), r); !errors.Is(err, mps.ErrUnavailable) {
		t.Errorf("leave: got %v", err)
	}
	m.away = false
	if err := n.Leave(t.Context(), r); err != nil {
		t.Error(err)
	}
	n.check(t, is{})
}

// TestUnreadableSettings count as what a driver starts with.
func TestUnreadableSettings(t *testing.T) {
	m := newMachine()
	n := newNode(t, m)
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.prepare(t, claim("b", wholeSlice(gpu1, "Long")))
	n.journal.Close()
	for _, uuid := range []gpu.UUID{gpu0, gpu1} {
		if err := os.WriteFile(filepath.Join(n.dir, "settings", string(uuid)+".json"), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n = n.restart(t, "boot-1")
	n.unprepare(t, "a")
	n.unprepare(t, "b")
	n.check(t, is{})
	if got := n.journal.UnreadableSettings(); len(got) > 0 {
		t.Errorf("unreadable: %v", got)
	}
}

// TestBlocked: a GPU on which a call hangs keeps nobody else waiting, and who
// waits for it stops when the time is up.
func TestBlocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		unblock := make(chan struct{})
		m.fault = func(call string) error {
			if call == "ensure gpu-980fb007-mig-1g18gb-0" {
				<-unblock
			}
			return nil
		}
		var wg sync.WaitGroup
		wg.Go(func() { n.prepare(t, claim("a", ofPartition(gpu0, 0))) })
		synctest.Wait()
		n.prepare(t, claim("b", share(gpu1, 0)))
		n.unprepare(t, "b")
		n.prepare(t, claim("c", holding.Holding{Device: "gpu-980fb007-mig-1g18gb-5", GPU: gpu0, Partition: holding.Partition{Profile: "1g.18gb", Start: 5, Size: 1}}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		d := n.hold(t, claim("d", ofPartition(gpu0, 3)))
		_, err := n.Join(ctx, d, given(d))
		wantError(t, err, "wait for another operation")
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		close(unblock)
		wg.Wait()
		n.unprepare(t, "a")
		n.unprepare(t, "c")
		n.unprepare(t, "d")
		n.check(t, is{})
	})
}

// TestManyAtOnce: claims of all kinds come and go at the same time.
func TestManyAtOnce(t *testing.T) {
	m := newMachine()
	n := newNode(t, m)
	end := n.run(t)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for range 8 {
				uid := fmt.Sprintf("claim-%d", i)
				r := claim(uid, some(gpu0, 10+i, int64(100+i)))
				switch i % 4 {
				case 1:
					r.Holdings = append(r.Holdings, ofPartition(gpu1, i%3))
				case 2:
					r.Holdings = []holding.Holding{ofPartition(gpu1, 4)}
				}
				n.prepare(t, r)
				n.unprepare(t, uid)
			}
		})
	}
	wg.Wait()
	end()
	n.check(t, is{})
}

// TestLastTwoLeaveTogether: the daemon goes, and no sooner than both have left.
func TestLastTwoLeaveTogether(t *testing.T) {
	for range 50 {
		m := newMachine()
		n := newNode(t, m)
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.prepare(t, claim("b", share(gpu0, 1)))
		var wg sync.WaitGroup
		for _, uid := range []string{"a", "b"} {
			wg.Go(func() { n.unprepare(t, uid) })
		}
		wg.Wait()
		n.check(t, is{})
	}
}

func TestTwoPartitionsInOneDaemon(t *testing.T) {
	n := newNode(t, newMachine())
	g, h := ofPartition(gpu0, 0), ofPartition(gpu0, 1)
	g.Share, h.Share = nil, nil
	r := n.hold(t, claim("a", g, h))
	_, err := n.Join(t.Context(), r, given(r))
	wantError(t, err, "one claim for each partition")
}

// TestLastShareLeavesAtOnce: nobody waits for a daemon's end but the next claim of
// the GPU, and only after it the compute mode is put back.
func TestLastShareLeavesAtOnce(t *testing.T) {
	for name, next := range map[string]struct {
		wait func(t *testing.T, n *node) error
		want is
	}{
		"whole GPU": {
			wait: func(t *testing.T, n *node) error {
				n.hold(t, claim("b", whole(gpu0)))
				err := n.EnsureUnshared(t.Context(), gpu0)
				return err
			},
		},
		"another share": {
			wait: func(t *testing.T, n *node) error {
				_, err := n.Join(t.Context(), n.hold(t, claim("b", share(gpu0, 1))), nil)
				return err
			},
			want: is{
				Daemons: []mps.Daemon{{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}}},
				Modes:   exclusive0, Settings: []holding.Settings{changedMode(gpu0)},
			},
		},
		"partition": {
			wait: func(t *testing.T, n *node) error { return n.AwaitEnds(t.Context(), gpu0) },
			want: is{Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}},
		},
		"nobody": {wait: func(*testing.T, *node) error { return nil }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine()
				m.lingers = true
				n := newNode(t, m)
				n.prepare(t, claim("a", share(gpu0, 0)))
				n.unprepare(t, "a")
				m.mu.Lock()
				if m.daemons["gpu-980fb007"].Phase != mps.Ending || m.modes[gpu0] != nvml.ComputeExclusiveProcess {
					t.Errorf("after the last share has left: %+v, mode %s", m.daemons, m.modes[gpu0])
				}
				m.mu.Unlock()
				time.AfterFunc(time.Second, m.end)
				if name == "nobody" {
					stop := n.run(t)
					time.Sleep(2 * time.Second)
					stop()
				}
				if err := next.wait(t, n); err != nil {
					t.Error(err)
				}
				n.check(t, next.want)
				m.mu.Lock()
				m.lingers = false
				m.mu.Unlock()
				n.unprepare(t, "b")
				if err := n.LeaveHost(t.Context()); err != nil {
					t.Error(err)
				}
				n.check(t, is{})
			})
		})
	}
}

// TestCrashWhileADaemonEnds: the next plugin waits for it and puts the mode back.
func TestCrashWhileADaemonEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.lingers = true
		n := newNode(t, m)
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.unprepare(t, "a")
		time.AfterFunc(time.Second, m.end)
		n = n.restart(t, "boot-1")
		n.check(t, is{})
	})
}

// closed0 is how the first GPU is while its daemon is away.
var closed0 = is{
	Modes:    map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeProhibited},
	Settings: []holding.Settings{{GPU: gpu0, BootID: "boot-1", ComputeModeBefore: "default", Closed: true}},
}

// daemonOf0 is the first GPU's with a claim's share.
var daemonOf0 = []mps.Daemon{{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}}}

// TestClosedWhileTheDaemonIsAway: a client that doesn't find its daemon is let in
// by nobody, until all those have failed that didn't find it.
func TestClosedWhileTheDaemonIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		n.SetClosedFor(2 * time.Second)
		end := n.run(t)
		n.prepare(t, claim("a", share(gpu0, 0)))
		synctest.Wait()
		open := is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}}
		n.check(t, open)
		set := func(phase mps.Phase, pid int) {
			m.do(func() {
				s := m.daemons["gpu-980fb007"]
				s.Phase, s.PID = phase, pid
				m.daemons["gpu-980fb007"] = s
			})
			synctest.Wait()
		}
		closed := closed0
		closed.Daemons = daemonOf0
		set(mps.Starting, 0)
		n.check(t, closed)
		time.Sleep(time.Minute)
		n.check(t, closed)
		set(mps.Running, 8)
		n.check(t, closed)
		time.Sleep(3 * time.Second)
		n.check(t, open)
		set(mps.Running, 9) // the changes in between were missed
		n.check(t, closed)
		// A claim that comes now waits until its clients are let in.
		n.prepare(t, claim("b", share(gpu0, 1)))
		n.check(t, open)
		set(mps.Failed, 0)
		end()
		n = n.restart(t, "boot-1") // starts it again
		n.check(t, open)
		n.unprepare(t, "a")
		n.unprepare(t, "b")
		n.check(t, is{})
	})
}

// TestClosedAndLeft: a closed GPU gets its original mode, also by a plugin that
// finds it so.
func TestClosedAndLeft(t *testing.T) {
	for name, before := range map[string]nvml.ComputeMode{"found open": nvml.ComputeDefault, "found exclusive": nvml.ComputeExclusiveProcess} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine()
				m.modes[gpu0] = before
				n := newNode(t, m)
				end := n.run(t)
				n.prepare(t, claim("a", share(gpu0, 0)))
				m.do(func() {
					m.daemons["gpu-980fb007"] = mps.State{Daemon: daemonOf0[0], Phase: mps.Failed, PipeDir: "/x"}
				})
				synctest.Wait()
				if m.modes[gpu0] != nvml.ComputeProhibited {
					t.Errorf("mode: %s", m.modes[gpu0])
				}
				end()
				n.journal.Close()
				n = start(t, m, n.dir, "boot-1", nil)
				n.unprepare(t, "a")
				if err := n.LeaveHost(t.Context()); err != nil {
					t.Error(err)
				}
				if m.modes[gpu0] != before || len(n.journal.AllSettings()) > 0 {
					t.Errorf("afterwards: mode %s, %+v", m.modes[gpu0], n.journal.AllSettings())
				}
			})
		})
	}
}

// TestModeOfAnAdministrator is never undone, whichever it is. A mode that a reset
// of the GPU took away, with the MPS server, is set again.
func TestModeOfAnAdministrator(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		synctest.Wait() // the supervisor's first report has no daemon that the next claim needs
		n.prepare(t, claim("a", share(gpu0, 0)))
		server := func(pid int) {
			m.do(func() {
				s := m.daemons["gpu-980fb007"]
				s.ServerPID = pid
				m.daemons["gpu-980fb007"] = s
			})
			synctest.Wait()
		}
		server(20)
		for _, mode := range []nvml.ComputeMode{nvml.ComputeProhibited, nvml.ComputeDefault} {
			m.do(func() { m.modes[gpu0] = mode })
			time.Sleep(3 * time.Minute)
			n.prepare(t, claim("b", ofPartition(gpu1, 0)))
			if m.modes[gpu0] != mode {
				t.Errorf("%s was undone: %s", mode, m.modes[gpu0])
			}
		}
		got := n.Conditions()[gpu0]
		if len(got) != 1 || got[0].Type != gpu.ComputeModeChanged || got[0].Blocks() || !strings.Contains(got[0].Message, "-c EXCLUSIVE_PROCESS") {
			t.Errorf("conditions: %v", got)
		}
		server(0)
		m.faults = nil // a mode of the administrator's lets others in beside the daemon
		server(21)
		time.Sleep(3 * time.Minute)
		if got := n.Conditions()[gpu0]; m.modes[gpu0] != nvml.ComputeDefault || len(got) != 1 {
			t.Errorf("with another server: mode %s, conditions %v", m.modes[gpu0], got)
		}
		end()
		n = n.restart(t, "boot-1")
		end = n.run(t)
		server(22)
		if got := n.Conditions()[gpu0]; m.modes[gpu0] != nvml.ComputeDefault || len(got) != 1 {
			t.Errorf("with another server and plugin: mode %s, conditions %v", m.modes[gpu0], got)
		}
		m.do(func() { m.modes[gpu0] = nvml.ComputeExclusiveProcess })
		time.Sleep(3 * time.Minute)
		if got := n.Conditions()[gpu0]; len(got) > 0 {
			t.Errorf("set back by the administrator: conditions %v", got)
		}
		m.do(func() { // the GPU is reset: all at once, and nobody sees it without a server
			m.modes[gpu0] = nvml.ComputeDefault
			s := m.daemons["gpu-980fb007"]
			s.ServerPID = 23
			m.daemons["gpu-980fb007"] = s
		})
		synctest.Wait()
		if got := n.Conditions()[gpu0]; m.modes[gpu0] != nvml.ComputeExclusiveProcess || len(got) > 0 {
			t.Errorf("after a reset: mode %s, conditions %v", m.modes[gpu0], got)
		}
		m.faults = nil // as above
		end()
		n.unprepare(t, "a")
		n.unprepare(t, "b")
		n.check(t, is{})
	})
}

// TestResetThatNobodySaw: a mode that a reset took away while this plugin, or its access
// to the driver, was not there is set again. It isn't taken for an administrator's.
func TestResetThatNobodySaw(t *testing.T) {
	for title, unseen := range map[string]func(t *testing.T, n *node, reset func()) *node{
		"plugin down": func(t *testing.T, n *node, reset func()) *node {
			reset()
			return n.restart(t, "boot-1")
		},
		"driver reloaded": func(t *testing.T, n *node, reset func()) *node {
			n.SetHardware(nil, nil)
			reset()
			synctest.Wait()
			n.SetHardware(n.machine, n.machine.smi)
			n.recover(t)
			return n
		},
	} {
		t.Run(title, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine()
				n := newNode(t, m)
				if title == "driver reloaded" {
					defer n.run(t)()
				}
				n.prepare(t, claim("a", share(gpu0, 0)))
				n = unseen(t, n, func() {
					m.do(func() {
						m.modes[gpu0] = nvml.ComputeDefault
						s := m.daemons["gpu-980fb007"]
						s.ServerPID = 23
						m.daemons["gpu-980fb007"] = s
					})
				})
				n.check(t, is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
				if got := n.Conditions()[gpu0]; len(got) > 0 {
					t.Errorf("conditions: %v", got)
				}
			})
		})
	}
}

// TestResetBeforeTheReport: a mode that a reset took away is set again, and isn't taken
// for an administrator's, when it is read before the supervisor has reported that the
// MPS server is another one.
func TestResetBeforeTheReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		synctest.Wait()
		n.prepare(t, claim("a", share(gpu0, 0)))
		server := func(pid int) {
			s := m.daemons["gpu-980fb007"]
			s.ServerPID = pid
			m.daemons["gpu-980fb007"] = s
		}
		m.do(func() { server(20) })
		synctest.Wait()
		m.mu.Lock() // not with do: the watch doesn't report it
		m.modes[gpu0] = nvml.ComputeDefault
		server(23)
		m.mu.Unlock()
		n.prepare(t, claim("b", share(gpu0, 1)))
		if got := n.Conditions()[gpu0]; m.modes[gpu0] != nvml.ComputeExclusiveProcess || len(got) > 0 {
			t.Errorf("mode %s, conditions %v", m.modes[gpu0], got)
		}
		end()
		n.unprepare(t, "a")
		n.unprepare(t, "b")
		n.check(t, is{})
	})
}

// TestIntervalIsVerified: an interval that a reset of the GPU lost is set again,
// one that another program has set stays.
func TestIntervalIsVerified(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		n.prepare(t, claim("a", wholeSlice(gpu0, "Long")))
		for set, want := range map[string]string{"Default": "Long", "Short": "Short"} {
			m.do(func() { m.intervals[gpu0] = set })
			time.Sleep(2 * time.Minute)
			m.mu.Lock()
			if got := m.intervals[gpu0]; got != want {
				t.Errorf("after somebody, or something, has set %s: %s, want %s", set, got, want)
			}
			m.intervals[gpu0] = "Long"
			m.mu.Unlock()
		}
		end()
		n.unprepare(t, "a")
		n.check(t, is{})
	})
}
