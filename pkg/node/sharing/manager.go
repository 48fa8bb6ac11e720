package sharing

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/keylock"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/notify"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

const (
	// failsFor is how long a daemon may fail before claims are refused: as long as before the
	// GPU has the condition MPSDaemonFailed (pkg/health).
	failsFor = 10 * time.Second
	// tryAgainAfter is the pause before the next attempt of a Join.
	tryAgainAfter = time.Second
)

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
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// ConditionsChanged, which may be nil, is called after the result of Conditions
	// has changed. It must not block.
	ConditionsChanged func()
	// Warn, which may be nil, is called when the clients of a claim's MPS daemon fail or
	// wait: once for each claim until the daemon has a server again. It must not block.
	Warn func(claim holding.Record, reason, message string)
	// Steps, which may be nil, are told of each step after it; crash tests stop there.
	Steps *failpoint.Steps
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

	// watching is full while Watch runs: there is one at a time.
	watching chan struct{}
	// faultsChanged has something after DaemonFaults has changed.
	faultsChanged chan struct{}

	// mu wakes those who wait for a report of the supervisor.
	mu    notify.Mutex
	watch watch
	// joined are the UIDs of the claims whose Join has begun, and whose Leave hasn't since,
	// and of Config.Prepared.
	joined map[string]bool
	// outages are by the daemons' names, and gpus have what is known of each GPU's settings.
	outages   map[string]*outage
	gpus      map[gpu.UUID]*settingsSeen
	closedFor time.Duration
	// others has the MIG devices of partitions that others created, by the UID of the
	// claim that Join was called for. Those that Tessera created are in the journal.
	others map[string]map[gpu.Partition]gpu.UUID
	// intervals are the intervals that policies set for replicas; nil before the first
	// call of SetTimeSlices.
	intervals map[gpu.UUID]string
}

// New builds a Manager without hardware.
func New(c Config) *Manager {
	if c.ConditionsChanged == nil {
		c.ConditionsChanged = func() {}
	}
	if c.Warn == nil {
		c.Warn = func(holding.Record, string, string) {}
	}
	m := &Manager{
		cfg: c, worker: agenda.NewWorker(retryFirst, retryLast), daemons: agenda.New[string](retryFirst, retryLast),
		watching: make(chan struct{}, 1), faultsChanged: make(chan struct{}, 1), outages: map[string]*outage{}, gpus: map[gpu.UUID]*settingsSeen{}, closedFor: closedFor,
		others: map[string]map[gpu.Partition]gpu.UUID{}, joined: map[string]bool{},
	}
	for _, uid := range c.Prepared {
		m.joined[uid] = true
	}
	m.metrics = newMetrics(c.Registerer, m)
	return m
}

// SetHardware sets the access to the GPUs; nil while there is no driver. It waits for
// operations in progress, so the caller may close the former access afterwards.
func (m *Manager) SetHardware(hw Hardware, smi SMI) {
	m.worker.Suspend()
	defer m.worker.Resume()
	m.hw, m.smi = hw, smi
	m.mu.Lock()
	before := m.conditions()
	clear(m.gpus) // it may be another driver
	m.mu.Unlock()
	if len(before) > 0 {
		m.cfg.ConditionsChanged()
	}
}

// Suspend returns when no operation is in progress, so that the access may be closed for
// a while. Operations wait until the next SetHardware.
func (m *Manager) Suspend() { m.worker.Suspend() }

