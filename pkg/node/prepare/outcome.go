package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// mostOutcomes is how many outcomes may wait: more than pods run on a node. Beyond that they are
// dropped, because the kubelet tries again what was refused.
const mostOutcomes = 512

// Outcome is the end of a prepare that says something of a GPU: a claim was refused a device, or
// was given one of a GPU that has the condition PrepareFailed, or may soon have it. Claims that
// containers may already have, and admin access, have none.
type Outcome struct {
	GPU gpu.UUID
	// Device as the claim was allocated it, and the silicon that it needs.
	Device  gpu.DeviceName
	Silicon gpu.Device
	// Problem says why it was refused, after "the GPU": "can't create a 3g.40gb partition: …".
	// Empty: it was given.
	Problem string
	At      time.Time
	Load    health.Load
	// Namespace and Pods are the claim's.
	Namespace string
	Pods      []holding.Pod
}

// Outcomes has the outcomes of prepares, in the order in which they ended. It is for one receiver.
func (p *Preparer) Outcomes() <-chan Outcome { return p.outcomes }

// noteRefused notes an outcome for each device that the claim was refused, by the error.
func (p *Preparer) noteRefused(ctx context.Context, r holding.Record, before bool, err error) {
	refused, ok := errors.AsType[*gpu.RefusedError](err)
	if !ok || errors.Is(context.Cause(ctx), errUnprepared) || p.mayBeInUse(r, before) {
		return
	}
	p.hasRefused.Store(true)
	for _, silicon := range refused.Silicon {
		p.note(r, silicon, fmt.Sprintf("can't %s: %v", refused.Action, refused.Err))
	}
}

// noteGiven notes an outcome for each silicon that the claim was given of GPUs that refuse some, or
// may do.
func (p *Preparer) noteGiven(r holding.Record, before bool) {
	refusing := p.cfg.Facts.GPUsWith(gpu.PrepareFailed)
	if p.hasRefused.Load() {
		refusing = r.GPUs()
	}
	isOn := func(h holding.Holding) bool { return slices.Contains(refusing, h.GPU) }
	if !slices.ContainsFunc(r.Holdings, isOn) || p.mayBeInUse(r, before) {
		return
	}
	for _, held := range byGPU(r.Holdings) {
		for _, h := range held {
			if isOn(h) {
				p.note(r, h.Base(), "")
			}
		}
	}
}

// noteRestored is noteGiven for a prepared claim of an earlier plugin, which may have ended before
// its monitor knew that the claim was given devices. It notes those that no other claim can have at
// the same time: others may refuse more claims, and serve this one.
func (p *Preparer) noteRestored(r holding.Record) {
	r.Holdings = slices.DeleteFunc(slices.Clone(r.Holdings), func(h holding.Holding) bool { return h.Share != nil || h.Device.IsReplica() })
	p.noteGiven(r, false)
}

// note notes the outcome for silicon of the claim, unless it has only admin access there.
func (p *Preparer) note(r holding.Record, silicon gpu.Device, problem string) {
	i := slices.IndexFunc(r.Holdings, func(h holding.Holding) bool { return !h.Admin && h.Base() == silicon })
	if i < 0 {
		return
	}
	o := Outcome{
		GPU: silicon.Parent(), Device: r.Holdings[i].Device, Silicon: silicon, Problem: problem,
		At: time.Now(), Load: p.driverLoad(), Namespace: r.Namespace, Pods: r.Pods,
	}
	select {
	case p.outcomes <- o:
	default:
	}
}

// mayBeInUse reports whether containers may have the claim, if it was prepared before: those of
// another pod, or of its only pod after a restart of the kubelet. What is wrong with its devices
// now is no reason to end these, and that it can be prepared again doesn't show that another
// claim could be.
func (p *Preparer) mayBeInUse(r holding.Record, before bool) bool {
	switch {
	case !before:
		return false
	case len(r.Pods) > 1:
		return true
	}
	mounted, err := p.cfg.Containers.IsMounted(r.ClaimUID)
	return mounted || err != nil
}
