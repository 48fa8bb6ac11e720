package facts

import (
	"reflect"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// memory holds the GPUs that the node is known to have had: those that this
// plugin has read, and those in the previous plugin's report.
type memory struct {
	// last are the GPUs of the last reading, also while the driver is away.
	last []gpu.GPU
	// answered are those that some reading of this plugin has found alive.
	answered map[gpu.UUID]bool
	// reported are the GPUs in the previous plugin's report; sameBoot is whether it
	// was written since the machine booted; recalled is whether it has been read.
	recalled, sameBoot bool
	reported           []gpu.GPU
	// handedOut is whether the current reading was given reported when it began;
	// used is the same for the last completed reading.
	handedOut, used bool
}

// recall stores the previous plugin's report, once. It reports whether that added
// GPUs.
func (m *memory) recall(reported []gpu.GPU, sameBoot bool) bool {
	if m.recalled {
		return false
	}
	m.recalled = true
	m.reported, m.sameBoot = reported, sameBoot
	return len(m.reported) > 0
}

func (m *memory) found(gpus []gpu.GPU) {
	m.last, m.used = gpus, m.handedOut
	for _, g := range gpus {
		if Dead(g) == nil {
			if m.answered == nil {
				m.answered = map[gpu.UUID]bool{}
			}
			m.answered[g.UUID] = true
		}
	}
}

func (m *memory) forget(uuid gpu.UUID) {
	m.last, m.reported = without(m.last, uuid), without(m.reported, uuid)
	delete(m.answered, uuid)
}

// without returns the GPUs but the one with the UUID.
func without(gpus []gpu.GPU, uuid gpu.UUID) []gpu.GPU {
	return slices.DeleteFunc(slices.Clone(gpus), func(g gpu.GPU) bool { return g.UUID == uuid })
}

// mayReplace reports whether the previous plugin's report may be overwritten: the
// last reading took it into account, or agrees with it about all of its GPUs.
func (m *memory) mayReplace() bool {
	return m.used || !slices.ContainsFunc(m.reported, func(g gpu.GPU) bool {
		return !slices.ContainsFunc(m.last, func(h gpu.GPU) bool { return reflect.DeepEqual(lasting(g), lasting(h)) })
	})
}

// lasting returns the GPU's facts without those that may differ in every reading.
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
