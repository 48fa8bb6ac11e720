package sharing

import (
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// needs has the daemons and settings that claims need, by the journal. A claim whose Join
// hasn't begun needs none: its devices may not be ready, and its partition may still be
// being destroyed after an earlier claim.
type needs struct {
	daemons map[string]*wanted
	// timeSlices are the intervals that claims' configurations ask for, by GPU.
	timeSlices map[gpu.UUID]string
	// replicas are the GPUs that claims have replicas of.
	replicas map[gpu.UUID]bool
	// kept are claims whose daemons aren't stopped and whose GPUs' settings aren't restored:
	// the record can't be read, or the Join hasn't begun.
	kept holding.Claims
}

// wanted is a daemon that claims need.
type wanted struct {
	// devices it has, in the order of its indexes, and the bound of each.
	devices []gpu.Device
	bounds  []int64
	// threads is the upper bound of every client; 0: none.
	threads int
	// claims that need it.
	claims []holding.Record
}

func newNeeds() needs {
	return needs{daemons: map[string]*wanted{}, timeSlices: map[gpu.UUID]string{}, replicas: map[gpu.UUID]bool{}}
}

// readNeeds reads the journal. Whoever holds the lock of a daemon reads it again: a claim may
// have come or gone while it waited.
func (m *Manager) readNeeds() needs {
	n := newNeeds()
	for _, c := range m.cfg.Journal.Claims() {
		switch {
		case c.Phase >= holding.Leaving || !c.MayBeOf(m.cfg.BootID):
		case c.IsUnreadable() || !m.hasJoined(c.ClaimUID):
			n.kept = append(n.kept, c)
		default:
			n.add(c.Record)
		}
	}
	return n
}

func (m *Manager) hasJoined(claimUID string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.joined[claimUID]
}

func (n *needs) add(r holding.Record) {
	for _, g := range r.Holdings {
		if g.Admin {
			continue
		}
		if name := r.Daemon(g); name != "" {
			n.addDaemon(name, g)
			n.daemons[name].addClaim(r)
		}
		if g.TimeSlice != "" {
			n.timeSlices[g.GPU] = g.TimeSlice
		}
		if g.Replica != nil {
			n.replicas[g.GPU] = true
		}
	}
}

// addDaemon adds a holding to what its daemon needs. Each bound is the loosest
// of the limits that claims have there.
func (n *needs) addDaemon(name string, g holding.Holding) {
	w, base := n.daemons[name], g.Base()
	if w == nil {
		w = &wanted{threads: g.MPS.ThreadPercentage}
		n.daemons[name] = w
	}
	w.threads = loosest(w.threads, g.MPS.ThreadPercentage)
	if i := slices.Index(w.devices, base); i >= 0 {
		w.bounds[i] = loosest(w.bounds[i], g.MPS.MemoryMiB)
		return
	}
	w.devices, w.bounds = append(w.devices, base), append(w.bounds, g.MPS.MemoryMiB)
}

func (w *wanted) addClaim(r holding.Record) {
	if !slices.ContainsFunc(w.claims, func(c holding.Record) bool { return c.ClaimUID == r.ClaimUID }) {
		w.claims = append(w.claims, r)
	}
}

// loosest of two limits; 0 is none.
func loosest[N int | int64](a, b N) N {
	if a == 0 || b == 0 {
		return 0
	}
	return max(a, b)
}

// wants reports whether the daemon is needed, or kept.
func (n *needs) wants(daemon string) bool {
	return n.daemons[daemon] != nil || slices.ContainsFunc(n.kept, func(c holding.Claim) bool { return c.MayNeed(daemon) })
}

// keepsSettings reports whether the GPU's settings must not be restored.
func (n *needs) keepsSettings(uuid gpu.UUID) bool {
	return slices.ContainsFunc(n.kept, func(c holding.Claim) bool { return c.MayNeedSettings(uuid) })
}

// hasWhole reports whether claims need a daemon for the whole GPU.
func (n *needs) hasWhole(uuid gpu.UUID) bool {
	for _, w := range n.daemons {
		if slices.Contains(w.devices, gpu.Device(gpu.Whole{GPU: uuid})) {
			return true
		}
	}
	return false
}

// hasWholeOf reports whether claims need the daemon, and it is one of whole GPUs.
func (n *needs) hasWholeOf(daemon string) bool {
	w := n.daemons[daemon]
	return w != nil && slices.ContainsFunc(w.devices, func(d gpu.Device) bool { _, whole := d.(gpu.Whole); return whole })
}

// gpus that the daemon has something of, in ascending order.
func (w *wanted) gpus() []gpu.UUID {
	uuids := make([]gpu.UUID, 0, len(w.devices))
	for _, d := range w.devices {
		uuids = append(uuids, d.Parent())
	}
	slices.Sort(uuids)
	return slices.Compact(uuids)
}

// together returns the GPU and the GPUs that share a daemon with it, in ascending
// order. One operation handles them all.
func (n *needs) together(uuid gpu.UUID) []gpu.UUID {
	group := []gpu.UUID{uuid}
	for _, w := range n.daemons {
		if on := w.gpus(); slices.Contains(on, uuid) {
			group = append(group, on...)
		}
	}
	slices.Sort(group)
	return slices.Compact(group)
}

// gpus returns all GPUs on which claims need a daemon or a setting.
func (n *needs) gpus() map[gpu.UUID]bool {
	uuids := map[gpu.UUID]bool{}
	for _, w := range n.daemons {
		for _, uuid := range w.gpus() {
			uuids[uuid] = true
		}
	}
	for uuid := range n.timeSlices {
		uuids[uuid] = true
	}
	for uuid := range n.replicas {
		uuids[uuid] = true
	}
	return uuids
}
