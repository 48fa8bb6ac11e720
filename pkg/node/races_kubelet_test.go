package node

import (
	"context"
	"errors"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// allocate gives devices to claims that are to be prepared and have none, as the scheduler
// does: from the drawn shape on, the first that no claim has whose pods stay. A forced
// allocation is that of a scheduler that allocates the same twice.
func (w *world) allocate(b batch) {
	becomesUnused := func(s *modelClaim) bool {
		return s.unused || slices.ContainsFunc(b.Ops, func(o op) bool {
			return (o.Kind == opUnprepare || o.Kind == opDeletePods) && slices.Contains(o.claims(), s.number)
		})
	}
	assigned := map[*modelClaim]bool{}
	isFree := func(s *modelClaim) bool { return !assigned[s] && (s.state == gone || becomesUnused(s)) }
	for _, o := range b.Ops {
		for _, number := range o.claims() {
			s := w.claims[number]
			if o.Kind != opPrepare || s.state != gone || assigned[s] {
				continue
			}
			assigned[s] = true
			w.schedule(s, o, isFree)
		}
	}
}

// schedule gives the claim the first shape that is free, or the drawn one.
func (w *world) schedule(s *modelClaim, o op, isFree func(*modelClaim) bool) {
	for n := range shapes() {
		w.assign(s, shapes()[(o.Shape+n)%len(shapes())])
		fits := len(s.held) > 0 && !w.contends(s, isFree) // admin access always does
		if o.Forced || fits {
			return
		}
	}
	w.assign(s, shapes()[o.Shape])
}

func (w *world) assign(s *modelClaim, to shape) {
	names, err := gpu.NewNames(w.gpus)
	if err != nil {
		w.broken("the GPUs have no names", "%v", err)
		return
	}
	s.shape, s.claim, s.held = to, to.claimOf(s.name), nil
	for _, name := range to.devices {
		if _, admin := cutAdmin(name); admin {
			continue
		}
		d, err := names.Device(name)
		if err != nil {
			w.broken("a device has no name", "%v", err)
			return
		}
		s.held = append(s.held, d)
	}
}

func (w *world) isServerAway() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.Now().Before(w.serverAway)
}

// kubeletWithin is the deadline of the kubelet's calls.
const kubeletWithin = 45 * time.Second

// prepare is a call of the kubelet; it returns the error of the first claim.
func (w *world) prepare(o op) error {
	claims := w.claimsOf(o)
	start := time.Now()
	unprepares := make([]int, len(claims))
	w.update(func() {
		for i, s := range claims {
			s.unused, unprepares[i] = false, s.unprepares
		}
	})
	ctx, cancel := callContext(o)
	defer cancel()
	p := w.process()
	errs := p.serve(ctx, claims, p.prepare)
	for i, s := range claims {
		w.answered(s, o, start, errs[i], func() { s.has = s.has || errs[i] == nil && unprepares[i] == s.unprepares })
		if errs[i] == nil {
			w.checkHas(s)
		}
	}
	return errs[0]
}

// answered notes how a call ended for a claim.
func (w *world) answered(s *modelClaim, o op, start time.Time, err error, then func()) {
	w.note("%s %s (%s): %v", o.Kind, s.name, s.shape.name, err)
	w.update(func() {
		s.calls = append(s.calls, kubeletCall{op: o, start: start, err: err})
		w.outcomes[outcome(o, err)]++
		then()
	})
}

// claimsOf returns the claims of a call that were ever allocated.
func (w *world) claimsOf(o op) []*modelClaim {
	var all []*modelClaim
	for _, n := range o.claims() {
		if w.claims[n].claim != nil {
			all = append(all, w.claims[n])
		}
	}
	return all
}

// callContext has the deadline of the kubelet's calls, and is cancelled when the operation
// says so.
func callContext(o op) (context.Context, context.CancelFunc) {
	within := kubeletWithin
	if o.Kind == opPrepare && o.For > 0 {
		within = o.For
	}
	return context.WithTimeout(context.Background(), within)
}

// unprepare is a call of the kubelet; it returns the error of the first claim. Containers
// of the claims end before it, or later.
func (w *world) unprepare(o op) error {
	claims := w.claimsOf(o)
	if len(claims) == 0 {
		return nil
	}
	start := time.Now()
	w.update(func() {
		for _, s := range claims {
			s.unused, s.has = true, false
			s.unprepares++
		}
	})
	for _, s := range claims {
		if o.For > 0 {
			time.AfterFunc(o.For, func() { w.pods.stop(s.name) })
		} else {
			w.pods.stop(s.name)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), kubeletWithin)
	defer cancel()
	p := w.process()
	errs := p.serve(ctx, claims, p.unprepare)
	for i, s := range claims {
		w.answered(s, o, start, errs[i], func() {})
	}
	return errs[0]
}

