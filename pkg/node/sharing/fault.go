package sharing

import (
	"cmp"
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
