package driver

import (
	"context"
	"reflect"
	"slices"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// seen has the GPUs that the node is known to have had. Each reading is compared with it, so
// that a GPU which is lost is missed, also if that happened while no plugin was running. It is
// for one goroutine.
type seen struct {
	journal *journal.Journal
	bootID  string
	// has are the GPUs that the machine has had since it was booted, each as it was last
	// reported. hadBefore are those that it had before, and may have no more.
	has, hadBefore []gpu.GPU
	failed         bool // the last reading is not in the journal, which was logged
}

// recall reads the journal.
func (s *seen) recall() {
	switch before, ok := s.journal.Seen(); {
	case !ok:
	case before.BootID == s.bootID:
		s.has = before.GPUs
	default:
		s.hadBefore = before.GPUs
	}
}

// pass tells a new session which GPUs there are. A GPU that a claim's record names is there,
// whatever is known of it.
func (s *seen) pass(session *nvml.Session) {
	session.Remember(s.has, false)
	for _, r := range s.journal.Claims() {
		for _, uuid := range r.GPUs() {
			g := gpu.GPU{UUID: uuid, Index: -1, Minor: gpu.NoMinor}
			if i := indexOf(s.hadBefore, uuid); i >= 0 {
				g = s.hadBefore[i]
			}
			session.Remember([]gpu.GPU{g}, false)
		}
	}
	session.Remember(s.hadBefore, true)
}

// found takes in the GPUs of a reading, and writes what is new to the journal. After a failure
// the next reading tries again.
func (s *seen) found(ctx context.Context, gpus []gpu.GPU) {
	for _, g := range gpus {
		if facts.Dead(g) == nil {
			s.has, s.hadBefore = append(without(s.has, g.UUID), g), without(s.hadBefore, g.UUID)
		}
	}
	s.write(ctx, gpus)
}

// forget drops a GPU that the machine doesn't have any more.
func (s *seen) forget(ctx context.Context, uuid gpu.UUID) {
	s.has, s.hadBefore = without(s.has, uuid), without(s.hadBefore, uuid)
	if before, ok := s.journal.Seen(); ok {
		s.write(ctx, without(before.GPUs, uuid))
	}
}

func (s *seen) write(ctx context.Context, gpus []gpu.GPU) {
	now := holding.Seen{BootID: s.bootID}
	for _, g := range gpus {
		now.GPUs = append(now.GPUs, lasting(g))
	}
	if before, ok := s.journal.Seen(); ok && !s.failed && reflect.DeepEqual(before, now) {
		return
	}
	err := s.journal.PutSeen(now)
	if err != nil && !s.failed {
		klog.FromContext(ctx).Error(err, "The list of the node's GPUs can't be stored, retrying; a GPU that is lost while the plugin restarts may go unnoticed")
	}
	s.failed = err != nil
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

// without returns the GPUs but the one with the UUID.
func without(gpus []gpu.GPU, uuid gpu.UUID) []gpu.GPU {
	return slices.DeleteFunc(slices.Clone(gpus), func(g gpu.GPU) bool { return g.UUID == uuid })
}

func indexOf(gpus []gpu.GPU, uuid gpu.UUID) int {
	return slices.IndexFunc(gpus, func(g gpu.GPU) bool { return g.UUID == uuid })
}
