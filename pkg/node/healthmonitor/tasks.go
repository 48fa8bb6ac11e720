package healthmonitor

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// What is read of GPUs at times, without an event, and how often.
const (
	// answersEvery is the pause between two looks for GPUs that don't respond.
	answersEvery = 5 * time.Second
	// vitalsEvery is how often a GPU's vitals are read.
	vitalsEvery = time.Minute
	// sickVitalsEvery is the same while something is wrong with it, even if an admin has
	// ended the condition: two readings have to agree that it is over, within ten
	// seconds.
	sickVitalsEvery = 4 * time.Second
	// usageEvery is the interval of readings of a GPU's usage while there are scrapes, and the
	// period of the utilization by process.
	usageEvery = 5 * time.Second
	// settingsEvery is how often compute modes and time slices are compared with what claims need.
	settingsEvery = time.Minute
)

const (
	// minInterval is the least time between two readings of a GPU's vitals: events come in
	// storms.
	minInterval = 200 * time.Millisecond
	// gatherFor is how long an event waits for others: one error has several, such as
	// an XID and a moment later a recovery action.
	gatherFor = 50 * time.Millisecond
)

// task is something that Run does at its time, about a GPU or, if that is empty, about all. No
// task waits for another, so a call into the driver that hangs delays no other GPU, and no other
// kind of reading.
type task struct {
	kind kind
	gpu  gpu.UUID
}

// kind is what a task does.
type kind int

const (
	// askGPUs looks for GPUs that don't respond.
	askGPUs kind = iota
	// readVitals reads a GPU's vitals.
	readVitals
	// readUsage reads how much of a GPU programs use.
	readUsage
	// checkSettings compares the settings of shared GPUs with what claims need.
	checkSettings
	// endByHand ends a condition by hand.
	endByHand
)

// doTasks does each task at its time, until ctx ends.
func (m *Monitor) doTasks(ctx context.Context) {
	m.tasks.At(task{kind: askGPUs}, time.Now().Add(answersEvery))
	m.tasks.At(task{kind: checkSettings}, time.Now().Add(settingsEvery))
	m.tasks.Run(ctx, func(ctx context.Context, t task) {
		if pause := m.do(ctx, t); pause > 0 {
			m.tasks.At(t, time.Now().Add(pause))
		}
	})
}

// do does a task. It returns the time until it is to be done again, if nothing requests it
// earlier; 0: not before something does.
func (m *Monitor) do(ctx context.Context, t task) (pause time.Duration) {
	switch t.kind {
	case askGPUs:
		m.probe(ctx)
		return answersEvery
	case readVitals:
		w := m.getOrAdd(t.gpu)
		m.watch(ctx, w)
		sleep(ctx, minInterval)
		if m.isSick(w) {
			return sickVitalsEvery - minInterval
		}
		return vitalsEvery - minInterval
	case readUsage:
		return m.readUsage(t.gpu)
	case checkSettings:
		m.cfg.Sharing.CheckSettings()
		return settingsEvery
	case endByHand:
		m.handleEnding(ctx)
	}
	return 0
}

// requestVitals requests that a GPU's vitals are read soon.
func (m *Monitor) requestVitals(uuid gpu.UUID) {
	m.tasks.At(task{readVitals, uuid}, time.Now().Add(gatherFor))
}

// requestUsage requests that it is read at once how much of a GPU programs use.
func (m *Monitor) requestUsage(uuid gpu.UUID) { m.tasks.At(task{readUsage, uuid}, time.Now()) }

// sleep returns after the time, or at the end of ctx.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// canRead reports whether there is hardware, and the node has the GPU. Needs using.
func (m *Monitor) canRead(uuid gpu.UUID) bool {
	all, _, _ := m.cfg.Facts.GPUs()
	return m.hardware != nil && slices.Contains(all, uuid)
}

// readUsage reads how much of a GPU programs use, while that is wanted. It returns the time until
// the next reading, 0 for none.
func (m *Monitor) readUsage(uuid gpu.UUID) (pause time.Duration) {
	m.using.RLock()
	defer m.using.RUnlock()
	began, there := time.Now(), m.canRead(uuid)
	switch wanted := m.cfg.Readings.Wanted(); {
	case !wanted && there:
		if m.hardware.Session.EndUsage(uuid) {
			return 0
		}
		return usageEvery
	case !wanted:
		return 0
	case there:
		u, err := m.hardware.Session.Usage(uuid, usageEvery)
		m.cfg.Readings.Store(uuid, u, err)
	default:
		m.cfg.Readings.Store(uuid, gpu.Usage{}, gpu.ErrNoDriver)
	}
	return max(usageEvery-time.Since(began), minInterval)
}

// probe asks all GPUs for an answer. It requests a reading of the facts, which gives those that
// don't respond a condition, when these are others than before; the vitals of one that has
// become silent are read then.
func (m *Monitor) probe(ctx context.Context) {
	m.using.RLock()
	defer m.using.RUnlock()
	if m.hardware == nil {
		m.notResponding = nil
		return
	}
	began, before := time.Now(), m.notResponding
	m.notResponding = m.hardware.Session.Probe()
	m.cfg.Facts.Looked(began, m.notResponding)
	if !slices.Equal(m.notResponding, before) {
		klog.FromContext(ctx).Info("The set of GPUs that don't respond has changed", "node", m.cfg.NodeName, "gpus", m.notResponding, "before", before)
		m.cfg.Facts.RereadGPUs()
	}
}
