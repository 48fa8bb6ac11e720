package sharing

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/keylock"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// Daemons runs MPS daemons (*mps.Client). Errors wrap mps.ErrUnavailable where
// the supervisor does not answer.
type Daemons interface {
	Ensure(ctx context.Context, d mps.Daemon) (mps.State, error)
	Stop(ctx context.Context, name string) (mps.Revision, error)
	BeginStop(ctx context.Context, name string) (ended bool, revision mps.Revision, err error)
	List(ctx context.Context) (mps.Report, error)
	Watch(ctx context.Context, f func(mps.Report)) error
}

// Hardware reads and sets compute modes (*nvml.Session). Errors wrap the sentinels of
// pkg/nvml.
type Hardware interface {
	ComputeMode(uuid gpu.UUID) (nvml.ComputeMode, error)
	SetComputeMode(uuid gpu.UUID, mode nvml.ComputeMode) error
}

// SMI runs the host's nvidia-smi and returns all that it prints; an error where
// it says that it failed.
type SMI func(ctx context.Context, args ...string) (string, error)

// Config configures a Manager.
type Config struct {
	Journal *journal.Journal
	Daemons Daemons
	// BootID of the running kernel. Daemons and settings of other boots are gone.
	BootID string
	// Prepared has the UIDs of the claims whose prepare was complete when an earlier plugin
	// ended, as their CDI specs show. They need daemons and settings from the start on, other
	// claims from their Join on.
	Prepared []string
	// ExclusiveProcess puts GPUs with an MPS daemon into that compute mode, so that
	// only clients of the daemon can use them.
	ExclusiveProcess bool
	// Remains lists the daemons whose directories exist; one whose record can't be read
	// without devices. While the supervisor doesn't answer, it shows which daemons can't
	// be running. nil if there is no such list.
	Remains func() ([]mps.Daemon, error)
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// ConditionsChanged, which may be nil, is called after the result of Conditions
	// has changed. It must not block.
	ConditionsChanged func()
	// Warn, which may be nil, is called when the clients of a claim's MPS daemon fail or
	// wait: once for each claim until the daemon has a server again. It must not block.
	Warn func(claim holding.Record, reason, message string)
	// DaemonFaultsChanged, which may be nil, is called after a fault that DaemonFaults
	// returns has begun or ended. It must not block.
	DaemonFaultsChanged func()
	// Step, which may be nil, is called with the name of each step after the
	// step; crash tests stop there.
	Step func(step string)
}

// Manager sets up and takes down the sharing of GPUs. Its methods may be called
// concurrently; a wait for a GPU's lock ends with the context.
type Manager struct {
	cfg Config
	// worker applies settings to GPUs, and daemons starts, changes and stops daemons,
	// by name, outside of calls.
	worker  *agenda.Worker
	daemons *agenda.Agenda[string]
	// daemonLocks are by name, and taken after the worker's locks of GPUs.
	daemonLocks keylock.Locks[string]
	metrics     *metrics

	// hw and smi are replaced while no operation runs.
	hw  Hardware
	smi SMI

	// joined are the UIDs of the claims whose Join has begun, and whose Leave hasn't since,
	// and of Config.Prepared.
	joined sync.Map

	mu sync.Mutex
	// found are the daemons that the supervisor has reported, by name; listed is set
	// when it has reported all.
	found  map[string]mps.State
	listed bool
	// reported is the revision of the newest report of all daemons, replied those of
	// newer replies about single daemons.
	reported mps.Revision
	replied  map[string]mps.Revision
	// current is unset while the supervisor doesn't report changes.
	current bool
	// others has the MIG devices of partitions that others created, by the UID of the
	// claim that Join was called for. Those that Tessera created are in the journal.
	others map[string]map[gpu.Partition]gpu.UUID
	// intervals are the intervals that policies set for replicas; nil before the first
	// call of SetTimeSlices.
	intervals map[gpu.UUID]string
	// set are the intervals that are known to be in effect.
	set map[gpu.UUID]string
	// recheck are the GPUs whose interval is to be read again.
	recheck map[gpu.UUID]bool
	// unsupported has the reason why a GPU's interval can't be set.
	unsupported map[gpu.UUID]string
	// faults of daemons, by name.
	faults map[string]*fault
	// closed are the daemons that clients can't find, or couldn't until just now.
	closed    map[string]closure
	closedFor time.Duration
	// modeSeen is the MPS server of a GPU when its compute mode was last verified;
	// othersMode has a message if somebody else has set another mode.
	modeSeen   map[gpu.UUID]int
	othersMode map[gpu.UUID]string
}

