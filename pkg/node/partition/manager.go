package partition

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/gpu"
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
}

// Config has the parts and settings of a Manager.
type Config struct {
	Journal *journal.Journal
	// BootID of the running kernel. The partitions in records of other boots are
	// gone.
	BootID string
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// ConditionsChanged, which may be nil, is called after what Conditions
	// returns has changed. It must not block.
	ConditionsChanged func()
	// ModeSwitched, which may be nil, is called after a GPU's MIG mode was switched,
	// or may have been, before the GPU or a part of it is given to a claim: its facts
	// may be others now. After an error it is called again.
	ModeSwitched func(gpu.UUID) error
	// Step, which may be nil, is called with the name of each step after the
	// step; crash tests stop there.
	Step func(step string)
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
	// idle says since when partitions of ours are known to be held by no claim,
	// and empty since when GPUs whose mode we switched have none of ours.
	idle    map[gpu.Partition]time.Time
	empty   map[gpu.UUID]time.Time
	watches map[*Watch]bool
	// unread has the GPUs whose MIG mode may have been switched since ModeSwitched
	// succeeded for them.
	unread map[gpu.UUID]bool
}

// New builds a Manager without hardware.
func New(c Config) *Manager {
	if c.Step == nil {
		c.Step = func(string) {}
	}
	if c.ConditionsChanged == nil {
		c.ConditionsChanged = func() {}
	}
	if c.ModeSwitched == nil {
		c.ModeSwitched = func(gpu.UUID) error { return nil }
	}
	return &Manager{
		cfg: c, worker: agenda.NewWorker(retryFirst, retryLast), metrics: newMetrics(c.Registerer, c.Journal),
		keepWarm: map[gpu.UUID]time.Duration{}, idle: map[gpu.Partition]time.Time{}, empty: map[gpu.UUID]time.Time{},
		watches: map[*Watch]bool{}, unread: map[gpu.UUID]bool{},
	}
}

