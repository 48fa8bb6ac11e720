package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

var (
	// ErrHeld says that another claim has what is needed; it may be about to release it.
	ErrHeld = errors.New("the GPU is divided for another claim")
	// ErrNoDevice is the error of Find where there is no such MIG device.
	ErrNoDevice = errors.New("there is no such MIG device now, and admin access never makes one: ask again while a claim without admin access has it")
)

// refused returns the error as a refusal of the silicon that a claim is to be given.
func (v *visit) refused(err error) error {
	action := "be used whole"
	if p, ok := v.want.(gpu.Partition); ok {
		action = fmt.Sprintf("create a %s partition", p.Profile)
	}
	return &gpu.RefusedError{Silicon: []gpu.Device{v.want}, Action: action, Err: err}
}

// judge returns an error of the hardware as a refusal, if it is one.
func (v *visit) judge(ctx context.Context, err error) error {
	switch {
	case err == nil || v.want == nil || ctx.Err() != nil || !nvml.IsRefusal(err):
		return err
	case errors.Is(err, nvml.ErrInsufficientResources) && v.mayBeReleased():
		return fmt.Errorf("%w, which may be leaving: %w", ErrHeld, err)
	}
	return v.refused(err)
}

// mayBeReleased reports whether a claim that is on its way out has, or may have, something of the
// GPU. Engines, unlike places, may be missing until that is released.
func (v *visit) mayBeReleased() bool {
	return slices.ContainsFunc(v.m.cfg.Journal.ClaimsOn(v.uuid), func(c holding.Claim) bool {
		return c.Phase > holding.Prepared || c.GivenUp != nil || c.IsUnreadable()
	})
}
