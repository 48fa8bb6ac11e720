package node

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
)

// reserveWithin is how long a reset waits for prepares and MPS daemons of its GPU.
const reserveWithin = 30 * time.Second

// resets implements healthmonitor.Resetter.
type resets struct {
	journal  *journal.Journal
	facts    *facts.Facts
	preparer *prepare.Preparer
	sharing  *sharing.Manager
	driver   interface {
		Reset(ctx context.Context, uuid gpu.UUID) error
	}
	// allowed has the GPUs that policies let the plugin reset; nil: not known yet.
	allowed atomic.Pointer[map[gpu.UUID]bool]
}

// allow sets the GPUs that may be reset.
func (r *resets) allow(uuids map[gpu.UUID]bool) { r.allowed.Store(&uuids) }

// Facts implements healthmonitor.Resetter.
func (r *resets) Facts(uuid gpu.UUID) health.ResetFacts {
	x := health.ResetFacts{Claims: r.users(uuid)}
	if allowed := r.allowed.Load(); allowed != nil {
		x.Allowed = (*allowed)[uuid]
	}
	state, _ := r.facts.State()
	for _, g := range state.Node.GPUs {
		if g.UUID == uuid {
			x.Conditions, x.MIGOfOthers = g.Conditions, dividedByOthers(g.MIG)
		}
	}
	return x
}

// dividedByOthers reports whether a GPU has MIG instances that Tessera didn't make, or a
// MIG mode that Tessera didn't switch on and that may be gone after a reset. It is given
// the facts, which hide those of Tessera.
func dividedByOthers(mig *gpu.MIG) bool {
	return mig != nil && (len(mig.Instances) > 0 || mig.Enabled && mig.Switchable)
}

// users returns the claims that have, or may have, any of the GPU.
func (r *resets) users(uuid gpu.UUID) []string {
	var all []string
	for _, c := range r.journal.Claims() {
		name := "claim " + c.Namespace + "/" + c.Name
		if c.Name == "" {
			name = "claim " + c.ClaimUID
		}
		switch {
		case !c.MayUse(uuid):
		case c.IsUnreadable():
			all = append(all, "perhaps "+name+", whose journal record can't be read")
		default:
			all = append(all, name)
		}
	}
	return all
}

// Reserve implements healthmonitor.Resetter.
func (r *resets) Reserve(ctx context.Context, uuid gpu.UUID) (release func(), _ error) {
	ctx, cancel := context.WithTimeout(ctx, reserveWithin)
	defer cancel()
	release, err := r.preparer.Exclude(ctx, uuid, "it is being reset")
	if err != nil {
		return nil, err
	}
	if users := r.users(uuid); len(users) > 0 {
		release()
		return nil, fmt.Errorf("%s has it", users[0])
	}
	if err := r.sharing.AwaitDaemonEnds(ctx, uuid); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// Reset implements healthmonitor.Resetter.
func (r *resets) Reset(ctx context.Context, uuid gpu.UUID) (permanent bool, _ error) {
	err := r.driver.Reset(ctx, uuid)
	return errors.Is(err, driver.ErrResetImpossible), err
}
