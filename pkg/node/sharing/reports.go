package sharing

import (
	"cmp"
	"context"
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

// saw stores the daemons that the supervisor has reported, which are all. A report
// may arrive after newer ones, and after replies that are newer.
func (m *Manager) saw(report mps.Report) {
	p := m.planNow()
	var was map[string]mps.State
	m.change(func() {
		first := !m.listed
		was = maps.Clone(m.found)
		m.listed, m.current = true, true
		m.merge(report)
		m.trackAll(&p, was, first)
	})
	m.planClosures(&p)
	m.warn(&p, was)
}

// merge stores a report, except the daemons of which something newer is known. Needs
// the lock.
func (m *Manager) merge(report mps.Report) {
	if report.Revision != 0 && report.Revision < m.reported {
		return
	}
	known := func(name string) bool { return report.Revision != 0 && report.Revision < m.replied[name] }
	maps.DeleteFunc(m.replied, func(name string, _ mps.Revision) bool { return !known(name) })
	maps.DeleteFunc(m.found, func(name string, _ mps.State) bool { return !known(name) })
	for _, s := range report.Daemons {
		if !known(s.Name) {
			m.found[s.Name] = s
		}
	}
	m.reported = report.Revision
}

// isNews notes the revision of a reply about a daemon, and reports whether no report of
// all daemons is newer. Needs the lock.
func (m *Manager) isNews(name string, revision mps.Revision) bool {
	if revision != 0 && revision < m.reported {
		return false
	}
	m.replied[name] = revision
	return true
}

// sawGone stores that a daemon is gone.
func (m *Manager) sawGone(name string, revision mps.Revision) {
	m.change(func() {
		if m.isNews(name, revision) {
			delete(m.found, name)
		}
	})
}

// sawEnding stores that a daemon is being stopped. If its devices aren't known, it may
// be on the GPUs.
func (m *Manager) sawEnding(name string, revision mps.Revision, on []gpu.UUID) {
	m.change(func() {
		if !m.isNews(name, revision) {
			return
		}
		s := m.found[name]
		s.Name, s.Phase = name, mps.Ending
		if len(s.Devices) == 0 {
			s.Devices = on
		}
		m.found[name] = s
	})
}

// sawOne stores the state that the supervisor has replied of one daemon.
func (m *Manager) sawOne(name string, s mps.State) {
	p := m.planNow()
	var was mps.State
	m.change(func() {
		was = m.found[name]
		if !m.isNews(name, s.Revision) {
			return
		}
		if m.cfg.ExclusiveProcess && p.hasWholeOf(name) {
			m.track(name, was, s)
		}
		m.found[name] = s
	})
	m.planClosures(&p)
	m.warn(&p, map[string]mps.State{name: was})
}

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

// fault of a daemon: from its first report until the daemon has a server again. In between
// it may be restarted many times.
type fault struct {
	since time.Time
	// message is that of the last report.
	message string
	// warned are the UIDs of the claims that Warn was called for.
	warned map[string]bool
}

// warning is about one claim.
type warning struct {
	claim   holding.Record
	message string
}

// serves reports whether the daemon's clients are served.
func serves(s mps.State) bool { return s.Phase == mps.Running && s.Trouble == "" && s.ServerPID != 0 }

// DaemonFaults returns the faults of the GPU's daemons, and whether the supervisor
// reports them.
func (m *Manager) DaemonFaults(uuid gpu.UUID) ([]health.DaemonFault, bool) {
	p := m.planNow()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.listed || !m.current {
		return nil, false
	}
	var faults []health.DaemonFault
	for _, name := range slices.Sorted(maps.Keys(m.faults)) {
		if o, w := m.faults[name], p.daemons[name]; w != nil && slices.Contains(w.gpus(), uuid) && !serves(m.found[name]) {
			faults = append(faults, health.DaemonFault{Since: o.since, Message: o.message})
		}
	}
	return faults, true
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

// warn warns about the claims whose daemon has a fault, or has had one since was.
func (m *Manager) warn(p *plan, was map[string]mps.State) {
	m.mu.Lock()
	before := slices.Sorted(maps.Keys(m.faults))
	warnings := m.trackFaults(p, was)
	changed := !slices.Equal(before, slices.Sorted(maps.Keys(m.faults)))
	m.mu.Unlock()
	if changed {
		m.cfg.DaemonFaultsChanged()
	}
	for _, w := range warnings {
		m.cfg.Warn(w.claim, reasonDaemonFailed, w.message)
	}
}

// trackFaults updates the faults, and returns a warning for each claim that has not
// been warned of its daemon's. Needs the lock.
func (m *Manager) trackFaults(p *plan, was map[string]mps.State) []warning {
	maps.DeleteFunc(m.faults, func(name string, _ *fault) bool { return p.daemons[name] == nil || serves(m.found[name]) })
	var warnings []warning
	for _, name := range slices.Sorted(maps.Keys(p.daemons)) {
		w, message := p.daemons[name], cmp.Or(faultOf(m.found[name]), missedFault(was[name], m.found[name]))
		if message == "" {
			continue
		}
		o := m.faults[name]
		if o == nil {
			o = &fault{since: time.Now(), warned: map[string]bool{}}
			m.faults[name] = o
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

// gpusOf returns the GPUs that a daemon uses, as far as they are known. Needs the
// lock.
func (m *Manager) gpusOf(d mps.Daemon) []gpu.UUID {
	var uuids []gpu.UUID
	for _, device := range d.Devices {
		if uuid := m.gpuOf(device); uuid != "" {
			uuids = append(uuids, uuid)
		}
	}
	return uuids
}

// gpuOf returns the GPU that a daemon's device is or is of, empty for a MIG device that
// isn't known. Needs the lock.
func (m *Manager) gpuOf(device gpu.UUID) gpu.UUID {
	if device.IsWhole() {
		return device
	}
	for _, r := range m.cfg.Journal.GPUs() {
		for _, p := range r.Partitions {
			if r.BootID == m.cfg.BootID && p.Made != nil && p.Made.UUID == device {
				return r.GPU
			}
		}
	}
	for _, instances := range m.others {
		for p, mig := range instances {
			if mig == device {
				return p.GPU
			}
		}
	}
	return ""
}