// SetTimeSlices sets the interval for replicas of each GPU, as policies say; a GPU
// that isn't in the map has the default. It applies to replicas that claims have
// already, too. Before the first call, no interval of replicas is changed.
func (m *Manager) SetTimeSlices(intervals map[gpu.UUID]string) {
	m.mu.Lock()
	if m.intervals != nil && maps.Equal(intervals, m.intervals) {
		m.mu.Unlock()
		return
	}
	ended := false
	for uuid, seen := range m.gpus {
		if seen.unsupported != "" && m.intervals[uuid] != intervals[uuid] {
			seen.unsupported, ended = "", true
		}
	}
	m.intervals = make(map[gpu.UUID]string, len(intervals))
	maps.Copy(m.intervals, intervals)
	m.mu.Unlock()
	if ended {
		m.cfg.ConditionsChanged()
	}
	n := m.readNeeds()
	for uuid := range n.replicas {
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
	for uuid, seen := range m.gpus {
		if seen.othersMode != "" {
			all[uuid] = append(all[uuid], gpu.Condition{Type: gpu.ComputeModeChanged, Message: seen.othersMode})
		}
		if seen.unsupported != "" {
			all[uuid] = append(all[uuid], gpu.Condition{Type: gpu.TimeSliceUnsupported, Message: seen.unsupported})
		}
	}
	return all
}

// Join sets up the sharing of a claim whose record is in the journal: compute
// mode, time slice, MPS daemons. instances are those of the partitions that it has, or has
// shares of. It returns the directories by which containers reach the claim's daemons, by
// the daemons' names. Idempotent. The caller has created the claim's partitions and keeps them
// until Leave. Until Join begins, Run starts no daemon for the claim.
//
// After an error, Leave or Run takes down the part that was set up. The error may be a
// gpu.RefusedError after one attempt; JoinPatiently makes more.
func (m *Manager) Join(ctx context.Context, r holding.Record, instances map[gpu.Partition]gpu.Instance) (map[string]gpu.MPSDirs, error) {
	m.remember(r, instances)
	err := agenda.Each(r.GPUs(), func(uuid gpu.UUID) error { return m.know(ctx, uuid) })
	if err != nil {
		return nil, err
	}
	groups := m.groups(r)
	joined := make(chan map[string]gpu.MPSDirs, len(groups))
	err = agenda.Each(groups, func(uuids []gpu.UUID) error {
		v, err := m.visit(ctx, uuids)
		if err != nil {
			return err
		}
		defer v.end()
		dirs, err := v.join(ctx, r)
		joined <- dirs
		return v.explain(err)
	})
	if err != nil {
		return nil, err
	}
	close(joined)
	all := map[string]gpu.MPSDirs{}
	for dirs := range joined {
		maps.Copy(all, dirs)
	}
	return all, nil
}

// JoinPatiently is Join for a claim that is being prepared. It tries a second time if the
// hardware refuses, and as often as it takes while a daemon doesn't start, until its clients
// have not been served for ten seconds: then it returns a gpu.RefusedError. For a claim that no
// container has yet, isNew, it also waits in this way for a daemon that runs and is known not
// to serve.
func (m *Manager) JoinPatiently(ctx context.Context, r holding.Record, instances map[gpu.Partition]gpu.Instance, isNew bool) (map[string]gpu.MPSDirs, error) {
	began := time.Now()
	for attempt := 1; ; attempt++ {
		dirs, err := m.Join(ctx, r, instances)
		if err == nil && isNew {
			return dirs, m.awaitServed(ctx, r)
		}
		if err == nil || !m.mayTryAgain(r, err, attempt, began) {
			return dirs, err
		}
		select {
		case <-time.After(tryAgainAfter):
		case <-ctx.Done():
			return nil, fmt.Errorf("try again after %q: %w", err.Error(), context.Cause(ctx))
		}
	}
}

// EnsureUnshared stops the daemons that no claim needs on the GPUs, and restores
// settings that no claim needs. It is for GPUs that one claim gets as a whole.
func (m *Manager) EnsureUnshared(ctx context.Context, uuids ...gpu.UUID) error {
	return agenda.Each(uuids, func(uuid gpu.UUID) error {
		if err := m.know(ctx, uuid); err != nil {
			return err
		}
		if !m.unsettledGPUs()[uuid] {
			return nil
		}
		v, err := m.visit(ctx, []gpu.UUID{uuid})
		if err != nil {
			return err
		}
		defer v.end()
		return v.explain(v.applyNeeds(ctx))
	})
}

// Leave takes down everything that no claim needs on the GPUs of a record that is
// leaving (holding.Leaving). When it returns nil, no process of an MPS daemon
// that only leaving claims had is left on their partitions. Of one on whole GPUs
// the end has begun; Run puts the compute mode back after it, and Join and
// AwaitDaemonEnds wait for it. Idempotent. A setting that can't be put back now is put
// back later.
func (m *Manager) Leave(ctx context.Context, r holding.Record) error {
	m.mu.Lock()
	delete(m.joined, r.ClaimUID)
	m.mu.Unlock()
	groups := m.groups(r)
	if len(r.Holdings) == 0 { // it can't be read
		groups = nil
		for uuid := range m.unsettledGPUs() {
			groups = append(groups, []gpu.UUID{uuid})
		}
	}
	return agenda.Each(groups, func(uuids []gpu.UUID) error {
		v, err := m.visit(ctx, uuids)
		if err != nil {
			return err
		}
		defer v.end()
		return v.explain(v.leave(ctx, r))
	})
}

// AwaitDaemonEnds returns when no daemon is on the GPU as a whole any more that no claim
// needs.
func (m *Manager) AwaitDaemonEnds(ctx context.Context, uuid gpu.UUID) error {
	if err := m.know(ctx, uuid); err != nil {
		return err
	}
	n := m.readNeeds()
	m.mu.Lock()
	var ending bool
	for name, s := range m.watch.found {
		ending = ending || !n.wants(name) && slices.Contains(s.Devices, uuid)
	}
	m.mu.Unlock()
	if !ending {
		return nil
	}
	v, err := m.visit(ctx, []gpu.UUID{uuid})
	if err != nil {
		return err
	}
	defer v.end()
	return v.explain(v.stopUnwanted(ctx))
}

// groups returns the GPUs of a record, those of one daemon in one group; each group
// is in ascending order. GPUs on which there is nothing to do are left out.
func (m *Manager) groups(r holding.Record) [][]gpu.UUID {
	own := newNeeds()
	own.add(r)
	needed, touched := own.gpus(), m.unsettledGPUs()
	var groups [][]gpu.UUID
	done := map[gpu.UUID]bool{}
	for _, uuid := range r.GPUs() {
		if done[uuid] || !needed[uuid] && !touched[uuid] {
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
	for _, name := range m.orphans() {
		m.mu.Lock()
		for _, uuid := range m.gpusOf(m.watch.found[name].Daemon) {
			uuids[uuid] = true
		}
		m.mu.Unlock()
	}
	return uuids
}

// orphans returns the daemons that no claim needs.
func (m *Manager) orphans() []string {
	m.mu.Lock()
	names := slices.Collect(maps.Keys(m.watch.found))
	m.mu.Unlock()
	if len(names) == 0 {
		return nil
	}
	n := m.readNeeds()
	return slices.DeleteFunc(names, n.wants)
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
