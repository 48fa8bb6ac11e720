package sharing_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// failing has calls that begin with a text fail until a time.
func (m *machine) failing(call string, err error, until time.Time) {
	m.set(func() {
		m.fault = func(c string) error {
			if strings.HasPrefix(c, call) && time.Now().Before(until) {
				return err
			}
			return nil
		}
	})
}

// TestJoinPatiently checks how long a claim that is being prepared waits for what its GPU
// refuses, and when it is the GPU's fault.
func TestJoinPatiently(t *testing.T) {
	fails := fmt.Errorf("start: %w", mps.ErrDaemonFails)
	ofGPU0, ofPartition0 := []gpu.Device{gpu.Whole{GPU: gpu0}}, []gpu.Device{ofPartition(gpu0, 4).Base()}
	const forever = 1000 * time.Hour
	type want struct {
		took    time.Duration
		fails   bool
		refused []gpu.Device // of it, silicon
	}
	for name, tc := range map[string]struct {
		claim holding.Record
		call  string // that fails, in this way and for so long
		err   error
		lasts time.Duration
		limit time.Duration // of the call; 0: none
		inUse bool
		want  want
	}{
		"nothing fails":                {claim: claim("a", share(gpu0, 0)), want: want{}},
		"the daemon never starts":      {claim: claim("a", share(gpu0, 0)), call: "ensure", err: fails, lasts: forever, want: want{10 * time.Second, true, ofGPU0}},
		"that of a partition":          {claim: claim("a", ofPartition(gpu0, 4)), call: "ensure", err: fails, lasts: forever, want: want{10 * time.Second, true, ofPartition0}},
		"that of a claim":              {claim: claim("a", wholeMPS(gpu0, 0), wholeMPS(gpu1, 0)), call: "ensure", err: fails, lasts: forever, want: want{10 * time.Second, true, []gpu.Device{gpu.Whole{GPU: gpu0}, gpu.Whole{GPU: gpu1}}}},
		"of one GPU of two":            {claim: claim("a", share(gpu0, 0), share(gpu1, 0)), call: "ensure gpu-980fb007", err: fails, lasts: forever, want: want{10 * time.Second, true, ofGPU0}},
		"containers have the claim":    {claim: claim("a", share(gpu0, 0)), call: "ensure", err: fails, lasts: forever, inUse: true, want: want{10 * time.Second, true, ofGPU0}},
		"the daemon starts later":      {claim: claim("a", share(gpu0, 0)), call: "ensure", err: fails, lasts: 2500 * time.Millisecond, want: want{took: 3 * time.Second}},
		"the call ends before":         {claim: claim("a", share(gpu0, 0)), call: "ensure", err: fails, lasts: forever, limit: 4 * time.Second, want: want{took: 4 * time.Second, fails: true}},
		"no supervisor":                {claim: claim("a", share(gpu0, 0)), call: "ensure", err: mps.ErrUnavailable, lasts: forever, want: want{fails: true}},
		"another error of it":          {claim: claim("a", share(gpu0, 0)), call: "ensure", err: errors.New("no driver"), lasts: forever, want: want{fails: true}},
		"the mode can't be set":        {claim: claim("a", share(gpu0, 0)), call: "set mode", err: errors.New("Unknown Error"), lasts: forever, want: want{time.Second, true, ofGPU0}},
		"the mode can't be set once":   {claim: claim("a", share(gpu0, 0)), call: "set mode", err: errors.New("Unknown Error"), lasts: time.Millisecond, want: want{took: time.Second}},
		"the mode of a GPU that hangs": {claim: claim("a", share(gpu0, 0)), call: "set mode", err: nvml.ErrNotResponding, lasts: forever, want: want{fails: true}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, newMachine())
				n.machine.failing(tc.call, tc.err, time.Now().Add(tc.lasts))
				if tc.call == "" {
					n.machine.set(func() { n.machine.fault = nil })
				}
				r := n.hold(t, tc.claim)
				ctx := t.Context()
				if tc.limit > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tc.limit)
					defer cancel()
				}
				began := time.Now()
				_, err := n.JoinPatiently(ctx, r, given(r), !tc.inUse)
				got := want{took: time.Since(began).Truncate(100 * time.Millisecond), fails: err != nil}
				if refused, ok := errors.AsType[*gpu.RefusedError](err); ok {
					got.refused = refused.Silicon
				}
				if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(want{})); diff != "" {
					t.Errorf("%v (-want +got):\n%s", err, diff)
				}
			})
		})
	}
}

