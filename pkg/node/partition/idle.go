package partition

import (
	"fmt"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// holder returns the name of the claim that holds the partition, or a share of it,
// in the journal, "" if none does. A claim whose file can't be read counts as a
// holder of all that it may hold.
func (m *Manager) holder(p gpu.Partition) string {
	exactly := func(g holding.Holding) bool { return !g.Admin && g.Base() == gpu.Device(p) }
	for _, r := range m.Claims.Holders(p, "") {
		if slices.ContainsFunc(r.Holdings, exactly) || m.Journal.IsUnreadable(r.ClaimUID) {
			return fmt.Sprintf("claim %s/%s (UID %s)", r.Namespace, r.Name, r.ClaimUID)
		}
	}
	for _, u := range m.Journal.Unreadable() {
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
