package healthmonitor

import (
	"context"
	"fmt"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// reserveWithin is how long a reset waits for prepares and MPS daemons of its GPU.
const reserveWithin = 30 * time.Second

// resetFacts returns the basis of the decision on a reset, except for the time and the reading.
func (m *Monitor) resetFacts(uuid gpu.UUID) health.ResetFacts {
	x := health.ResetFacts{GPU: uuid, Claims: m.users(uuid)}
	if allowed := m.resettable.Load(); allowed != nil { // nil: not known yet
		x.Allowed = (*allowed)[uuid]
	}
	if g, ok := m.gpu(uuid); ok {
		x.Conditions, x.MIGOfOthers = g.Conditions, dividedByOthers(g.MIG)
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
func (m *Monitor) users(uuid gpu.UUID) []string {
	var all []string
	for _, c := range m.cfg.Journal.Claims() {
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

// reserve keeps claims from getting the GPU until release is called. It returns an error
// while anything of ours uses the GPU.
func (m *Monitor) reserve(ctx context.Context, uuid gpu.UUID) (release func(), _ error) {
	ctx, cancel := context.WithTimeout(ctx, reserveWithin)
	defer cancel()
	release, err := m.cfg.Preparer.Exclude(ctx, uuid, "it is being reset")
	if err != nil {
		return nil, err
	}
	if users := m.users(uuid); len(users) > 0 {
		release()
		return nil, fmt.Errorf("%s has it", users[0])
	}
	if err := m.cfg.Sharing.AwaitDaemonEnds(ctx, uuid); err != nil {
		release()
		return nil, err
	}
	return release, nil
}