// New builds a Manager without hardware.
func New(c Config) *Manager {
	if c.Step == nil {
		c.Step = func(string) {}
	}
	if c.ConditionsChanged == nil {
		c.ConditionsChanged = func() {}
	}
	if c.DaemonFaultsChanged == nil {
		c.DaemonFaultsChanged = func() {}
	}
	if c.Warn == nil {
		c.Warn = func(holding.Record, string, string) {}
	}
	if c.Remains == nil {
		c.Remains = func() ([]mps.Daemon, error) { return nil, errors.ErrUnsupported }
	}
	m := &Manager{
		cfg: c, worker: agenda.NewWorker(retryFirst, retryLast), daemons: agenda.New[string](retryFirst, retryLast),
		found: map[string]mps.State{}, replied: map[string]mps.Revision{}, others: map[string]map[gpu.Partition]gpu.UUID{},
		set: map[gpu.UUID]string{}, recheck: map[gpu.UUID]bool{}, unsupported: map[gpu.UUID]string{},
		faults: map[string]*fault{}, closed: map[string]closure{}, closedFor: closedFor, modeSeen: map[gpu.UUID]int{}, othersMode: map[gpu.UUID]string{},
	}
	for _, uid := range c.Prepared {
		m.joined.Store(uid, true)
	}
	m.metrics = newMetrics(c.Registerer, m)
	return m
}

// SetHardware sets the access to the GPUs; nil while there is no driver. It waits for
// operations in progress, so the caller may close the former access afterwards.
func (m *Manager) SetHardware(hw Hardware, smi SMI) {
	m.worker.Exchange(func() {
		m.hw, m.smi = hw, smi
		m.change(func() { clear(m.set); clear(m.unsupported); clear(m.modeSeen); clear(m.othersMode) }) // it may be another driver
	})
}

// Suspend returns when no operation is in progress, so that the access may be closed for
// a while. Operations wait until the next SetHardware.
func (m *Manager) Suspend() { m.worker.Suspend() }

// SetTimeSlices sets the interval for replicas of each GPU, as policies say; a GPU
// that isn't in the map has the default. It applies to replicas that claims have
// already, too. Before the first call, no interval of replicas is changed.
func (m *Manager) SetTimeSlices(intervals map[gpu.UUID]string) {
	m.mu.Lock()
	changed := m.intervals == nil || !maps.Equal(intervals, m.intervals)
	m.mu.Unlock()
	if !changed {
		return
	}
	m.change(func() {
		for uuid := range m.unsupported {
			if m.intervals[uuid] != intervals[uuid] {
				delete(m.unsupported, uuid)
			}
		}
		m.intervals = make(map[gpu.UUID]string, len(intervals))
		maps.Copy(m.intervals, intervals)
	})
	p := m.planNow()
	for uuid := range p.replicas {
		m.worker.At(uuid, time.Now())
	}
}

// Conditions returns the problems with settings, by GPU: a compute mode that somebody
// else has set, or an interval that can't be set. None of them blocks the GPU.
// DaemonFaults has those with daemons.
func (m *Manager) Conditions() map[gpu.UUID][]gpu.Condition {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.conditions()
}

// conditions needs the lock.
func (m *Manager) conditions() map[gpu.UUID][]gpu.Condition {
	all := map[gpu.UUID][]gpu.Condition{}
	for uuid, message := range m.othersMode {
		all[uuid] = append(all[uuid], gpu.Condition{Type: gpu.ComputeModeChanged, Message: message})
	}
	for uuid, why := range m.unsupported {
		all[uuid] = append(all[uuid], gpu.Condition{Type: gpu.TimeSliceUnsupported, Message: why})
	}
	return all
}

// change calls f with the lock held, and ConditionsChanged if that has changed the
// conditions.
func (m *Manager) change(f func()) {
	m.mu.Lock()
	before := m.conditions()
	f()
	same := maps.EqualFunc(before, m.conditions(), slices.Equal[[]gpu.Condition])
	m.mu.Unlock()
	if !same {
		m.cfg.ConditionsChanged()
	}
}

