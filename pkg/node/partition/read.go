package partition

import (
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	// readAgain is after which time is read again what was disturbed, and
	// readsAtMost how often: a switch that hangs must not keep all GPUs of the node
	// from being looked at.
	readAgain   = 250 * time.Millisecond
	readsAtMost = 20
)

// Watch notes which partitions are ours, and which MIG modes are switched, while the
// node is read:
//
//	w := m.Watch()
//	defer w.End()
//	for again := true; again; again = w.Disturbed() {
//		node = read()
//	}
//	node = w.Hide(node, before)
//
// It is for one goroutine.
type Watch struct {
	m *Manager
	// reads are the readings so far; underway and begun are what switches returned
	// before the last of them.
	reads, underway, begun int
	// records are those that have been in force since the beginning; under m.mu.
	records []holding.GPURecord
}

// Watch begins with the current records. A record is added to the watches after it is
// written and before the hardware is changed, so that every partition that can be
// seen is in the watch's records.
func (m *Manager) Watch() *Watch {
	w := &Watch{m: m, reads: 1}
	w.underway, w.begun = m.switches()
	m.mu.Lock()
	m.watches[w] = true
	m.mu.Unlock()
	now := m.cfg.Journal.GPUs()
	m.mu.Lock()
	defer m.mu.Unlock()
	w.records = append(w.records, now...)
	return w
}

// End ends the watch.
func (w *Watch) End() {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	delete(w.m.watches, w)
}

// Disturbed reports whether the node has to be read again, and waits before that: a
// MIG mode was being switched during the last reading, for which the driver may
// unbind or reset a GPU (nvml.h), and one that doesn't answer would be reported. After
// some readings it returns false in any case.
func (w *Watch) Disturbed() bool {
	if _, begun := w.m.switches(); w.underway == 0 && w.begun == begun || w.reads == readsAtMost {
		return false
	}
	<-time.After(readAgain)
	w.reads++
	w.underway, w.begun = w.m.switches()
	return true
}

// Hide returns the node as it was read, without our instances, and with a mode that
// we switched on shown as off. Instances that were created or destroyed during the
// watch don't show, so that what a node reports doesn't change with claims. While a
// mode is ours, the GPU's other facts are as before has them, since some (reserved
// memory, index, minor number) may be others in MIG mode.
func (w *Watch) Hide(node gpu.Node, before []gpu.GPU) gpu.Node {
	w.m.mu.Lock()
	records := slices.Clone(w.records)
	w.m.mu.Unlock()
	node.GPUs = slices.Clone(node.GPUs)
	for i := range node.GPUs {
		for _, r := range records {
			if r.GPU == node.GPUs[i].UUID && r.BootID == w.m.cfg.BootID {
				node.GPUs[i].MIG = without(node.GPUs[i].MIG, r)
				node.GPUs[i] = frozen(node.GPUs[i], before, r)
			}
		}
	}
	return node
}

// switches returns how many modes are being switched, and how many were begun to
// be.
func (m *Manager) switches() (underway, begun int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.switching, m.switched
}

// disturb says that a mode is switched from now on until done is called.
func (m *Manager) disturb() (done func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.switching++
	m.switched++
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.switching--
	}
}

// tell adds a record to the watches under way.
func (m *Manager) tell(r holding.GPURecord) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for w := range m.watches {
		w.records = append(w.records, r)
	}
}

// frozen returns the GPU with the facts that it had before its mode was ours.
func frozen(now gpu.GPU, before []gpu.GPU, r holding.GPURecord) gpu.GPU {
	i := slices.IndexFunc(before, func(g gpu.GPU) bool { return g.UUID == now.UUID })
	if !r.ModeSwitched || i < 0 || now.MIG == nil || before[i].MIG == nil {
		return now
	}
	was := before[i]
	mig := *now.MIG
	mig.Profiles = was.MIG.Profiles
	was.MIG, was.Conditions = &mig, now.Conditions
	return was
}

// without returns the facts without the partitions in the record.
func without(facts *gpu.MIG, r holding.GPURecord) *gpu.MIG {
	if facts == nil {
		return nil
	}
	left := *facts
	if r.ModeSwitched {
		left.Enabled, left.Pending, left.Switchable = false, false, true
	}
	left.Instances = nil
	for _, i := range facts.Instances {
		if !slices.ContainsFunc(r.Partitions, func(made holding.MadePartition) bool { return agrees(made, i) }) {
			left.Instances = append(left.Instances, i)
		}
	}
	return &left
}
