package partition

import (
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// watch collects the records that were in force while it lasted.
type watch struct {
	records []holding.GPURecord
}

// Read returns the result of read without our instances, and with a mode that
// we switched on shown as off. Instances that are created or destroyed during
// read never show, so that what a node reports doesn't change with claims.
// While a mode is ours, the GPU's other facts are as before has them, since
// some (reserved memory, index, minor number) may be others in MIG mode. Where
// a mode was switched meanwhile, read is called again.
func (m *Manager) Read(before []gpu.GPU, read func() (gpu.Node, error)) (gpu.Node, error) {
	w := m.watch()
	node, err := m.undisturbed(read)
	m.unwatch(w)
	if err != nil {
		return node, err
	}
	node.GPUs = slices.Clone(node.GPUs)
	for i := range node.GPUs {
		for _, r := range w.records {
			if r.GPU == node.GPUs[i].UUID && r.BootID == m.BootID {
				node.GPUs[i].MIG = without(node.GPUs[i].MIG, r)
				node.GPUs[i] = frozen(node.GPUs[i], before, r)
			}
		}
	}
	return node, nil
}

const (
	// readAgain is after which time is read again what was disturbed, and
	// readsAtMost how often: a switch that hangs must not keep all GPUs of the node
	// from being looked at.
	readAgain   = 250 * time.Millisecond
	readsAtMost = 20
)

// undisturbed reads until no mode is switched meanwhile: the driver may unbind or
// reset a GPU for it (nvml.h), and one that doesn't answer would be reported.
func (m *Manager) undisturbed(read func() (gpu.Node, error)) (gpu.Node, error) {
	for reads := 1; ; reads++ {
		underway, before := m.switches()
		node, err := read()
		if _, after := m.switches(); underway == 0 && before == after || reads == readsAtMost {
			return node, err
		}
		<-time.After(readAgain)
	}
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

// watch starts with the current records. A record is added to the watches after it is
// written and before the hardware is changed, so that every partition that can be
// seen is in the watch's records.
func (m *Manager) watch() *watch {
	w := &watch{}
	m.mu.Lock()
	m.watches[w] = true
	m.mu.Unlock()
	now := m.Journal.GPUs()
	m.mu.Lock()
	defer m.mu.Unlock()
	w.records = append(w.records, now...)
	return w
}

func (m *Manager) unwatch(w *watch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.watches, w)
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
