package prepare_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// answer is the result of a Prepare in the background.
type answer struct {
	devices []kubeletplugin.Device
	err     error
}

func inBackground(ctx context.Context, f *fixture, c *resourceapi.ResourceClaim) <-chan answer {
	ch := make(chan answer, 1)
	go func() {
		devices, err := f.Prepare(ctx, c)
		ch <- answer{devices, err}
	}()
	return ch
}

// almostOver is a context whose time to wait ends almost at once.
func almostOver(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(testContext(t), 2100*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

func TestHeldDevice(t *testing.T) {
	for name, tc := range map[string]struct {
		is   state
		says []string
	}{
		"by a claim in use: refused": {
			inUse, []string{"claim default/old holds " + string(gpu0), "pod default/old uses it", "delete"},
		},
		"by a claim that doesn't leave in time": {deleted, []string{"claim default/old", "the claim was deleted", "tried again"}},
		"while the API server is away":          {unknown, []string{"claim default/old", "connection refused", "tried again"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 2)
			mustPrepare(t, f, newClaim("old", result("gpu", 0)))
			f.server.set("old", tc.is)
			_, err := f.Prepare(almostOver(t), newClaim("new", result("gpu", 0), result("gpu", 1)))
			if !errors.Is(err, prepare.ErrHeld) {
				t.Fatalf("got %v, want ErrHeld", err)
			}
			for _, s := range tc.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("got %q, want it to say %q", err, s)
				}
			}
			checkHeld(t, f, "old")
		})
	}
}

func TestNextClaimOfADevice(t *testing.T) {
	for name, is := range map[string]state{"from a leaving claim": deleted, "while the API server is away": unknown} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			old, anew := newClaim("old", result("gpu", 0)), newClaim("new", result("gpu", 0))
			mustPrepare(t, f, old)
			f.server.set("old", is)
			got := inBackground(testContext(t), f, anew)
			<-f.server.asked // now it waits, or is about to
			mustUnprepare(t, f, old)
			if a := <-got; a.err != nil {
				t.Errorf("prepare: %v", a.err)
			}
			checkHeld(t, f, "new")
		})
	}
}

func TestUnprepareStopsAWaitingPrepare(t *testing.T) {
	f := newFixture(t, 1)
	mustPrepare(t, f, newClaim("old", result("gpu", 0)))
	anew := newClaim("new", result("gpu", 0))
	got := inBackground(testContext(t), f, anew)
	<-f.server.asked
	mustUnprepare(t, f, anew)
	if a := <-got; a.err == nil || !strings.Contains(a.err.Error(), "unprepared") {
		t.Errorf("prepare: got %v, want that it was stopped by the unprepare", a.err)
	}
	checkHeld(t, f, "old")
}

func TestAfterAReboot(t *testing.T) {
	for name, tc := range map[string]struct {
		is    state
		again bool // the kubelet has prepared the old claim again
		want  string
	}{
		"a claim that nothing wants loses its device": {deleted, false, "new"},
		"a claim in use keeps it":                     {inUse, false, "old"},
		"a claim prepared again keeps it":             {deleted, true, "old"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			old := newClaim("old", result("gpu", 0))
			mustPrepare(t, f, old)
			f.journal.Close()
			f = start(t, f.node, "boot-2", nil)
			if err := f.Recover(testContext(t)); err != nil {
				t.Fatal(err)
			}
			checkHeld(t, f, "old")
			if tc.again {
				mustPrepare(t, f, old)
			}
			f.server.set("old", tc.is)
			_, err := f.Prepare(almostOver(t), newClaim("new", result("gpu", 0)))
			if (err == nil) != (tc.want == "new") {
				t.Errorf("prepare: %v", err)
			}
			checkHeld(t, f, tc.want)
		})
	}
}

// TestLateUnprepareWins lets an unprepare arrive after each step of a prepare.
func TestLateUnprepareWins(t *testing.T) {
	whole, shared := newClaim("c", result("gpu", 0)), newClaim("c", shareOf("s", 0, "3g.40gb", 0, 2, 0))
	for step, c := range map[string]*resourceapi.ResourceClaim{
		"prepare.locked": whole, "journal.put.created": whole, "journal.put.renamed": whole, "prepare.recorded": whole, "prepare.written": whole,
		"partition.created": shared, "partition.made": shared, "prepare.made": shared, "prepare.ready": shared, "sharing.ensured": shared, "prepare.joined": shared,
	} {
		t.Run(step, func(t *testing.T) {
			reached, goOn := make(chan struct{}), make(chan struct{})
			f := start(t, newNode(t, 1), "boot-1", func(s string) {
				if s == step {
					close(reached)
					<-goOn
				}
			})
			got := inBackground(testContext(t), f, c)
			<-reached
			unprepared := make(chan error, 1)
			go func() { unprepared <- f.Unprepare(testContext(t), named(c)) }()
			close(goOn)
			<-got
			if err := <-unprepared; err != nil {
				t.Errorf("unprepare: %v", err)
			}
			checkHeld(t, f)
		})
	}
}

func TestUnprepareWinsOverAPrepareThatHasBegun(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("c", result("gpu", 0))
	ctx, done := f.Begin(testContext(t), c.UID)
	mustUnprepare(t, f, c) // while the claim is read from the API server
	if _, err := f.Prepare(ctx, c); err == nil || !strings.Contains(err.Error(), "unprepared") {
		t.Errorf("prepare: got %v, want that the unprepare won", err)
	}
	done()
	checkHeld(t, f)
	mustPrepare(t, f, c) // and one that begins later is as good as any
	checkHeld(t, f, "c")
}

func TestCancelledPrepareLeavesNothing(t *testing.T) {
	f := newFixture(t, 1)
	ctx, cancel := context.WithCancel(testContext(t))
	cancel()
	if _, err := f.Prepare(ctx, newClaim("c", result("gpu", 0))); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	checkHeld(t, f)
}
