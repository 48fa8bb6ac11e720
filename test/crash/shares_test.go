//go:build integration

package crash_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

const (
	mpsConfig   = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50}}}`
	sliceConfig = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`
)

// share is a share, or a replica, of the second GPU: "-mps4-2".
func share(parts ...string) func(*node) []string {
	return func(n *node) []string {
		var names []string
		for _, p := range parts {
			names = append(names, n.whole(1)+p)
		}
		return names
	}
}

// TestShares kills in what is done to have GPUs and partitions shared.
func TestShares(t *testing.T) {
	t.Parallel()
	testOperations(t, map[string]operation{
		"the first of a GPU": {
			mps: true, other: first, claim: share("-mps4-2"), before: nothing, do: prepareIt, only: "sharing.",
			wants: []string{"sharing.modeIntended", "sharing.modeSet", "sharing.ensured"},
		},
		"beside another": {
			mps: true, other: share("-mps4-0"), claim: share("-mps4-1"), before: nothing, do: prepareIt, only: "prepare.",
		},
		"one that makes the bounds wider": {
			mps: true, other: share("-mps"), claim: share("-mps", "-mps"), before: nothing, do: prepareIt, only: "sharing.",
		},
		"the last of a GPU": {
			mps: true, other: first, claim: share("-mps4-2"), before: prepared, do: unprepareAndEnd, gone: true,
			wants: []string{"sharing.stopBegun", "unprepare.left", "sharing.stopped", "sharing.modeBack", "sharing.modeForgotten"},
		},
		"another stays": {
			mps: true, other: share("-mps"), claim: share("-mps"), before: prepared, do: unprepareIt, gone: true, only: "unprepare.",
		},
		"the first of a partition": {
			mps: true, other: share("-mig-1g10gb-6"), claim: share("-mig-3g40gb-0-mps"), before: nothing, do: prepareIt, only: "sharing.",
			wants: []string{"sharing.ensured"},
		},
		"the last of a partition": {
			mps: true, other: share("-mig-3g40gb-4-mps"), claim: share("-mig-3g40gb-0-mps"), before: prepared, do: unprepareIt, gone: true,
			wants: []string{"sharing.stopped", "partition.destroyed"},
		},
		"a daemon of the claim's own": {
			mps: true, config: mpsConfig, other: first, claim: second, before: nothing, do: prepareIt, only: "sharing.",
			wants: []string{"sharing.ensured"},
		},
		"time slices": {
			config: sliceConfig, other: first, claim: second, before: nothing, do: prepareIt, only: "sharing.",
			wants: []string{"sharing.sliceIntended", "sharing.sliceSet"},
		},
		"no time slices any more": {
			config: sliceConfig, other: first, claim: second, before: prepared, do: unprepareIt, gone: true, only: "sharing.",
			wants: []string{"sharing.sliceBack", "sharing.sliceForgotten"},
		},
		"recover": {
			mps: true, other: share("-mps4-0"), claim: share("-mps4-1"), before: prepared, do: doNothing, starting: true,
		},
		"recover what is half gone": {
			mps: true, other: first, claim: share("-mps4-1"), do: doNothing, starting: true,
			before: func(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) {
				p.mustPrepare(t, c)
				p.kill()
				n.dieIn(t, "sharing.stopped", func(p *plugin) error { return unprepareAndEnd(t, n, p, c) })
			},
		},
	})
}

// unprepareAndEnd also waits until the GPU's MPS daemon has ended and the plugin
// has restored the compute mode.
func unprepareAndEnd(t *testing.T, _ *node, p *plugin, c *resourceapi.ResourceClaim) error {
	if err := p.unprepare(t, c); err != nil {
		return err
	}
	if err := p.poll(t, func() bool { return slices.Contains(p.ran(t), "sharing.modeForgotten") }); err != nil {
		return fmt.Errorf("wait for the daemon's end: %w", err)
	}
	return p.answers(t) // it may have died at that very step
}

// unprepareAndStop waits until the supervisor has ended the GPU's MPS daemon, or
// has died.
func unprepareAndStop(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) error {
	if err := p.unprepare(t, c); err != nil {
		return err
	}
	var died error
	err := p.poll(t, func() bool {
		all, err := n.client(t).List(t.Context())
		died = err
		return err != nil || !slices.ContainsFunc(all, func(s mps.State) bool { return s.Phase == mps.Ending })
	})
	return errors.Join(err, died)
}

