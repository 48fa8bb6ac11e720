package prepare

import (
	"context"
	"errors"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// step is a part of a prepare, as a reason why one failed.
type step string

const (
	stepState    step = "state"
	stepHardware step = "hardware"
	stepSharing  step = "sharing"
	stepCDI      step = "cdi"
	stepOther    step = "other"
)

// failure is the error of a prepare, with the step that failed and the class: those of the cause,
// whatever went wrong after it.
type failure struct {
	error

	step  step
	class class
}

func (f failure) Unwrap() error { return f.error }

// failedAt returns the error of a step as a failure; nil for nil. If the call has ended, the
// error may only say so.
func failedAt(ctx context.Context, s step, err error) error {
	if err == nil {
		return nil
	}
	c := classOf(err)
	if c == ofNode && ctx.Err() != nil {
		c = ofMoment
	}
	return failure{err, s, c}
}

// class says whose failure a failed prepare is.
type class string

const (
	// ofDevice: the GPU, or a part of it, can't be given to any claim. Other GPUs of the node can.
	ofDevice class = "device"
	// ofNode: no claim that needs the same can be prepared on the node.
	ofNode class = "node"
	// ofClaim: the claim asks for something that can't be, on any node.
	ofClaim class = "claim"
	// ofMoment: it may be over at the kubelet's next try.
	ofMoment class = "moment"
)

// classesOf returns the classes that failures of each reason can have.
func classesOf() map[string][]class {
	return map[string][]class{
		"held": {ofMoment}, "refused": {ofClaim}, "stopped": {ofMoment},
		string(stepState):    {ofNode, ofMoment},
		string(stepHardware): {ofDevice, ofNode, ofMoment},
		string(stepSharing):  {ofDevice, ofNode, ofClaim, ofMoment},
		string(stepCDI):      {ofDevice, ofNode, ofMoment},
		string(stepOther):    {ofDevice, ofNode, ofClaim, ofMoment},
	}
}

// classOf returns the class of an error. An error that says nothing of a GPU, of the claim or of
// the moment is the node's.
func classOf(err error) class {
	if f, ok := errors.AsType[failure](err); ok {
		return f.class
	}
	_, refused := errors.AsType[*gpu.RefusedError](err)
	_, dead := errors.AsType[facts.DeadError](err)
	switch {
	case refused, dead, isAny(err, nvml.ErrLost, nvml.ErrNotResponding):
		return ofDevice
	case errors.Is(err, claim.ErrPermanent), sharing.IsUnsupported(err):
		return ofClaim
	case isAny(err, ErrHeld, errUnprepared, errGivenUp, errReallocated, partition.ErrHeld, partition.ErrNoDevice, facts.ErrNodeUnseen,
		context.Canceled, context.DeadlineExceeded):
		return ofMoment
	default:
		return ofNode
	}
}

func isAny(err error, targets ...error) bool {
	for _, target := range targets {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}