// SetHardware sets the access to the GPUs; nil while there is no driver. It
// waits for operations in progress, so that the previous session may be closed
// after it.
func (m *Manager) SetHardware(hw Hardware) {
	m.worker.Exchange(func() { m.hw = hw })
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

// Made returns the partitions that Tessera has created on the GPU in this boot, or is
// creating or destroying: another boot's instances have the same IDs.
func (m *Manager) Made(uuid gpu.UUID) []holding.MadePartition {
	r, ok := m.cfg.Journal.GPU(uuid)
	if !ok || r.BootID != m.cfg.BootID {
		return nil
	}
	return r.Partitions
}

// Ensure returns the instance that the partition is, which a claim holds in the
// journal already. It is made unless it is there: one of ours is used again,
// and one that others made, if it has the same profile and place, is used as it
// is and never destroyed. Where the mode is off it is switched on. Idle
// partitions of ours in the way, or using the engines that this one needs, are
// destroyed. Idempotent; a partition that has vanished is created again.
//
// After an error, Release or Run destroys an incomplete partition.
func (m *Manager) Ensure(ctx context.Context, p gpu.Partition) (gpu.Instance, error) {
	var made gpu.Instance
	err := m.withGPU(ctx, "make", p.GPU, func(ctx context.Context, v *visit) (err error) {
		made, err = v.ensure(ctx, p)
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
	err := m.withGPU(ctx, "find", p.GPU, func(ctx context.Context, v *visit) error {
		if err := v.readForClaim(ctx); err != nil {
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
// more, and neither does a daemon for it (holding.Left); its record is
// deleted after it. One of ours is destroyed, or stays warm. One that others made, or that
// is in use (holding.Claims.InUse), stays. Idempotent. While processes use the instance it
// is an error that names them; while the GPU doesn't respond it is an error. Where
// the GPU is lost, or there is no driver, the partition counts as idle from then
// on, and is destroyed when it can be.
func (m *Manager) Release(ctx context.Context, p gpu.Partition) error {
	err := m.withGPU(ctx, "release", p.GPU, func(ctx context.Context, v *visit) error { return v.release(ctx, p) })
	if err != nil {
		return fmt.Errorf("release %s: %w", partitionName(p), err)
	}
	return nil
}

// ClearMIG makes sure that the GPU can be used whole: idle partitions of ours are
// destroyed and the mode is switched off if we switched it on. An error where
// it is in MIG mode because of others.
func (m *Manager) ClearMIG(ctx context.Context, uuid gpu.UUID) error {
	err := m.withGPU(ctx, "whole", uuid, func(ctx context.Context, v *visit) error { return v.whole(ctx) })
	if err != nil {
		return fmt.Errorf("use GPU %s whole: %w", uuid, err)
	}
	return nil
}

// Recover makes hardware and records agree. It completes a partition that a crash left
// incomplete if a claim holds it, and destroys it if it can't. It destroys partitions
// that no claim holds, unless SetKeepWarm keeps them, and switches MIG mode off where
// no partition of ours is left. It is called at the start and when a driver is found.
// A failure on one GPU doesn't stop the others; Run retries it. Without hardware it
// does nothing.
func (m *Manager) Recover(ctx context.Context) error {
	return m.tidyAll(ctx, "recover", func(uuid gpu.UUID) limits { return limits{keepWarm: m.keep(uuid)} })
}

// LeaveHost destroys all idle partitions and switches the modes back: of ours, only
// partitions of claims stay.
func (m *Manager) LeaveHost(ctx context.Context) error {
	return m.tidyAll(ctx, "leave", func(gpu.UUID) limits { return limits{} })
}

// tidyAll tidies all GPUs that have a record, at once.
func (m *Manager) tidyAll(ctx context.Context, op string, of func(gpu.UUID) limits) error {
	var uuids []gpu.UUID
	for _, r := range m.cfg.Journal.GPUs() {
		uuids = append(uuids, r.GPU)
	}
	for _, u := range m.cfg.Journal.UnreadableGPUs() {
		uuids = append(uuids, u.GPU)
	}
	return agenda.Each(uuids, func(uuid gpu.UUID) error { return m.tidy(ctx, op, uuid, of(uuid)) })
}

// tidy is one visit that destroys the partitions of a GPU beyond the limits. A
// failure is planned again.
func (m *Manager) tidy(ctx context.Context, op string, uuid gpu.UUID, l limits) error {
	err := m.worker.Try(uuid, func() error {
		return m.withGPU(ctx, op, uuid, func(ctx context.Context, v *visit) error { return v.tidy(ctx, l) })
	})
	if err != nil {
		return fmt.Errorf("tidy the MIG partitions of GPU %s: %w", uuid, err)
	}
	return nil
}

// Run destroys partitions that nobody has used for as long as SetKeepWarm says,
// switches MIG mode off some seconds after the last partition of ours is gone,
// and retries failures. It returns when the context has ended and operations in
// progress are done.
func (m *Manager) Run(ctx context.Context) {
	sweep := func(ctx context.Context, uuid gpu.UUID) error {
		return m.tidy(ctx, "sweep", uuid, limits{keepWarm: m.keep(uuid), linger: modeLinger})
	}
	m.worker.Sweep(ctx, sweep, func(log klog.Logger, uuid gpu.UUID, err error) {
		log.Error(err, "Idle MIG partitions stay for now; it is tried again", "gpu", uuid)
	})
}

// holder returns the name of the claim that holds the partition, or a share of it,
// in the journal, "" if none does. A claim whose file can't be read counts as a
// holder of all that it may hold.
func (m *Manager) holder(p gpu.Partition) string {
	exactly := func(g holding.Holding) bool { return !g.Admin && g.Base() == gpu.Device(p) }
	for _, c := range m.cfg.Journal.Claims() {
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

func (m *Manager) isUnread(uuid gpu.UUID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.unread[uuid]
}

func (m *Manager) setUnread(uuid gpu.UUID, unread bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if unread {
		m.unread[uuid] = true
	} else {
		delete(m.unread, uuid)
	}
}

// setIdle says that a partition is idle from now on, or isn't.
func (m *Manager) setIdle(p gpu.Partition, idle bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !idle {
		delete(m.idle, p)
	} else if _, already := m.idle[p]; !already {
		m.idle[p] = time.Now()
	}
}

// isIdle reports whether the partition was said to be idle.
func (m *Manager) isIdle(p gpu.Partition) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, idle := m.idle[p]
	return idle
}

// idleFor returns how long the partition, which no claim holds, has been idle;
// if that is unknown, it counts from now on.
func (m *Manager) idleFor(p gpu.Partition) time.Duration {
	m.setIdle(p, true)
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Since(m.idle[p])
}

// emptyFor is how long a GPU whose mode we switched has had no partition of
// ours; from now on where that was not known.
func (m *Manager) emptyFor(uuid gpu.UUID) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, known := m.empty[uuid]; !known {
		m.empty[uuid] = time.Now()
	}
	return time.Since(m.empty[uuid])
}

func (m *Manager) notEmpty(uuid gpu.UUID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.empty, uuid)
}