// TestReplicas has a policy's interval hold while there are replicas.
func TestReplicas(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	one, two := n.newClaim(t, n.whole(1)+"-ts4-0"), n.newClaim(t, n.whole(1)+"-ts4-3")
	p := n.start(t, "")
	n.register(t, p)
	n.ask(t, &v1alpha1.GPUSpec{TimeSlice: v1alpha1.LongTimeSlice})
	p.mustPrepare(t, one)
	n.sliced(t, p, 3)
	p.kill()
	p = n.start(t, "")
	n.register(t, p)
	n.sliced(t, p, 3)
	p.mustPrepare(t, two)
	p.mustUnprepare(t, one)
	n.check(t, "with one of two left")
	n.sliced(t, p, 3)
	n.ask(t, &v1alpha1.GPUSpec{TimeSlice: v1alpha1.ShortTimeSlice})
	n.sliced(t, p, 1)
	p.mustUnprepare(t, two)
	n.sliced(t, p, 0)
	n.ask(t, nil)
	n.checkEmpty(t)
}

// sliced waits until the second GPU has a time slice.
func (n *node) sliced(t *testing.T, p *plugin, want uint32) {
	t.Helper()
	if err := p.poll(t, func() bool { return n.hardware.State().GPUs[1].TimeSlice == want }); err != nil {
		t.Errorf("time slice %d, want %d: %v", n.hardware.State().GPUs[1].TimeSlice, want, err)
	}
}

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
	p = n.start(t, "")
	n.register(t, p)
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
			again := n.start(t, "")
			n.register(t, again)
			*p = *again
			return n.supervise(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			s := n.supervise(t)
			c, other := n.newClaim(t, n.whole(1)+"-mps4-1"), n.newClaim(t, n.whole(0)+"-mps2-0")
			p := n.start(t, "")
			n.register(t, p)
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
	p := n.start(t, "")
	n.register(t, p)
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
	p := n.start(t, "")
	n.register(t, p)
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
	states, err := n.client(t).List(t.Context())
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

// TestSharesReboot has daemons, directories, modes and time slices forgotten.
func TestSharesReboot(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	s := n.supervise(t)
	c, part := n.newClaim(t, n.whole(1)+"-mps4-1"), n.newClaim(t, n.whole(0)+"-mig-3g40gb-0-mps")
	p := n.start(t, "")
	n.register(t, p)
	p.mustPrepare(t, c)
	p.mustPrepare(t, part)
	p.kill()
	s.kill()
	n.killDaemons(t)
	n.reboot(t)
	n.forgetRun(t)

	n.supervise(t)
	p = n.start(t, "")
	n.register(t, p)
	n.check(t, "after the reboot")
	if names := n.daemons(t); len(names) > 0 {
		t.Errorf("daemons of another boot's claims: %v", names)
	}
	p.mustUnprepare(t, part)
	p.mustPrepare(t, c)
	n.check(t, "after a prepare")
	p.mustUnprepare(t, c)
	n.checkEmpty(t)
}

// TestShareStorm kills plugin, supervisor and daemons at any time while claims
// come and go.
func TestShareStorm(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	s := n.supervise(t)
	var claims []*resourceapi.ResourceClaim
	for _, name := range []string{
		n.whole(0) + "-mps4-0", n.whole(0) + "-mps4-1", n.whole(0) + "-mps4-2",
		n.whole(1) + "-mig-3g40gb-0-mps", n.whole(1) + "-mig-3g40gb-0-mps", n.whole(1) + "-mig-1g10gb-4-mps", n.whole(1) + "-mig-1g10gb-5",
	} {
		claims = append(claims, n.newClaim(t, name))
	}
	all := func(do func(*resourceapi.ResourceClaim)) {
		var wg sync.WaitGroup
		for _, c := range claims {
			wg.Go(func() { do(c) })
		}
		wg.Wait()
	}
	for round := range 6 {
		p := n.start(t, "")
		n.register(t, p)
		after := time.Duration(rand.IntN(300)) * time.Millisecond
		time.AfterFunc(after, func() { _ = p.cmd.Process.Kill() })
		if round%3 != 0 {
			time.AfterFunc(time.Duration(rand.IntN(300))*time.Millisecond, s.kill)
		}
		all(func(c *resourceapi.ResourceClaim) { // as far as they come
			if round%2 == 0 {
				_, _ = p.prepare(t, c)
			} else {
				_ = p.unprepare(t, c)
			}
		})
		<-p.done
		if round%3 != 0 {
			<-s.done
			if round == 4 {
				n.killDaemons(t)
			}
			s = n.supervise(t)
		}

		p = n.start(t, "")
		n.register(t, p)
		all(func(c *resourceapi.ResourceClaim) {
			var err error
			if round%2 == 0 {
				_, err = p.prepare(t, c)
			} else {
				err = p.unprepare(t, c)
			}
			if err != nil {
				t.Errorf("in round %d, killed after %s: %v", round, after, err)
			}
		})
		n.check(t, fmt.Sprintf("after round %d", round))
		if round == 5 {
			n.checkEmpty(t)
		}
		p.kill()
	}
}
