package partition

import (
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// BeginReading is called before the node is read, and Hide with what was read. One goroutine
// reads at a time. A record is noted after it is written and before the hardware is changed,
// so that every partition that the reading can see is in a record that Hide knows.
func (m *Manager) BeginReading() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.written = m.cfg.Journal.GPUs()
}

// note notes a record for the reading under way.
func (m *Manager) note(r holding.GPURecord) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.written = append(m.written, r)
}

// Hide returns the node as it was read, without our instances, and with a mode that
// we switched on shown as off. Instances that were created or destroyed during the
// reading don't show, so that what a node reports doesn't change with claims. While a
// mode is ours, the GPU's other facts are as before has them, since some (reserved
// memory, index, minor number) may be others in MIG mode. So are those of the GPUs in unread,
// which are in node as they were at a time whose records aren't known any more.
func (m *Manager) Hide(node gpu.Node, unread []gpu.UUID, before []gpu.GPU) gpu.Node {
	m.mu.Lock()
	records := slices.Clone(m.written)
	m.mu.Unlock()
	node.GPUs = slices.Clone(node.GPUs)
	for i, g := range node.GPUs {
		if last, ok := find(before, g.UUID); ok && slices.Contains(unread, g.UUID) {
			last.Conditions = g.Conditions
			node.GPUs[i] = last
			continue
		}
		for _, r := range records {
			if r.GPU == g.UUID && r.BootID == m.cfg.BootID {
				node.GPUs[i].MIG = without(node.GPUs[i].MIG, r)
				node.GPUs[i] = frozen(node.GPUs[i], before, r)
			}
		}
	}
	return node
}

// frozen returns the GPU with the facts that it had before its mode was ours.
func frozen(now gpu.GPU, before []gpu.GPU, r holding.GPURecord) gpu.GPU {
	was, ok := find(before, now.UUID)
	if !r.ModeSwitched || !ok || now.MIG == nil || was.MIG == nil {
		return now
	}
	mig := *now.MIG
	mig.Profiles = was.MIG.Profiles
	was.MIG, was.Conditions = &mig, now.Conditions
	return was
}

// find returns the GPU with the UUID.
func find(gpus []gpu.GPU, uuid gpu.UUID) (gpu.GPU, bool) {
	i := slices.IndexFunc(gpus, func(g gpu.GPU) bool { return g.UUID == uuid })
	if i < 0 {
		return gpu.GPU{}, false
	}
	return gpus[i], true
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