// outcome says in a word how a call ended.
func outcome(o op, err error) string {
	how := "succeeded"
	switch {
	case errors.Is(err, errUnanswered), errors.Is(err, errNotServed):
		how = "unanswered"
	case errors.Is(err, prepare.ErrHeld):
		how = "waited in vain"
	case err != nil:
		how = "failed"
	}
	return string(o.Kind) + " " + how
}

// startContainer starts a container of a claim that the kubelet has prepared.
func (w *world) startContainer(s *modelClaim) {
	w.mu.Lock()
	has, before := s.has, s.unprepares
	w.mu.Unlock()
	if !has {
		return
	}
	err := w.pods.start(s, w.spec(s.name))
	w.mu.Lock()
	still := s.has && s.unprepares == before
	w.mu.Unlock()
	if err != nil && still {
		w.broken("a container of a prepared claim can't start", "%s (%s): %v", s.name, s.shape.name, err)
	}
}

// read returns the API server's view of a claim.
func (w *world) read(ctx context.Context, name string) (*resourceapi.ResourceClaim, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.claims {
		if s.name == name && !s.unused {
			return inUse(s.claim), nil
		}
	}
	return deletedClaims(ctx, name)
}

// checkFailures checks that each failure has a reason.
func (w *world) checkFailures(b batch) {
	for _, s := range w.claims {
		slices.SortStableFunc(s.calls, func(a, b kubeletCall) int { return a.start.Compare(b.start) })
	}
	for _, o := range b.Ops {
		switch o.Kind {
		case opRestart, opKill, opReboot, opSandbox, opFail, opSlow, opAway, opDies, opServer:
			return // these may be the reason of any failure
		case opPrepare, opUnprepare, opDeletePods, opStart, opPolicy:
		}
	}
	for _, s := range w.claims {
		for _, c := range s.calls {
			if c.err == nil {
				continue
			}
			switch {
			case c.op.Kind == opPrepare && c.op.For > 0:
			case c.op.Kind == opPrepare && slices.ContainsFunc(s.calls, func(u kubeletCall) bool { return u.op.Kind == opUnprepare }):
			case c.op.Kind == opPrepare && w.isContended(s):
			case c.op.Kind == opUnprepare && slices.ContainsFunc(s.calls, func(u kubeletCall) bool { return u.op.Kind == opUnprepare && u.op.For > 30*time.Second }):
			default:
				w.broken("a call fails without a reason", "%s of %s (%s): %v", c.op.Kind, s.name, s.shape.name, c.err)
			}
		}
	}
}

// isContended reports whether another claim may have, or may have had, the same devices.
func (w *world) isContended(s *modelClaim) bool {
	return w.contends(s, func(o *modelClaim) bool { return o.state == gone && len(o.calls) == 0 })
}

// contends reports whether the claim needs devices of others, except some.
func (w *world) contends(s *modelClaim, except func(*modelClaim) bool) bool {
	memory := s.takesMemory()
	for _, o := range w.claims {
		if o == s || o.claim == nil || except(o) {
			continue
		}
		memory += o.takesMemory()
		if s.conflicts(o) {
			return true
		}
	}
	return s.takesMemory() > 0 && memory > 70<<10
}

// settle has the kubelet retry failed calls, in a world without faults, and checks
// everything.
func (w *world) settle() {
	for _, s := range w.claims {
		if s.state != uncertain {
			continue
		}
		o := op{Kind: opUnprepare, Claim: s.number, With: s.number}
		if !s.unused {
			o.Kind = opPrepare
			if w.prepare(o) == nil {
				s.state = prepared
				continue
			}
			if !w.isContended(s) {
				w.broken("a retried call fails without a reason", "prepare %s", s.name)
			}
			o.Kind = opUnprepare
		}
		if err := w.unprepare(o); err != nil {
			w.broken("a retried call fails without a reason", "unprepare %s: %v", s.name, err)
		}
		s.state = gone
	}
	for _, s := range w.claims {
		s.calls = nil
	}
	time.Sleep(150 * time.Second) // failures in the background are retried meanwhile
	w.checkClaims()
	w.examine(false)
}
