package sharing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// closedFor is how long a GPU stays closed to all processes after its MPS daemon
// is back: a program that didn't find the daemon takes a while to come to the GPU
// (0.3 s on an H200 without load), and would be let in before the server is there.
const closedFor = 2 * time.Second

// outage is what is wrong with a daemon that claims need, or was until just now. It is
// over when both of its parts are.
type outage struct {
	// closed is set if clients can't find the daemon of whole GPUs, or couldn't until just
	// now: then the GPUs are closed to all processes until openAt, which is zero while the
	// daemon is away.
	closed bool
	openAt time.Time
	// since is when the daemon's clients began to fail or wait, and message why, as last
	// reported; empty once it has a server again. In between it may be restarted many times.
	since   time.Time
	message string
	// warned are the UIDs of the claims that Warn was called for since then.
	warned map[string]bool
}

// saw stores a report of all daemons.
func (m *Manager) saw(report mps.Report) {
	n := m.readNeeds()
	is := make(map[string]mps.State, len(report.Daemons))
	for _, s := range report.Daemons {
		is[s.Name] = s
	}
	m.mu.Lock()
	was, before := m.watch.found, m.faulty()
	m.watch.found, m.watch.revision, m.watch.answered, m.watch.current = is, report.Revision, m.watch.calls, true
	maps.DeleteFunc(m.outages, func(name string, _ *outage) bool { return n.daemons[name] == nil })
	m.trackClosures(&n, was)
	closed := m.closedGPUs(&n)
	warnings := m.trackFaults(&n, was)
	changed := !slices.Equal(before, m.faulty())
	m.mu.Wake()
	m.mu.Unlock()
	for _, uuid := range closed {
		m.worker.At(uuid, time.Now())
	}
	if changed {
		select {
		case m.faultsChanged <- struct{}{}:
		default:
		}
	}
	for _, w := range warnings {
		m.cfg.Warn(w.claim, reasonDaemonFailed, w.message)
	}
}

// outageOf returns the outage of a daemon, a new one if there is none. Needs the lock.
func (m *Manager) outageOf(daemon string) *outage {
	if m.outages[daemon] == nil {
		m.outages[daemon] = &outage{warned: map[string]bool{}}
	}
	return m.outages[daemon]
}

// trackClosures updates the closures of all daemons of whole GPUs that claims need, after
// the report before was. Needs the lock.
func (m *Manager) trackClosures(n *needs, was map[string]mps.State) {
	if !m.cfg.ExclusiveProcess {
		return
	}
	first := was == nil // then claims' daemons should be there, though none was before
	for name, w := range n.daemons {
		is, there := m.watch.found[name]
		before, known := was[name]
		if !n.hasWholeOf(name) || !there && !known && !first {
			continue
		}
		m.trackClosure(name, before, is)
		if o := m.outages[name]; first && (o == nil || !o.closed) && slices.ContainsFunc(w.gpus(), m.leftClosed) {
			m.closeUntilOpen(name)
		}
	}
}

// trackClosure updates the closure of a daemon, from its previous state was to its state
// is; either is empty if there is none. Needs the lock.
func (m *Manager) trackClosure(name string, was, is mps.State) {
	o := m.outages[name]
	away := o != nil && o.closed && o.openAt.IsZero()
	switch {
	case is.Phase == mps.Ending, is.Name == "" && was.Phase == mps.Ending:
		if o != nil { // its claims are gone
			o.closed = false
		}
	case is.Phase == mps.Running:
		if away || was.PID != 0 && was.PID != is.PID {
			m.closeUntilOpen(name)
		}
	case mayHaveLostClients(was, is):
		o = m.outageOf(name)
		o.closed, o.openAt = true, time.Time{}
	}
}

// mayHaveLostClients reports whether a daemon that doesn't run may have clients that can't
// find it. One that is started for the first time has none yet.
func mayHaveLostClients(was, is mps.State) bool {
	return is.Name == "" || is.Phase == mps.Failed || is.Message != "" || was.Phase == mps.Running
}

// closeUntilOpen closes the GPUs of a daemon until clients that didn't find it have failed.
// Needs the lock.
func (m *Manager) closeUntilOpen(daemon string) {
	o := m.outageOf(daemon)
	o.closed, o.openAt = true, time.Now().Add(m.closedFor)
}

// leftClosed reports whether an earlier plugin has closed the GPU.
func (m *Manager) leftClosed(uuid gpu.UUID) bool {
	s, ok := m.cfg.Journal.Settings(uuid)
	return ok && s.Closed
}

// closedGPUs returns the GPUs of daemons that clients can't find. Needs the lock.
func (m *Manager) closedGPUs(n *needs) []gpu.UUID {
	var uuids []gpu.UUID
	for name, o := range m.outages {
		if w := n.daemons[name]; o.closed && w != nil {
			uuids = append(uuids, w.gpus()...)
		}
	}
	return uuids
}

// isClosed reports whether no process may use the GPU now, because a daemon on it
// that claims need is away, or was until just now. Run checks again when the
// closure may end.
func (m *Manager) isClosed(n *needs, uuid gpu.UUID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, o := range m.outages {
		w := n.daemons[name]
		if !o.closed || w == nil || !slices.Contains(w.gpus(), uuid) {
			continue
		}
		if !o.openAt.IsZero() && !time.Now().Before(o.openAt) {
			o.closed = false
			continue
		}
		if !o.openAt.IsZero() {
			m.worker.At(uuid, o.openAt)
		}
		return true
	}
	return false
}

