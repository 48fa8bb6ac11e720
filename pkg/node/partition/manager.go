package partition

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/keylock"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// Hardware is what is done to GPUs (*nvml.Session). Errors wrap the sentinels
// of pkg/nvml.
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
}

// Options are what a Manager is built from.
type Options struct {
	Journal *journal.Journal
	// BootID of the running kernel. What records of other boots tell of is gone.
	BootID string
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// ConditionsChanged, which may be nil, is called after what Conditions
	// returns has changed. It must not block.
	ConditionsChanged func()
	// ModeSwitched, which may be nil, is called after a GPU's MIG mode was switched,
	// before anything else is done with the GPU, whose facts may be others now.
	ModeSwitched func(gpu.UUID) error
	// Step, which may be nil, is called with the name of each step after the
	// step; crash tests stop there.
	Step func(step string)
}

// Manager makes and destroys partitions. Its methods may be called from
// everywhere at once; those that wait for a GPU's lock stop waiting when their
// context ends.
type Manager struct {
	Options
	locks   keylock.Locks[gpu.UUID]
	agenda  *agenda.Agenda[gpu.UUID]
	metrics *metrics

	// use is held for reading by every operation on the hardware.
	use sync.RWMutex
	hw  Hardware

	mu       sync.Mutex
	keepWarm map[gpu.UUID]time.Duration
	// idle says since when partitions of ours are known to be held by no claim,
	// and empty since when GPUs whose mode we switched have none of ours.
	idle    map[gpu.Partition]time.Time
	empty   map[gpu.UUID]time.Time
	watches map[*watch]bool
	// switching is how many MIG modes are being switched, switched how many were
	// begun to be.
	switching, switched int
}

// New builds a Manager without hardware.
func New(o Options) *Manager {
	if o.Step == nil {
		o.Step = func(string) {}
	}
	if o.ConditionsChanged == nil {
		o.ConditionsChanged = func() {}
	}
	if o.ModeSwitched == nil {
		o.ModeSwitched = func(gpu.UUID) error { return nil }
	}
	return &Manager{
		Options: o, agenda: agenda.New[gpu.UUID](retryFirst, retryLast), metrics: newMetrics(o.Registerer, o.Journal),
		keepWarm: map[gpu.UUID]time.Duration{}, idle: map[gpu.Partition]time.Time{}, empty: map[gpu.UUID]time.Time{},
		watches: map[*watch]bool{},
	}
}

// SetHardware says what the GPUs are reached through; nil while there is no
// driver. It waits for the operations under way, so that what was set before
// may be closed after it.
func (m *Manager) SetHardware(hw Hardware) {
	m.use.Lock()
	defer m.use.Unlock()
	m.hw = hw
}

// SetKeepWarm says how long an idle partition of a GPU is kept for the next
// claim of the same; not at all where nothing is said. It is for Releases from
// now on and for what is idle now.
func (m *Manager) SetKeepWarm(keep map[gpu.UUID]time.Duration) {
	m.mu.Lock()
	changed := !maps.Equal(keep, m.keepWarm)
	m.keepWarm = maps.Clone(keep)
	m.mu.Unlock()
	if !changed {
		return
	}
	for _, r := range m.Journal.GPUs() {
		m.agenda.At(r.GPU, time.Now())
	}
}

// Conditions returns what the journal knows to be wrong with GPUs: one whose
// record can't be read is StateUnreadable until nothing that the record could
// have told of is left.
func (m *Manager) Conditions() map[gpu.UUID][]gpu.Condition {
	conditions := map[gpu.UUID][]gpu.Condition{}
	for _, u := range m.Journal.UnreadableGPUs() {
		conditions[u.GPU] = []gpu.Condition{{Type: gpu.StateUnreadable, Message: unreadable(u)}}
	}
	return conditions
}

// Make returns the instance that the partition is, which a claim holds in the
// journal already. It is made unless it is there: one of ours is used again,
// and one that others made, if it has the same profile and place, is used as it
// is and never destroyed. Where the mode is off it is switched on. Idle
// partitions of ours in the way, or using the engines that this one needs, are
// destroyed. Idempotent; a partition that has vanished is made again.
//
// After an error, what was made is known and is destroyed by Release or Run.
func (m *Manager) Make(ctx context.Context, p gpu.Partition) (gpu.Instance, error) {
	var made gpu.Instance
	err := m.visit(ctx, "make", p.GPU, func(ctx context.Context, v *visit) (err error) {
		made, err = v.make(ctx, p)
		return err
	})
	if err != nil {
		return gpu.Instance{}, fmt.Errorf("make %s: %w", partitionName(p), err)
	}
	return made, nil
}

