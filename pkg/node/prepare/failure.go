package prepare

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

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

// tryAgainAfter is the pause before the second attempt at what the hardware has refused: a program
// that only looks at the GPU, such as a monitor, may have kept it from being changed.
const tryAgainAfter = 250 * time.Millisecond

// readyAgain is a second attempt of readyDevice, if the hardware has refused the first one. One
// refusal says little: if the call ends before the second attempt, the error isn't a refusal.
func (p *Preparer) readyAgain(ctx context.Context, g holding.Holding, err error) (gpu.Instance, error) {
	if _, refused := errors.AsType[*gpu.RefusedError](err); !refused {
		return gpu.Instance{}, err
	}
	select {
	case <-time.After(tryAgainAfter):
		return p.readyDevice(ctx, g)
	case <-ctx.Done():
		return gpu.Instance{}, fmt.Errorf("try a second time after %q: %w", err.Error(), context.Cause(ctx))
	}
}
