package report

import (
	"reflect"
	"slices"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
)

// memory is which GPUs the node is known to have had: those that were found, and
// those in the report of the plugin before.
type memory struct {
	// last are the GPUs of the last reading, also while the driver is away.
	last []gpu.GPU
	// answered are those that some reading of this plugin has found alive.
	answered map[gpu.UUID]bool
	// reported are the GPUs in the report of the plugin before; sameBoot says that
	// it was made since the machine started.
	recalled, sameBoot bool
	reported           []gpu.GPU
	// handedOut says that reported was known when the reading began that is under
	// way, used that it was when the last one began.
	handedOut, used bool
}

// recall takes in the report of the plugin before; it returns whether it is news.
func (m *memory) recall(inv *v1alpha1.GPUInventory, bootID string) bool {
	if m.recalled {
		return false
	}
	m.recalled = true
	m.reported, m.sameBoot = inventory.Node(inv).GPUs, inv.Status.BootID == bootID
	return len(m.reported) > 0
}

func (m *memory) found(gpus []gpu.GPU) {
	m.last, m.used = gpus, m.handedOut
	for _, g := range gpus {
		if dead(g) == nil {
			if m.answered == nil {
				m.answered = map[gpu.UUID]bool{}
			}
			m.answered[g.UUID] = true
		}
	}
}

// mayReplace says whether the report of the plugin before may be written over:
// the last reading knew it, or says the same of all its GPUs.
func (m *memory) mayReplace() bool {
	return m.used || !slices.ContainsFunc(m.reported, func(g gpu.GPU) bool {
		return !slices.ContainsFunc(m.last, func(h gpu.GPU) bool { return reflect.DeepEqual(lasting(g), lasting(h)) })
	})
}

// lasting returns the facts of a GPU without what may be different every time.
func lasting(g gpu.GPU) gpu.GPU {
	g.Conditions = nil
	if g.MIG != nil {
		mig := *g.MIG
		mig.Instances = nil
		g.MIG = &mig
	}
	return g
}

// lists returns the GPUs that the machine has had since it started, and those
// that it had before and may have no more.
func (m *memory) lists() (has, hadBefore []gpu.GPU) {
	add := func(to, more []gpu.GPU, only func(gpu.GPU) bool) []gpu.GPU {
		for _, g := range more {
			same := func(h gpu.GPU) bool { return h.UUID == g.UUID }
			if only(g) && !slices.ContainsFunc(to, same) && !slices.ContainsFunc(has, same) {
				to = append(to, g)
			}
		}
		return to
	}
	all := func(gpu.GPU) bool { return true }
	answered := func(g gpu.GPU) bool { return m.answered[g.UUID] }
	if m.used {
		has = add(has, m.last, answered)
	}
	if m.sameBoot {
		has = add(has, m.reported, all)
	}
	has = add(has, m.last, answered)
	if !m.sameBoot {
		hadBefore = add(hadBefore, m.reported, all)
	}
	return has, hadBefore
}

// Remembered returns the GPUs that the machine has had since it started, each as
// it was last reported, and those that it had before and may have no more. It is
// for the beginning of each reading: a report of the plugin before is not written
// over by a reading that didn't know it.
func (r *Reporter) Remembered() (has, hadBefore []gpu.GPU) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.memory.handedOut = r.memory.recalled
	return r.memory.lists()
}
