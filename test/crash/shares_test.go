//go:build integration

package crash_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/mps"
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
			wants: []string{"sharing.stopBegun", "unprepare.left", "sharing.daemonsGone", "sharing.modeBack", "sharing.modeForgotten"},
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
				n.dieIn(t, "sharing.daemonsGone", func(p *plugin) error { return unprepareAndEnd(t, n, p, c) })
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
		r, err := n.client(t).List(t.Context())
		died = err
		return err != nil || !slices.ContainsFunc(r.Daemons, func(s mps.State) bool { return s.Phase == mps.Ending })
	})
	return errors.Join(err, died)
}

// TestReplicas has a policy's interval hold while there are replicas.
func TestReplicas(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	one, two := n.newClaim(t, n.whole(1)+"-ts4-0"), n.newClaim(t, n.whole(1)+"-ts4-3")
	p := n.serve(t)
	n.ask(t, &v1alpha1.GPUSpec{TimeSlice: v1alpha1.LongTimeSlice})
	p.mustPrepare(t, one)
	n.sliced(t, p, 3)
	p.kill()
	p = n.serve(t)
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

// TestSharesReboot has daemons, directories, modes and time slices forgotten.
func TestSharesReboot(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	s := n.supervise(t)
	c, part := n.newClaim(t, n.whole(1)+"-mps4-1"), n.newClaim(t, n.whole(0)+"-mig-3g40gb-0-mps")
	p := n.serve(t)
	p.mustPrepare(t, c)
	p.mustPrepare(t, part)
	p.kill()
	s.kill()
	n.killDaemons(t)
	n.reboot(t)
	n.forgetRun(t)

	n.supervise(t)
	p = n.serve(t)
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
	all := func(do func(*resourceapi.ResourceClaim)) { withAll(claims, do) }
	for round := range 6 {
		p := n.serve(t)
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

		p = n.serve(t)
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
