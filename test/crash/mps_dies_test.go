//go:build integration

package crash_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestSupervisorSteps kills the supervisor after each step of the plugin's
// requests, and of its own start. The next one finds all daemons and files.
func TestSupervisorSteps(t *testing.T) {
	t.Parallel()
	elsewhere := func(n *node) []string { return []string{n.whole(0) + "-mps2-0"} }
	for name, op := range map[string]operation{
		"start": {
			other: share("-mps4-0"), claim: elsewhere, before: nothing, do: prepareIt,
			wants: []string{"start.recorded", "start.launched", "start.known"},
		},
		"change": {
			other: share("-mps"), claim: share("-mps", "-mps"), before: nothing, do: prepareIt,
			wants: []string{"change.recorded", "change.set"},
		},
		"stop": {
			other: share("-mps4-0"), claim: elsewhere, before: prepared, do: unprepareAndStop, gone: true,
			wants: []string{"stop.recorded", "stop.ended", "stop.removed"},
		},
		"adopt": {
			other: share("-mps4-0"), claim: share("-mps4-1"), before: prepared, do: doNothing, starting: true,
			wants: []string{"adopt.known"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, step := range op.supervisorSteps(t) {
				t.Run(step, func(t *testing.T) {
					t.Parallel()
					op.crashSupervisor(t, step)
				})
			}
		})
	}
}

// underSupervision makes a node where the operation is about to be done, a plugin
// runs, and no supervisor.
func (op operation) underSupervision(t *testing.T) (n *node, p *plugin, other, c *resourceapi.ResourceClaim) {
	t.Helper()
	n = newNode(t)
	s := n.supervise(t)
	other, c = n.newClaim(t, op.other(n)...), n.newClaim(t, op.claim(n)...)
	p = n.serve(t)
	p.mustPrepare(t, other)
	op.before(t, n, p, c)
	s.kill()
	return n, p, other, c
}

// supervisorSteps are the steps of the supervisor in the operation.
func (op operation) supervisorSteps(t *testing.T) []string {
	t.Helper()
	n, p, _, c := op.underSupervision(t)
	s := n.supervise(t)
	if err := op.do(t, n, p, c); err != nil {
		t.Fatal(err)
	}
	steps := s.ran(t)
	if !op.starting {
		steps = slices.DeleteFunc(steps, func(s string) bool { return strings.HasPrefix(s, "adopt.") })
	}
	p.kill()
	op.mustHave(t, steps)
	return steps
}

// crashSupervisor kills the supervisor at one step.
func (op operation) crashSupervisor(t *testing.T, step string) {
	n, p, other, c := op.underSupervision(t)
	before := n.controls(t, other)
	s := n.startSupervisor(t, step)
	for !op.starting && s.lives() {
		_ = op.do(t, n, p, c) // it fails until the supervisor listens, and when it dies
	}
	s.waitDead(t)

	n.supervise(t)
	if op.gone {
		p.mustUnprepare(t, c)
		n.rests(t)
	}
	p.mustPrepare(t, c)
	p.mustPrepare(t, other)
	n.check(t, "with another supervisor")
	if diff := cmp.Diff(before, n.controls(t, other)); diff != "" {
		t.Errorf("the other claim's MPS daemon is another one (-before +after):\n%s", diff)
	}
	p.mustUnprepare(t, c)
	p.mustUnprepare(t, other)
	n.checkEmpty(t)
}

