package sharing_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

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
	want := map[string]gpu.MPSDirs{
		"gpu-980fb007":              {PipeDir: "/run/d/gpu-980fb007/pipe"},
		"gpu-11111111-mig-1g18gb-0": {PipeDir: "/run/d/gpu-11111111-mig-1g18gb-0/pipe"},
	}
	if diff := cmp.Diff(want, n.prepare(t, r)); diff != "" {
		t.Errorf("daemons (-want +got):\n%s", diff)
	}
	if got := n.prepare(t, claim("b", whole(gpu1))); len(got) > 0 {
		t.Errorf("daemons of a whole GPU: %v", got)
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

// TestFaultsOfTheMachine: a call fails once; the next attempt does it.
func TestFaultsOfTheMachine(t *testing.T) {
	for _, broken := range []string{"mode", "set mode", "ensure", "--list", "--set-timeslice"} {
		t.Run(broken, func(t *testing.T) {
			m := newMachine()
			n := newNode(t, m)
			n.SetTimeSlices(map[gpu.UUID]string{gpu1: "Long"})
			r := n.hold(t, claim("a", share(gpu0, 0), replica(gpu1, 0)))
			fail := errors.New("broken")
			m.set(func() {
				m.fault = func(call string) error {
					if strings.HasPrefix(call, broken) {
						return fail
					}
					return nil
				}
			})
			if _, err := n.Join(t.Context(), r, nil); !errors.Is(err, fail) && !strings.Contains(fmt.Sprint(err), "Not Supported") {
				t.Errorf("got %v", err)
			}
			m.set(func() { m.fault = nil })
			n.prepare(t, r)
			n.unprepare(t, "a")
			n.check(t, is{})
		})
	}
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

// TestBlocked checks that a call that hangs doesn't block other claims, and that a claim
// that has to wait for it fails when its context ends.
func TestBlocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		unblock := make(chan struct{})
		m.set(func() {
			m.fault = func(call string) error {
				if call == "ensure gpu-980fb007-mig-1g18gb-0" {
					<-unblock
				}
				return nil
			}
		})
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

// TestLastTwoLeaveTogether checks that the daemon is stopped once both claims have left.
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

// TestLastShareLeavesAtOnce checks that only the next claim of the GPU waits for the end
// of a daemon, and that the compute mode is restored only after that.
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
			wait: func(t *testing.T, n *node) error { return n.AwaitDaemonEnds(t.Context(), gpu0) },
			want: is{Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}},
		},
		"nobody": {wait: func(*testing.T, *node) error { return nil }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine()
				m.set(func() { m.lingers = true })
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
				if err := n.leaveHost(t); err != nil {
					t.Error(err)
				}
				n.check(t, is{})
			})
		})
	}
}
