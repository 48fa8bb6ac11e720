package sharing

import (
	"maps"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// remember stores the instances of the claim's partitions that others created, and
// forgets those of claims that have gone.
func (m *Manager) remember(r holding.Record, given map[gpu.DeviceName]gpu.Prepared) {
	others := map[gpu.Partition]gpu.UUID{}
	for _, g := range r.Holdings {
		p, ok := g.Base().(gpu.Partition)
		if _, made := m.made(p); ok && !made && given[g.Device].Instance.UUID != "" {
			others[p] = given[g.Device].Instance.UUID
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.others, func(uid string, _ map[gpu.Partition]gpu.UUID) bool {
		_, there := m.cfg.Journal.Get(uid)
		return !there
	})
	if delete(m.others, r.ClaimUID); len(others) > 0 {
		m.others[r.ClaimUID] = others
	}
}

// made returns the MIG device of a partition that Tessera has created, or is creating or
// destroying: then it is empty.
func (m *Manager) made(p gpu.Partition) (mig gpu.UUID, ok bool) {
	r, ok := m.cfg.Journal.GPU(p.GPU)
	if !ok || r.BootID != m.cfg.BootID {
		return "", false
	}
	for _, made := range r.Partitions {
		switch {
		case made.Partition != holding.PartitionOf(p):
		case made.Made == nil:
			return "", true
		default:
			return made.Made.UUID, true
		}
	}
	return "", false
}

// instance returns the MIG device that a partition is now; empty if that isn't known. It
// isn't known of an earlier claim, because the UUIDs of MIG devices are used again.
func (m *Manager) instance(w *wanted, p gpu.Partition) gpu.UUID {
	if mig, ok := m.made(p); ok {
		return mig
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, claim := range w.claims {
		if mig := m.others[claim.ClaimUID][p]; mig != "" {
			return mig
		}
	}
	return ""
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