// TestSupervisorDies kills the supervisor in what it does, and beside it.
func TestSupervisorDies(t *testing.T) {
	t.Parallel()
	for name, die := range map[string]func(t *testing.T, n *node, s *supervisor, p *plugin, c *resourceapi.ResourceClaim) *supervisor{
		"while nothing is asked": func(t *testing.T, n *node, s *supervisor, _ *plugin, _ *resourceapi.ResourceClaim) *supervisor {
			s.kill()
			return n.supervise(t)
		},
		"while it starts a daemon": func(t *testing.T, n *node, s *supervisor, p *plugin, c *resourceapi.ResourceClaim) *supervisor {
			n.fault(t, nvmlsim.Fault{Call: "MPSControl", GPU: nvmlsim.AnyGPU, DelayMS: 60_000})
			answered := make(chan error, 1)
			go func() { answered <- prepareIt(t, n, p, c) }()
			if err := p.poll(t, func() bool { return len(n.daemons(t)) == 2 }); err != nil {
				t.Fatal(err)
			}
			s.kill()
			if err := <-answered; err == nil {
				t.Error("prepared without a supervisor")
			}
			if err := n.hardware.ClearFaults(); err != nil {
				t.Fatal(err)
			}
			return n.supervise(t)
		},
		"while it stops a daemon": func(t *testing.T, n *node, s *supervisor, p *plugin, c *resourceapi.ResourceClaim) *supervisor {
			p.mustPrepare(t, c)
			n.fault(t, nvmlsim.Fault{Call: "MPSCommand", GPU: nvmlsim.AnyGPU, DelayMS: 2_000})
			answered := make(chan error, 1)
			go func() { answered <- p.unprepare(t, c) }()
			time.AfterFunc(time.Duration(rand.IntN(1000))*time.Millisecond, s.kill)
			<-answered
			s.kill()
			if err := n.hardware.ClearFaults(); err != nil {
				t.Fatal(err)
			}
			return n.supervise(t)
		},
		"with the daemons": func(t *testing.T, n *node, s *supervisor, p *plugin, c *resourceapi.ResourceClaim) *supervisor {
			p.mustPrepare(t, c)
			s.kill()
			n.killDaemons(t)
			return n.supervise(t)
		},
		"with the plugin": func(t *testing.T, n *node, s *supervisor, p *plugin, c *resourceapi.ResourceClaim) *supervisor {
			p.mustPrepare(t, c)
			s.kill()
			p.kill()
			again := n.serve(t)
			*p = *again
			return n.supervise(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			s := n.supervise(t)
			c, other := n.newClaim(t, n.whole(1)+"-mps4-1"), n.newClaim(t, n.whole(0)+"-mps2-0")
			p := n.serve(t)
			p.mustPrepare(t, other)
			before := n.controls(t, other)
			s = die(t, n, s, p, c)
			p.mustPrepare(t, c)
			p.mustPrepare(t, other)
			n.check(t, "with a new supervisor")
			after := n.controls(t, other)
			if len(after) != 1 || len(n.controls(t, c)) != 1 {
				t.Errorf("MPS control daemons: %v and %v, want one each", after, n.controls(t, c))
			}
			if name != "with the daemons" && before[n.whole(0)] != after[n.whole(0)] {
				t.Errorf("the daemon that was there is another one: %v, before %v", after, before)
			}
			p.mustUnprepare(t, c)
			p.mustUnprepare(t, other)
			n.checkEmpty(t)
			s.kill()
		})
	}
}

// TestNoSupervisor has shares refused as long as there is no supervisor.
func TestNoSupervisor(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c, whole := n.newClaim(t, n.whole(1)+"-mps4-1"), n.newClaim(t, n.whole(0))
	p := n.serve(t)
	if _, err := p.prepare(t, c); err == nil || !strings.Contains(err.Error(), mps.ErrUnavailable.Error()) {
		t.Errorf("got %v, want %q in it", err, mps.ErrUnavailable)
	}
	p.mustPrepare(t, whole)
	p.mustUnprepare(t, whole)
	s := n.supervise(t)
	p.mustPrepare(t, c)
	n.check(t, "with a supervisor")
	s.kill()
	if err := p.unprepare(t, c); err == nil {
		t.Error("unprepared, but nobody stopped the daemon")
	}
	n.supervise(t)
	p.mustUnprepare(t, c)
	n.checkEmpty(t)
}

// TestDaemonDies has daemons come back by themselves.
func TestDaemonDies(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.supervise(t)
	c := n.newClaim(t, n.whole(1)+"-mps4-1")
	p := n.serve(t)
	p.mustPrepare(t, c)
	before := n.controls(t, c)
	n.killDaemons(t)
	back := func() bool {
		now := n.controls(t, c)
		return len(now) == 1 && now[n.whole(1)] != before[n.whole(1)]
	}
	if err := p.poll(t, back); err != nil {
		t.Fatalf("the daemon doesn't come back: %v", err)
	}
	n.check(t, "with another daemon")
	r, err := n.client(t).List(t.Context())
	states := r.Daemons
	if err != nil || len(states) != 1 || states[0].Restarts != 1 || states[0].ThreadPercentage != 25 {
		t.Errorf("got %+v and %v, want one daemon, started again once, with its limits", states, err)
	}
	warned := func() bool {
		events := warnings(t, c)
		return len(events) == 1 && events[0].Reason == "MPSDaemonFailed" && strings.Contains(events[0].Message, "GPU-")
	}
	if err := p.poll(t, warned); err != nil {
		t.Errorf("events of the claim: %+v, want one about its daemon; %v", warnings(t, c), err)
	}
	p.mustPrepare(t, c)
	p.mustUnprepare(t, c)
	n.checkEmpty(t)
}

// warnings returns the events of a claim.
func warnings(t *testing.T, c *resourceapi.ResourceClaim) []corev1.Event {
	t.Helper()
	events, err := shared.api.CoreV1().Events(c.Namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(c.UID)})
	if err != nil {
		t.Fatal(err)
	}
	return events.Items
}