// awaitOpen waits until the GPU of a daemon that runs may be open again.
func (m *Manager) awaitOpen(ctx context.Context, daemon string) error {
	m.mu.Lock()
	var openAt time.Time
	if o := m.outages[daemon]; o != nil && o.closed {
		openAt = o.openAt
	}
	m.mu.Unlock()
	if openAt.IsZero() {
		return nil
	}
	timer := time.NewTimer(time.Until(openAt))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait until programs that didn't find MPS daemon %s have failed: %w", daemon, ctx.Err())
	}
}

// reasonDaemonFailed is the reason of warnings about a claim's MPS daemon: the same
// as the GPU's condition.
const reasonDaemonFailed = string(gpu.MPSDaemonFailed)

// faultOf says why clients of a daemon that claims need fail or wait; empty where
// they don't, and while it is started for the first time.
func faultOf(s mps.State) string {
	switch {
	case s.Phase == mps.Running && s.Trouble != "":
		return fmt.Sprintf("MPS daemon %s runs, and its clients may wait or fail: %s. It isn't restarted, because other clients may still compute; "+
			"if it stays like this, delete the pods that share the GPU: the daemon ends with the last of them", s.Name, s.Trouble)
	case s.Phase == mps.Failed, s.Phase == mps.Starting && s.Restarts > 0:
		return fmt.Sprintf("MPS daemon %s has ended, and the supervisor starts it again: %s. Programs that used it have failed; restart those that have not ended",
			s.Name, s.Message)
	default:
		return ""
	}
}

// missedFault returns the fault of a daemon that has ended and was started again between
// two reports of the supervisor; empty if it wasn't. The end of one that was being
// stopped is none: its claims are gone.
func missedFault(was, is mps.State) string {
	if was.Phase == mps.Ending || was.PID == 0 || is.PID == 0 || was.PID == is.PID {
		return ""
	}
	return fmt.Sprintf("MPS daemon %s had ended and was started again. Programs that used it have failed; restart those that have not ended", is.Name)
}

// serves reports whether the daemon's clients are served.
func serves(s mps.State) bool { return s.Phase == mps.Running && s.Trouble == "" && s.ServerPID != 0 }

// DaemonFaults returns the faults of the GPU's daemons, and whether the supervisor
// reports them.
func (m *Manager) DaemonFaults(uuid gpu.UUID) ([]health.DaemonFault, bool) {
	n := m.readNeeds()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.watch.current {
		return nil, false
	}
	var faults []health.DaemonFault
	for _, name := range m.faulty() {
		if o, w := m.faultOf(name), n.daemons[name]; o != nil && w != nil && slices.Contains(w.gpus(), uuid) {
			faults = append(faults, health.DaemonFault{Since: o.since, Message: o.message})
		}
	}
	return faults, true
}

// awaitServed waits until no daemon of the record is known not to serve its clients. It returns a
// gpu.RefusedError for one that has not served them for as long as failsFor.
func (m *Manager) awaitServed(ctx context.Context, r holding.Record) error {
	for _, name := range r.Daemons() {
		since, why := m.fault(name)
		if since.IsZero() {
			continue
		}
		waiting, cancel := context.WithDeadline(ctx, since.Add(failsFor))
		err := m.mu.Wait(waiting, func() bool { return m.faultOf(name) == nil })
		cancel()
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return fmt.Errorf("wait until MPS clients are served (%s): %w", why, context.Cause(ctx))
		default:
			return refused(r, name, errors.New(why))
		}
	}
	return nil
}

// fault returns since when a daemon's clients are known not to be served, and why; zero if they
// are, or the supervisor doesn't report it.
func (m *Manager) fault(daemon string) (since time.Time, why string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if o := m.faultOf(daemon); o != nil {
		return o.since, o.message
	}
	return time.Time{}, ""
}

// faultOf returns the outage of a daemon whose clients are known not to be served, nil if they
// are. Needs the lock.
func (m *Manager) faultOf(daemon string) *outage {
	if o := m.outages[daemon]; m.watch.current && o != nil && o.message != "" && !serves(m.watch.found[daemon]) {
		return o
	}
	return nil
}

// DaemonFaultsChanged has something after a fault that DaemonFaults returns has begun or
// ended. It is for one receiver.
func (m *Manager) DaemonFaultsChanged() <-chan struct{} { return m.faultsChanged }

// faulty returns the daemons whose clients fail or wait, by name. Needs the lock.
func (m *Manager) faulty() []string {
	var names []string
	for name, o := range m.outages {
		if o.message != "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// warning is about one claim.
type warning struct {
	claim   holding.Record
	message string
}

// trackFaults updates the faults after the report before was, and returns a warning for
// each claim that has not been warned of its daemon's. Needs the lock.
func (m *Manager) trackFaults(n *needs, was map[string]mps.State) []warning {
	var warnings []warning
	for _, name := range slices.Sorted(maps.Keys(n.daemons)) {
		if o := m.outages[name]; o != nil && serves(m.watch.found[name]) {
			o.message = ""
			clear(o.warned)
		}
		w, message := n.daemons[name], cmp.Or(faultOf(m.watch.found[name]), missedFault(was[name], m.watch.found[name]))
		if message == "" {
			continue
		}
		o := m.outageOf(name)
		if o.message == "" {
			o.since = time.Now()
		}
		o.message = message
		for _, claim := range w.claims {
			if !o.warned[claim.ClaimUID] {
				o.warned[claim.ClaimUID] = true
				warnings = append(warnings, warning{claim, w.faultMessage(message)})
			}
		}
	}
	return warnings
}

// faultMessage adds the GPUs to the message.
func (w *wanted) faultMessage(message string) string {
	var names []string
	for _, uuid := range w.gpus() {
		names = append(names, string(uuid))
	}
	return fmt.Sprintf("GPU %s: %s", strings.Join(names, ", "), message)
}
