package sharing

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// reasonDaemonFailed is the reason of warnings about a claim's MPS daemon: the same
// as the GPU's condition.
const reasonDaemonFailed = string(gpu.MPSDaemonFailed)

// trouble says why clients of a daemon that claims need fail or wait; empty where
// they don't, and while it is started for the first time.
func trouble(s mps.State) string {
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

// outage is a warning about one claim.
type outage struct {
	claim   holding.Record
	message string
}

// missed returns the trouble of a daemon that has ended and was started again between
// two reports of the supervisor; empty if it wasn't. The end of one that was being
// stopped is no trouble: its claims are gone.
func missed(was, is mps.State) string {
	if was.Phase == mps.Ending || was.PID == 0 || is.PID == 0 || was.PID == is.PID {
		return ""
	}
	return fmt.Sprintf("MPS daemon %s had ended and was started again. Programs that used it have failed; restart those that have not ended", is.Name)
}

// warn warns about the claims whose daemon is, or since was has been, in trouble.
func (m *Manager) warn(p *plan, was map[string]mps.State) {
	m.mu.Lock()
	outages := m.newOutages(p, was)
	m.mu.Unlock()
	for _, o := range outages {
		m.cfg.Warn(o.claim, reasonDaemonFailed, o.message)
	}
}

// newOutages returns each claim once in an outage of its daemon, which lasts until
// the daemon has a server again: in between it may be restarted many times. Needs the
// lock.
func (m *Manager) newOutages(p *plan, was map[string]mps.State) []outage {
	maps.DeleteFunc(m.warned, func(name string, _ map[string]bool) bool {
		s := m.found[name]
		return p.daemons[name] == nil || s.Phase == mps.Running && s.Trouble == "" && s.ServerPID != 0
	})
	var outages []outage
	for _, name := range slices.Sorted(maps.Keys(p.daemons)) {
		w, message := p.daemons[name], cmp.Or(trouble(m.found[name]), missed(was[name], m.found[name]))
		if message == "" {
			continue
		}
		if m.warned[name] == nil {
			m.warned[name] = map[string]bool{}
		}
		for _, claim := range w.claims {
			if !m.warned[name][claim.ClaimUID] {
				m.warned[name][claim.ClaimUID] = true
				outages = append(outages, outage{claim, w.outageMessage(message)})
			}
		}
	}
	return outages
}

// outageMessage adds the GPUs to the trouble.
func (w *wanted) outageMessage(trouble string) string {
	var names []string
	for _, uuid := range w.gpus() {
		names = append(names, string(uuid))
	}
	return fmt.Sprintf("GPU %s: %s", strings.Join(names, ", "), trouble)
}
