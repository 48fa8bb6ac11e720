package healthmonitor

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// answerWithin is how long XIDs wait for the driver's recovery action: after an error
// the driver may be busy for some time. Then the catalog of XIDs decides
// provisionally, until the driver answers.
const answerWithin = 5 * time.Second

// watchedGPU is a GPU that is watched. All but the first three fields need the Monitor's lock.
type watchedGPU struct {
	uuid gpu.UUID
	// deciding is held while the state is replaced; unsaved, whether the journal has
	// another one, is under it.
	deciding sync.Mutex
	unsaved  bool

	// failed: the last reading said nothing about the GPU. unread is why, if the one before
	// didn't either: one that fails now and then changes no condition.
	failed  bool
	unread  string
	current health.State
	xids    []gpu.XID // not decided on yet, each kind once
	// healing explains how the condition ResetRequired is going to end.
	healing string
}

func newWatchedGPU(uuid gpu.UUID, s health.State) *watchedGPU {
	return &watchedGPU{uuid: uuid, current: s}
}

func (m *Monitor) stateOf(w *watchedGPU) health.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return w.current
}

func (m *Monitor) set(w *watchedGPU, s health.State) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w.current = s
}

// isSick reports whether something is wrong with the GPU or its MPS daemons, or not known.
func (m *Monitor) isSick(w *watchedGPU) bool {
	faults, _ := m.cfg.Sharing.DaemonFaults(w.uuid)
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(faults) > 0 || len(w.current.Causes) > 0 || w.failed
}

// add adds an XID, unless one like it waits to be decided on.
func (m *Monitor) add(w *watchedGPU, x gpu.XID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !slices.ContainsFunc(w.xids, func(y gpu.XID) bool { return errorKey(x) == errorKey(y) }) {
		w.xids = append(w.xids, x)
	}
}

// take returns the XIDs that wait to be decided on, and removes them.
func (m *Monitor) take(w *watchedGPU) []gpu.XID {
	m.mu.Lock()
	defer m.mu.Unlock()
	xids := w.xids
	w.xids = nil
	return xids
}

// watch reads the GPU's vitals, and resets the GPU if that is needed and allowed.
func (m *Monitor) watch(ctx context.Context, w *watchedGPU) {
	if vitals := m.examine(ctx, w); vitals != nil {
		m.heal(ctx, w, vitals.Recovery)
	}
}

// answer is the result of a reading.
type answer struct {
	vitals gpu.Vitals
	err    error
}

// examine reads the GPU, and decides on its XIDs and on the reading, which it returns;
// nil if the GPU could not be read. Without hardware there is nothing to decide on, nor for
// a GPU that the node doesn't have any more.
func (m *Monitor) examine(ctx context.Context, w *watchedGPU) *gpu.Vitals {
	m.using.RLock()
	defer m.using.RUnlock()
	if !m.canRead(w.uuid) {
		return nil
	}
	xids := m.take(w)
	answered := make(chan answer, 1)
	go func() {
		vitals, err := m.hardware.Session.Vitals(w.uuid)
		answered <- answer{vitals, err}
	}()
	late := time.NewTimer(answerWithin)
	defer late.Stop()
	var a answer
	select {
	case a = <-answered:
	case <-late.C:
		m.decide(ctx, w, append(xids, m.take(w)...), gpu.RecoveryNotRead)
		xids = nil
		a = <-answered
	}
	recovery := a.recovery()
	if recovery == gpu.RecoveryNotRead { // the next reading may take as long
		xids = append(xids, m.take(w)...)
	}
	m.decide(ctx, w, xids, recovery)
	m.observe(ctx, w, a)
	if a.err != nil {
		return nil
	}
	return &a.vitals
}

// recovery returns the recovery action. A GPU that is lost has none.
func (a answer) recovery() gpu.RecoveryAction {
	if a.err != nil && nvml.ConditionOf(a.err).Type != gpu.Lost {
		return gpu.RecoveryNotRead
	}
	return a.vitals.Recovery
}

// decide decides on XIDs.
func (m *Monitor) decide(ctx context.Context, w *watchedGPU, xids []gpu.XID, recovery gpu.RecoveryAction) {
	for _, x := range xids {
		var notice *health.Notice
		m.change(ctx, w, func(s health.State) health.State {
			s, notice = s.ObserveXID(x, recovery, m.load())
			return s
		})
		if notice != nil {
			m.queue(*notice)
		}
	}
}

// observe decides on a reading. An error that may be one of this program says
// nothing about the GPU but that its health isn't known.
func (m *Monitor) observe(ctx context.Context, w *watchedGPU, a answer) {
	r := health.Reading{At: time.Now(), Load: m.load()}
	r.DaemonFaults, r.DaemonsKnown = m.cfg.Sharing.DaemonFaults(w.uuid)
	var problem error
	if a.err == nil {
		r.Vitals = &a.vitals
	} else if c := nvml.ConditionOf(a.err); c.Type == gpu.Unreadable {
		problem = a.err // the reading of the facts says whether more can't be read than the vitals
	} else {
		r.Conditions = []gpu.Condition{c}
	}
	m.noteUnread(ctx, w, problem)
	m.change(ctx, w, func(s health.State) health.State { return s.Observe(r) })
}

// noteUnread notes why a reading said nothing about the GPU; nil if it did.
func (m *Monitor) noteUnread(ctx context.Context, w *watchedGPU, err error) {
	m.mu.Lock()
	why := ""
	if err != nil && w.failed {
		why = err.Error()
	}
	changed := w.unread != why
	w.failed, w.unread = err != nil, why
	m.mu.Unlock()
	if !changed {
		return
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "A GPU's vitals can't be read", "node", m.cfg.NodeName, "gpu", w.uuid)
	}
	m.publish()
}
