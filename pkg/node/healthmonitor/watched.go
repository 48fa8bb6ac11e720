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

const (
	// readEvery is how often a GPU is read without an event.
	readEvery = time.Minute
	// readSickEvery is the same while something is wrong with it, even if an admin has
	// ended the condition: two readings have to agree that it is over, within ten
	// seconds.
	readSickEvery = 4 * time.Second
	// answerWithin is how long XIDs wait for the driver's recovery action: after an error
	// the driver may be busy for some time. Then the catalog of XIDs decides
	// provisionally, until the driver answers.
	answerWithin = 5 * time.Second
	// minInterval is the least time between two readings: events come in storms.
	minInterval = 200 * time.Millisecond
	// gatherFor is how long an event waits for others: one error has several, such as
	// an XID and a moment later a recovery action.
	gatherFor = 50 * time.Millisecond
)

// watchedGPU is a GPU that is watched.
type watchedGPU struct {
	uuid gpu.UUID
	wake chan struct{}

	// deciding is held while the state is replaced; unsaved, whether the journal has
	// another one, is under it.
	deciding sync.Mutex
	unsaved  bool

	mu sync.Mutex
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
	return &watchedGPU{uuid: uuid, wake: make(chan struct{}, 1), current: s}
}

func (w *watchedGPU) state() health.State {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.current
}

// sick reports whether something is wrong with the GPU, or not known.
func (w *watchedGPU) sick() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.current.Causes) > 0 || w.failed
}

func (w *watchedGPU) set(s health.State) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.current = s
}

// requestReading requests that the GPU is read soon.
func (w *watchedGPU) requestReading() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// forgetRequest forgets a request for a reading, because one begins now.
func (w *watchedGPU) forgetRequest() {
	select {
	case <-w.wake:
	default:
	}
}

// add adds an XID, unless one like it waits to be decided on.
func (w *watchedGPU) add(x gpu.XID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.ContainsFunc(w.xids, func(y gpu.XID) bool { return errorKey(x) == errorKey(y) }) {
		w.xids = append(w.xids, x)
	}
}

// take returns the XIDs that wait to be decided on, and removes them.
func (w *watchedGPU) take() []gpu.XID {
	w.mu.Lock()
	defer w.mu.Unlock()
	xids := w.xids
	w.xids = nil
	return xids
}

// watch reads the GPU until ctx ends.
func (m *Monitor) watch(ctx context.Context, w *watchedGPU) {
	for ctx.Err() == nil {
		if vitals := m.examine(ctx, w); vitals != nil {
			m.heal(ctx, w, vitals.Recovery)
		}
		every := readEvery
		if faults, _ := m.cfg.DaemonFaults(w.uuid); len(faults) > 0 || w.sick() {
			every = readSickEvery
		}
		pause(ctx, minInterval, nil)
		if pause(ctx, every-minInterval, w.wake) {
			pause(ctx, gatherFor, nil)
			w.forgetRequest()
		}
	}
}

// pause returns after the time, at a signal or at the end of ctx. It reports whether
// there was a signal.
func pause(ctx context.Context, d time.Duration, signal <-chan struct{}) (signaled bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-signal:
		return true
	case <-ctx.Done():
	}
	return false
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
	if all, _, _ := m.cfg.Facts.GPUs(); m.hardware == nil || !slices.Contains(all, w.uuid) {
		return nil
	}
	xids := w.take()
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
		m.decide(ctx, w, append(xids, w.take()...), gpu.RecoveryNotRead)
		xids = nil
		a = <-answered
	}
	recovery := a.recovery()
	if recovery == gpu.RecoveryNotRead { // the next reading may take as long
		xids = append(xids, w.take()...)
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
	r.DaemonFaults, r.DaemonsKnown = m.cfg.DaemonFaults(w.uuid)
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
	w.mu.Lock()
	why := ""
	if err != nil && w.failed {
		why = err.Error()
	}
	changed := w.unread != why
	w.failed, w.unread = err != nil, why
	w.mu.Unlock()
	if !changed {
		return
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "A GPU's vitals can't be read", "node", m.cfg.NodeName, "gpu", w.uuid)
	}
	m.publish()
}