// Find returns the instance that the partition is, whoever made it. It changes
// nothing; an error where there is no such instance.
func (m *Manager) Find(ctx context.Context, p gpu.Partition) (gpu.Instance, error) {
	var found gpu.Instance
	err := m.visit(ctx, "find", p.GPU, func(ctx context.Context, v *visit) error {
		if err := v.look(ctx); err != nil {
			return err
		}
		i, ok := v.at(p)
		if !ok || i.UUID == "" {
			return errors.New("there is no such MIG device now, and admin access never makes one: ask again while a claim without admin access has it")
		}
		found = i
		return nil
	})
	if err != nil {
		return gpu.Instance{}, fmt.Errorf("find %s: %w", partitionName(p), err)
	}
	return found, nil
}

// Release says that the claim which had the partition, or a share of it, uses it no
// more: the claim is leaving (journal.SetLeaving), and its record is deleted after
// it. One of ours is destroyed, or stays warm. One that others made, or that a claim
// which isn't leaving has, stays. Idempotent. While processes use the instance it
// is an error that names them; while the GPU doesn't respond it is an error. Where
// the GPU is lost, or there is no driver, the partition counts as idle from then
// on, and is destroyed when it can be.
func (m *Manager) Release(ctx context.Context, p gpu.Partition) error {
	err := m.visit(ctx, "release", p.GPU, func(ctx context.Context, v *visit) error { return v.release(ctx, p) })
	if err != nil {
		return fmt.Errorf("release %s: %w", partitionName(p), err)
	}
	return nil
}

// Whole makes sure that the GPU can be used whole: idle partitions of ours are
// destroyed and the mode is switched off if we switched it on. An error where
// it is in MIG mode because of others.
func (m *Manager) Whole(ctx context.Context, uuid gpu.UUID) error {
	err := m.visit(ctx, "whole", uuid, func(ctx context.Context, v *visit) error { return v.whole(ctx) })
	if err != nil {
		return fmt.Errorf("use GPU %s whole: %w", uuid, err)
	}
	return nil
}

// Recover makes hardware and records agree: what a crash left half made is
// completed if a claim holds it and it can be, else destroyed; what nobody
// holds is destroyed or, where SetKeepWarm says so, kept; the mode is switched
// off where nothing of ours is left. It is for the start and for the arrival of
// a driver. What fails on one GPU stops nothing else; Run tries it again.
// Without hardware it does nothing.
func (m *Manager) Recover(ctx context.Context) error {
	return m.tidyAll(ctx, "recover", func(uuid gpu.UUID) limits { return limits{keepWarm: m.keep(uuid)} })
}

// Leave destroys all that is idle and switches back the modes: nothing of ours
// stays, but for what claims hold.
func (m *Manager) Leave(ctx context.Context) error {
	return m.tidyAll(ctx, "leave", func(gpu.UUID) limits { return limits{} })
}

// tidyAll tidies all GPUs that have a record, at once.
func (m *Manager) tidyAll(ctx context.Context, op string, of func(gpu.UUID) limits) error {
	var uuids []gpu.UUID
	for _, r := range m.Journal.GPUs() {
		uuids = append(uuids, r.GPU)
	}
	for _, u := range m.Journal.UnreadableGPUs() {
		uuids = append(uuids, u.GPU)
	}
	errs := make([]error, len(uuids))
	var wg sync.WaitGroup
	for i, uuid := range uuids {
		wg.Go(func() { errs[i] = m.tidy(ctx, op, uuid, of(uuid)) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// tidy is one visit that leaves on a GPU what the limits allow. What fails is
// planned again.
func (m *Manager) tidy(ctx context.Context, op string, uuid gpu.UUID, l limits) error {
	err := m.visit(ctx, op, uuid, func(ctx context.Context, v *visit) error { return v.tidy(ctx, l) })
	if errors.Is(err, errNoDriver) {
		return nil // Recover comes with the driver
	}
	if err != nil {
		m.agenda.Failed(uuid)
		return fmt.Errorf("tidy the MIG partitions of GPU %s: %w", uuid, err)
	}
	m.agenda.Succeeded(uuid)
	return nil
}

// keep is what SetKeepWarm said of the GPU.
func (m *Manager) keep(uuid gpu.UUID) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.keepWarm[uuid]
}
