package partition

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	// retryFirst and retryLast bound the time after which Run tries again what
	// failed; it doubles in between.
	retryFirst = 5 * time.Second
	retryLast  = time.Minute
)

// Run destroys partitions that nobody has used for as long as SetKeepWarm says,
// switches MIG mode off some seconds after the last partition of ours is gone,
// and retries failures. It returns when the context has ended and operations in
// progress are done.
func (m *Manager) Run(ctx context.Context) {
	m.worker.Sweep(ctx, "Idle MIG partitions stay for now; it is tried again", func(ctx context.Context, uuid gpu.UUID) error {
		return m.tidy(ctx, "sweep", uuid, limits{keepWarm: m.keep(uuid), linger: modeLinger})
	})
}

// plan has Run come back when something of ours is due to go.
func (v *visit) plan() {
	for _, o := range v.ours {
		v.planOwn(o)
	}
	switch {
	case !v.switched || len(v.ours) > 0:
		v.m.notEmpty(v.uuid)
	case len(v.others) > 0: // the mode stays on for their sake
		v.planIn(retryLast)
	default:
		v.planIn(modeLinger - v.m.emptyFor(v.uuid))
	}
}

// planOwn is plan for one of our partitions; a claim's partition is planned
// when the claim releases it.
func (v *visit) planOwn(o own) {
	keep := v.m.keep(v.uuid)
	switch {
	case o.instance == nil:
	case v.m.holder(o.Partition) == "":
		v.planIn(keep - v.m.idleFor(o.Partition))
	case v.m.isIdle(o.Partition): // given up, and the claim's record is about to go
		v.planIn(max(keep-v.m.idleFor(o.Partition), retryFirst))
	case len(v.m.cfg.Journal.Unreadable()) > 0: // whose claims give up what their names tell, and that may not be all
		v.planIn(retryLast)
	}
}

func (v *visit) planIn(wait time.Duration) { v.m.worker.At(v.uuid, time.Now().Add(wait)) }

// holder returns the name of the claim that holds the partition, or a share of it,
// in the journal, "" if none does. A claim whose file can't be read counts as a
// holder of all that it may hold.
func (m *Manager) holder(p gpu.Partition) string {
	exactly := func(g holding.Holding) bool { return !g.Admin && g.Base() == gpu.Device(p) }
	for _, r := range m.cfg.Claims.Holders(p, "") {
		if slices.ContainsFunc(r.Holdings, exactly) || m.cfg.Journal.IsUnreadable(r.ClaimUID) {
			return fmt.Sprintf("claim %s/%s (UID %s)", r.Namespace, r.Name, r.ClaimUID)
		}
	}
	for _, u := range m.cfg.Journal.Unreadable() {
		if len(u.Record.Holdings) == 0 {
			return fmt.Sprintf("perhaps claim %s, whose file %s can't be read", u.ClaimUID, u.Path)
		}
	}
	return ""
}

// setIdle says that a partition is idle from now on, or isn't.
func (m *Manager) setIdle(p gpu.Partition, idle bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !idle {
		delete(m.idle, p)
	} else if _, already := m.idle[p]; !already {
		m.idle[p] = time.Now()
	}
}

// isIdle reports whether the partition was said to be idle.
func (m *Manager) isIdle(p gpu.Partition) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, idle := m.idle[p]
	return idle
}

// idleFor returns how long the partition, which no claim holds, has been idle;
// if that is unknown, it counts from now on.
func (m *Manager) idleFor(p gpu.Partition) time.Duration {
	m.setIdle(p, true)
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Since(m.idle[p])
}

// emptyFor is how long a GPU whose mode we switched has had no partition of
// ours; from now on where that was not known.
func (m *Manager) emptyFor(uuid gpu.UUID) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, known := m.empty[uuid]; !known {
		m.empty[uuid] = time.Now()
	}
	return time.Since(m.empty[uuid])
}

func (m *Manager) notEmpty(uuid gpu.UUID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.empty, uuid)
}