// TestJoinOfAFailingDaemon checks that a new claim doesn't become a client of a daemon that
// doesn't serve its clients, but for ten seconds from the beginning of the fault.
func TestJoinOfAFailingDaemon(t *testing.T) {
	for name, tc := range map[string]struct {
		before  time.Duration // that the daemon has failed for
		serves  time.Duration // after which it does again; 0: never
		inUse   bool
		took    time.Duration
		refused bool
	}{
		"for long":                {before: 12 * time.Second, refused: true},
		"for a while":             {before: 4 * time.Second, took: 6 * time.Second, refused: true},
		"serves again":            {before: 4 * time.Second, serves: 3 * time.Second, took: 3 * time.Second},
		"of a claim with clients": {before: 12 * time.Second, inUse: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, newMachine())
				n.prepare(t, claim("a", share(gpu0, 0)))
				serve := func(server int, trouble string) {
					n.machine.do(func() {
						s := n.machine.daemons["gpu-980fb007"]
						s.ServerPID, s.Trouble = server, trouble
						n.machine.daemons["gpu-980fb007"] = s
					})
					synctest.Wait()
				}
				serve(0, "it has no server")
				time.Sleep(tc.before)
				if tc.serves > 0 {
					time.AfterFunc(tc.serves, func() { serve(7, "") })
				}
				r := n.hold(t, claim("b", share(gpu0, 1)))
				began := time.Now()
				_, err := n.JoinPatiently(t.Context(), r, nil, !tc.inUse)
				refused, ok := errors.AsType[*gpu.RefusedError](err)
				if took := time.Since(began).Truncate(100 * time.Millisecond); took != tc.took || ok != tc.refused || (err != nil) != tc.refused {
					t.Errorf("after %v: %v, want after %v, refused: %t", took, err, tc.took, tc.refused)
				}
				if ok {
					wantError(t, refused, "it has no server")
				}
				_, err = n.JoinPatiently(t.Context(), n.hold(t, claim("c", share(gpu1, 0))), nil, true)
				if err != nil {
					t.Errorf("of another GPU: %v", err)
				}
			})
		})
	}
}

// TestJoinBesideAFailingDaemon checks that a daemon that doesn't start has its ten seconds, although
// that of another GPU of the claim has not served its clients for longer.
func TestJoinBesideAFailingDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, newMachine())
		n.prepare(t, claim("a", share(gpu0, 0)))
		other := share(gpu1, 0).SharedDaemonName()
		n.machine.do(func() {
			s := n.machine.daemons["gpu-980fb007"]
			s.ServerPID, s.Trouble = 0, "it has no server"
			n.machine.daemons["gpu-980fb007"] = s
		})
		synctest.Wait()
		time.Sleep(12 * time.Second)
		n.machine.failing("ensure "+other, fmt.Errorf("start: %w", mps.ErrDaemonFails), time.Now().Add(2500*time.Millisecond))
		r := n.hold(t, claim("b", share(gpu0, 1), share(gpu1, 0)))
		began := time.Now()
		_, err := n.JoinPatiently(t.Context(), r, nil, false)
		if took := time.Since(began).Truncate(100 * time.Millisecond); err != nil || took != 3*time.Second {
			t.Errorf("after %v: %v, want it joined after 3s", took, err)
		}
	})
}