// Join sets up the sharing of a claim whose record is in the journal: compute
// mode, time slice, MPS daemons. given has its devices that are, or are shares
// of, partitions, with their instances. It returns the directories by which
// containers reach the daemon of each device whose holding has MPS. Idempotent. The caller
// has created the claim's partitions and keeps them until Leave. Until Join begins, Run starts
// no daemon for the claim.
//
// After an error, Leave or Run takes down the part that was set up.
func (m *Manager) Join(ctx context.Context, r holding.Record, given map[gpu.DeviceName]gpu.Prepared) (map[gpu.DeviceName]gpu.MPSDirs, error) {
	m.remember(r, given)
	m.joined.Store(r.ClaimUID, true)
	for _, uuid := range r.GPUs() {
		if err := m.knowRemains(ctx, uuid); err != nil {
			return nil, err
		}
	}
	groups := m.groups(r)
	dirs, errs := make([]map[gpu.DeviceName]gpu.MPSDirs, len(groups)), make([]error, len(groups))
	var wg sync.WaitGroup
	for i, uuids := range groups {
		wg.Go(func() {
			errs[i] = m.withGPUs(ctx, uuids, func(v *visit) (err error) {
				dirs[i], err = v.join(ctx, r)
				return err
			})
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	all := map[gpu.DeviceName]gpu.MPSDirs{}
	for _, some := range dirs {
		maps.Copy(all, some)
	}
	return all, nil
}

// EnsureUnshared stops the daemons that no claim needs on the GPUs, and restores
// settings that no claim needs. It is for GPUs that one claim gets as a whole.
func (m *Manager) EnsureUnshared(ctx context.Context, uuids ...gpu.UUID) error {
	for _, uuid := range uuids {
		if err := m.knowRemains(ctx, uuid); err != nil {
			return err
		}
	}
	touched := m.unsettledGPUs()
	return agenda.Each(uuids, func(uuid gpu.UUID) error {
		if !touched[uuid] {
			return nil
		}
		return m.withGPUs(ctx, []gpu.UUID{uuid}, func(v *visit) error { return v.applyPlan(ctx) })
	})
}

// groups returns the GPUs of a record, those of one daemon in one group; each group
// is in ascending order. GPUs on which there is nothing to do are left out.
func (m *Manager) groups(r holding.Record) [][]gpu.UUID {
	own := plan{daemons: map[string]*wanted{}, timeSlices: map[gpu.UUID]string{}, replicas: map[gpu.UUID]bool{}}
	own.add(r)
	needs, touched := own.gpus(), m.unsettledGPUs()
	var groups [][]gpu.UUID
	done := map[gpu.UUID]bool{}
	for _, uuid := range r.GPUs() {
		if done[uuid] || !needs[uuid] && !touched[uuid] {
			continue
		}
		group := own.together(uuid)
		for _, u := range group {
			done[u] = true
		}
		groups = append(groups, group)
	}
	return groups
}

// unsettledGPUs returns the GPUs that have, or may have, daemons that no claim needs or
// settings that were changed.
func (m *Manager) unsettledGPUs() map[gpu.UUID]bool {
	uuids := m.changedGPUs()
	m.mu.Lock()
	daemons := len(m.found)
	m.mu.Unlock()
	if daemons == 0 {
		return uuids
	}
	p := m.planNow()
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, s := range m.found {
		if !p.wants(name) {
			for _, uuid := range m.gpusOf(s.Daemon) {
				uuids[uuid] = true
			}
		}
	}
	return uuids
}

// changedGPUs returns the GPUs with settings that were changed, or may have been.
func (m *Manager) changedGPUs() map[gpu.UUID]bool {
	uuids := map[gpu.UUID]bool{}
	for _, s := range m.cfg.Journal.AllSettings() {
		uuids[s.GPU] = true
	}
	for _, u := range m.cfg.Journal.UnreadableSettings() {
		uuids[u.GPU] = true
	}
	return uuids
}

// knowRemains finds out, once, whether an earlier plugin has left a daemon on the GPU
// that no claim needs. The supervisor is asked only if it has left the directory of
// one.
func (m *Manager) knowRemains(ctx context.Context, uuid gpu.UUID) error {
	m.mu.Lock()
	listed := m.listed
	m.mu.Unlock()
	if listed {
		return nil
	}
	remains, err := m.cfg.Remains()
	if err == nil && len(remains) == 0 {
		return nil
	}
	p := m.planNow()
	unwanted := func(d mps.Daemon) bool { return !p.wants(d.Name) && m.mayBeOn(d, uuid) }
	if err == nil && !slices.ContainsFunc(remains, unwanted) {
		return nil
	}
	if err := m.list(ctx); err != nil && !m.nothingRemains(err) {
		return fmt.Errorf("an MPS daemon that no claim needs may still be on GPU %s: %w", uuid, err)
	}
	return nil
}

// mayBeOn reports whether the daemon, of whose directory this is known, may be on the
// GPU. Only the name of a shared device says which GPU it is of.
func (m *Manager) mayBeOn(d mps.Daemon, uuid gpu.UUID) bool {
	if !holding.IsOwnDaemon(d.Name) {
		return gpu.DeviceName(d.Name).MayBeOf(uuid)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	there := func(device gpu.UUID) bool { on := m.gpuOf(device); return on == uuid || on == "" }
	return len(d.Devices) == 0 || slices.ContainsFunc(d.Devices, there)
}

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
		_, there := m.cfg.Journal.Claim(uid)
		return !there
	})
	if delete(m.others, r.ClaimUID); len(others) > 0 {
		m.others[r.ClaimUID] = others
	}
}

// made returns the MIG device of a partition that Tessera has created, or is destroying. It
// is empty while the partition is being created.
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
