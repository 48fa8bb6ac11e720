package partition

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

const (
	// retryFirst and retryLast bound the time after which Run tries again what
	// failed; it doubles in between.
	retryFirst = 5 * time.Second
	retryLast  = time.Minute
)

// Hardware has the operations on GPUs (*nvml.Session). Errors wrap the
// sentinels of pkg/nvml.
type Hardware interface {
	// MIG reads mode, profiles and all GPU instances as they are now.
	MIG(uuid gpu.UUID) (gpu.MIG, error)
	// CreateInstance makes the partition. On failure it undoes what it made;
	// where it is stopped in between, or the undo fails, an instance may stay,
	// but never after nvml.ErrInsufficientResources.
	CreateInstance(p gpu.Partition) (gpu.Instance, error)
	// DestroyInstance destroys the instance if exactly the wanted one is there.
	DestroyInstance(uuid gpu.UUID, want gpu.Instance) error
	// SetMIGMode switches the mode, at once or not at all. Idempotent.
	SetMIGMode(uuid gpu.UUID, on bool) error
	// Minor reads the number of the GPU's device node, which SetMIGMode may change.
	Minor(uuid gpu.UUID) (int, error)
}

// Config has the parts and settings of a Manager.
type Config struct {
	Journal *journal.Journal
	// Specs are told the number of a GPU's device node after its MIG mode was switched, or
	// may have been, before the GPU or a part of it is given to a claim.
	Specs *cdi.Specs
	// BootID of the running kernel. The partitions in records of other boots are
	// gone.
	BootID string
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// Facts are to be read again after what Conditions returns has changed.
	Facts *facts.Facts
	// Steps, which may be nil, are told of each step after it; crash tests stop there.
	Steps *failpoint.Steps
}

// Manager makes and destroys partitions. Its methods may be called from
// everywhere at once; those that wait for a GPU's lock stop waiting when their
// context ends.
type Manager struct {
	cfg     Config
	worker  *agenda.Worker
	metrics *metrics

	// hw is replaced while no operation runs.
	hw Hardware

	mu       sync.Mutex
	keepWarm map[gpu.UUID]time.Duration
	// written are the records that have been in force since BeginReading.
	written []holding.GPURecord
	gpus    map[gpu.UUID]*onGPU
}

// onGPU is what is known of a GPU beside its record. It is for who has the GPU's lock.
type onGPU struct {
	// idle says since when partitions of ours are known to be held by no claim.
	idle map[gpu.Partition]time.Time
	// empty says since when the GPU, whose mode we switched, has none of ours; zero: it has,
	// or that isn't known.
	empty time.Time
	// unread: its MIG mode may have been switched since Config.Specs were told its number.
	unread bool
}

// New builds a Manager without hardware.
func New(c Config) *Manager {
	return &Manager{
		cfg: c, worker: agenda.NewWorker(retryFirst, retryLast), metrics: newMetrics(c.Registerer, c.Journal),
		keepWarm: map[gpu.UUID]time.Duration{}, gpus: map[gpu.UUID]*onGPU{},
	}
}

// SetHardware sets the access to the GPUs; nil while there is no driver. It
// waits for operations in progress, so that the previous session may be closed
// after it.
func (m *Manager) SetHardware(hw Hardware) {
	m.worker.Suspend()
	m.hw = hw
	m.worker.Resume()
}

// Suspend returns when no operation is in progress, so that the session may be closed
// for a while. Operations wait until the next SetHardware.
func (m *Manager) Suspend() { m.worker.Suspend() }

// SetKeepWarm sets how long an idle partition of a GPU is kept for the next
// claim of the same; partitions of other GPUs aren't kept. It applies to later
// Releases and to currently idle partitions.
func (m *Manager) SetKeepWarm(keep map[gpu.UUID]time.Duration) {
	m.mu.Lock()
	changed := !maps.Equal(keep, m.keepWarm)
	m.keepWarm = maps.Clone(keep)
	m.mu.Unlock()
	if !changed {
		return
	}
	for _, r := range m.cfg.Journal.GPUs() {
		m.worker.At(r.GPU, time.Now())
	}
}

// Conditions returns what the journal knows to be wrong with GPUs: one whose
// record can't be read is StateUnreadable until nothing that the record could
// have told of is left.
func (m *Manager) Conditions() map[gpu.UUID][]gpu.Condition {
	conditions := map[gpu.UUID][]gpu.Condition{}
	for _, u := range m.cfg.Journal.UnreadableGPUs() {
		conditions[u.GPU] = []gpu.Condition{{Type: gpu.StateUnreadable, Message: unreadable(u)}}
	}
	return conditions
}

// describeClaimOn returns the claim that holds the partition, or a share of it, in the journal, in
// words for an error; "" if none does. A claim whose file can't be read counts as a holder of all
// that it may hold.
func (m *Manager) describeClaimOn(p gpu.Partition) string {
	exactly := func(g holding.Holding) bool { return !g.Admin && g.Base() == gpu.Device(p) }
	for _, c := range m.cfg.Journal.ClaimsOn(p.GPU) {
		switch {
		case c.IsUnreadable() && c.MayHave(p):
			return fmt.Sprintf("perhaps claim %s, whose file %s can't be read", c.ClaimUID, c.File)
		case !c.IsUnreadable() && slices.ContainsFunc(c.Holdings, exactly):
			return fmt.Sprintf("claim %s/%s (UID %s)", c.Namespace, c.Name, c.ClaimUID)
		}
	}
	return ""
}

// keep returns the GPU's time of SetKeepWarm.
func (m *Manager) keep(uuid gpu.UUID) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.keepWarm[uuid]
}
