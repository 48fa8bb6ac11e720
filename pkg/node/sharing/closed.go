package sharing

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
)

// closedFor is how long a GPU stays closed to all processes after its MPS daemon
// is back: a program that didn't find the daemon takes a while to come to the GPU
// (0.3 s on an H200 without load), and would be let in before the server is there.
const closedFor = 2 * time.Second

// closure is set for a daemon that clients can't find, or could not find until
// just now.
type closure struct {
	// until when; zero while the daemon is away.
	until time.Time
}

// over reports whether clients that didn't find the daemon have failed by now.
func (c closure) over(now time.Time) bool { return !c.until.IsZero() && !now.Before(c.until) }

// track updates the closure of a daemon of whole GPUs that claims need, from its
// previous state was to its state is; either is empty if there is none. Needs the
// lock.
func (m *Manager) track(name string, was, is mps.State) {
	c, closed := m.closed[name]
	switch {
	case is.Phase == mps.Ending, is.Name == "" && was.Phase == mps.Ending:
		delete(m.closed, name) // its claims are gone
	case is.Phase != mps.Running:
		// A daemon that is started for the first time has no clients yet.
		if is.Name == "" || is.Phase == mps.Failed || is.Message != "" || was.Phase == mps.Running {
			m.closed[name] = closure{}
		}
	case closed && c.until.IsZero(), was.PID != 0 && was.PID != is.PID:
		m.closed[name] = closure{until: time.Now().Add(m.closedFor)}
	}
}

// trackAll calls track for all daemons that were known, are there, or, with first,
// should have been there when this plugin started. Needs the lock.
func (m *Manager) trackAll(p *plan, was map[string]mps.State, first bool) {
	maps.DeleteFunc(m.closed, func(name string, _ closure) bool { return !p.hasWholeOf(name) })
	if !m.cfg.ExclusiveProcess {
		return
	}
	for name, w := range p.daemons {
		is, there := m.found[name]
		_, known := was[name]
		if !p.hasWholeOf(name) || !there && !known && !first {
			continue
		}
		m.track(name, was[name], is)
		if _, closed := m.closed[name]; first && !closed && slices.ContainsFunc(w.gpus(), m.leftClosed) {
			m.closed[name] = closure{until: time.Now().Add(m.closedFor)}
		}
	}
}

// leftClosed reports whether an earlier plugin has closed the GPU.
func (m *Manager) leftClosed(uuid gpu.UUID) bool {
	s, ok := m.cfg.Journal.Settings(uuid)
	return ok && s.Closed
}

// planClosures schedules the GPUs of daemons that clients can't find for Run.
func (m *Manager) planClosures(p *plan) {
	m.mu.Lock()
	names := slices.Collect(maps.Keys(m.closed))
	m.mu.Unlock()
	for _, name := range names {
		if w := p.daemons[name]; w != nil {
			for _, uuid := range w.gpus() {
				m.worker.At(uuid, time.Now())
			}
		}
	}
}

// isClosed reports whether no process may use the GPU now, because a daemon on it
// that claims need is away, or was until just now. Run checks again when the
// closure may end.
func (m *Manager) isClosed(p *plan, uuid gpu.UUID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	for name, c := range m.closed {
		w := p.daemons[name]
		if w == nil || !slices.Contains(w.gpus(), uuid) {
			continue
		}
		if c.over(now) {
			delete(m.closed, name)
			continue
		}
		if !c.until.IsZero() {
			m.worker.At(uuid, c.until)
		}
		return true
	}
	return false
}

// awaitOpen waits until the GPU of a daemon that runs may be open again.
func (m *Manager) awaitOpen(ctx context.Context, name string) error {
	m.mu.Lock()
	c, closed := m.closed[name]
	m.mu.Unlock()
	if !closed || c.until.IsZero() {
		return nil
	}
	timer := time.NewTimer(time.Until(c.until))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// server is the process id of the MPS server that has the whole GPU, as the
// supervisor says; 0 where none is known.
func (m *Manager) server(uuid gpu.UUID) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.found {
		if s.Phase == mps.Running && slices.Contains(s.Devices, uuid) {
			return s.ServerPID
		}
	}
	return 0
}

// sawMode notes that the GPU's compute mode was the one that claims need while it had
// this MPS server.
func (m *Manager) sawMode(uuid gpu.UUID, server int) {
	m.mu.Lock()
	m.modeSeen[uuid] = server
	m.mu.Unlock()
	m.setOthersMode(uuid, "")
}

// servedAll reports whether the GPU has had the same MPS server since its compute
// mode was seen to be right, and has it now. Then it was not reset, which takes the
// mode away and needs the server to be gone.
func (m *Manager) servedAll(uuid gpu.UUID) bool {
	now := m.server(uuid)
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.current && now != 0 && m.modeSeen[uuid] == now
}

// setOthersMode records the compute mode that another program has set; empty if
// none has.
func (m *Manager) setOthersMode(uuid gpu.UUID, message string) {
	m.mu.Lock()
	same := m.othersMode[uuid] == message
	m.mu.Unlock()
	if same {
		return
	}
	m.change(func() {
		delete(m.othersMode, uuid)
		if message != "" {
			m.othersMode[uuid] = message
		}
	})
}
