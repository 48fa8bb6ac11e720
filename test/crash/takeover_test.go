//go:build integration

package crash_test

import (
	"slices"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestTakeover has plugins take over from each other while a kubelet that knows only the
// first one's socket prepares and unprepares all the time: no call fails.
func TestTakeover(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.startPod(t, "pod-0", "")
	n.register(t, p)
	kept, passing := n.newClaim(t, n.whole(0)), n.newClaim(t, n.whole(1))
	p.mustPrepare(t, kept)
	for _, pod := range []types.UID{"pod-1", "pod-2", "pod-3"} {
		next := n.startPod(t, pod, "")
		longest := p.untilDone(t, passing, func() { n.register(t, next) })
		t.Logf("the longest call during the takeover by %s: %s", pod, longest)
		n.check(t, "after a takeover")
		p.end(t)
		next.mustPrepare(t, kept)
		p = next
	}
	p.mustUnprepare(t, kept)
	n.checkEmpty(t)
}

// untilDone prepares and unprepares the claim until do has returned, and returns how long
// the longest of the two took.
func (p *plugin) untilDone(t *testing.T, c *resourceapi.ResourceClaim, do func()) (longest time.Duration) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	for {
		for _, call := range []func(*testing.T, *resourceapi.ResourceClaim){p.mustPrepare, p.mustUnprepare} {
			began := time.Now()
			call(t, c)
			longest = max(longest, time.Since(began))
		}
		select {
		case <-done:
			return longest
		default:
		}
	}
}

// TestTakeoverCrashes kills each side of a takeover at each step: the other one acts.
func TestTakeoverCrashes(t *testing.T) {
	t.Parallel()
	t.Run("the plugin that hands over", func(t *testing.T) {
		t.Parallel()
		for _, step := range []string{"handover.drained", "handover.stopped", "handover.given"} {
			t.Run(step, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				before := n.startPod(t, "pod-0", step)
				n.register(t, before)
				c := n.newClaim(t, n.whole(0))
				before.mustPrepare(t, c)
				after := n.startPod(t, "pod-1", "")
				before.waitDead(t)
				n.register(t, after)
				n.actsOn(t, after, c)
			})
		}
	})
	t.Run("the plugin that takes over", func(t *testing.T) {
		t.Parallel()
		for _, step := range takeoverSteps(t) {
			t.Run(step, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				before := n.startPod(t, "pod-0", "")
				n.register(t, before)
				c := n.newClaim(t, n.whole(0))
				before.mustPrepare(t, c)
				after := n.startPod(t, "pod-1", step)
				after.waitDead(t)
				before.waitLog(t, "acting again")
				n.register(t, before)
				n.actsOn(t, before, c)
			})
		}
	})
}

// takeoverSteps returns the steps of a plugin that takes over, until it is registered.
func takeoverSteps(t *testing.T) []string {
	t.Helper()
	n := newNode(t)
	before := n.startPod(t, "pod-0", "")
	n.register(t, before)
	before.mustPrepare(t, n.newClaim(t, n.whole(0)))
	after := n.startPod(t, "pod-1", "")
	n.register(t, after)
	steps := after.ran(t)
	if want := "handover.taken"; !slices.Contains(steps, want) {
		t.Errorf("the plugin that takes over doesn't come to %s; its steps are %v", want, steps)
	}
	return steps
}

// actsOn wants the plugin to act on a node where a claim is prepared.
func (n *node) actsOn(t *testing.T, p *plugin, prepared *resourceapi.ResourceClaim) {
	t.Helper()
	n.check(t, "after the takeover")
	p.mustPrepare(t, prepared)
	other := n.newClaim(t, n.whole(1))
	p.mustPrepare(t, other)
	n.check(t, "after a prepare")
	p.mustUnprepare(t, other)
	p.mustUnprepare(t, prepared)
	n.checkEmpty(t)
}

// end ends the plugin as its pod's deletion does.
func (p *plugin) end(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-p.done
	if !p.cmd.ProcessState.Success() {
		t.Errorf("the plugin ended with %v", p.cmd.ProcessState)
	}
}
