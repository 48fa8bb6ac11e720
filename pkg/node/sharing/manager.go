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
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/keylock"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// Daemons runs MPS daemons (*mps.Client). Errors wrap mps.ErrUnavailable where
// nobody answers.
type Daemons interface {
	Ensure(ctx context.Context, d mps.Daemon) (mps.State, error)
	Stop(ctx context.Context, name string) error
	BeginStop(ctx context.Context, name string) (ended bool, err error)
	List(ctx context.Context) ([]mps.State, error)
	Watch(ctx context.Context, f func([]mps.State)) error
}

// Hardware is what is done to GPUs (*nvml.Session). Errors wrap the sentinels of
// pkg/nvml.
type Hardware interface {
	ComputeMode(uuid gpu.UUID) (nvml.ComputeMode, error)
	SetComputeMode(uuid gpu.UUID, mode nvml.ComputeMode) error
}

// SMI runs the host's nvidia-smi and returns all that it prints; an error where
// it says that it failed.
type SMI func(ctx context.Context, args ...string) (string, error)

// Options are what a Manager is built from.
type Options struct {
	Journal *journal.Journal
	Daemons Daemons
	// BootID of the running kernel. What records of other boots tell of is gone.
	BootID string
	// ExclusiveProcess has GPUs with an MPS daemon in that compute mode, so that a
	// process that isn't the daemon's client can't use them.
	ExclusiveProcess bool
	// Remains are the names of the daemons that the supervisor has left something
	// of, for when it doesn't answer: what isn't among them doesn't run. nil where
	// that can't be told.
	Remains func() ([]string, error)
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// ConditionsChanged, which may be nil, is called after what Conditions
	// returns has changed. It must not block.
	ConditionsChanged func()
	// Step, which may be nil, is called with the name of each step after the
	// step; crash tests stop there.
	Step func(step string)
}

// Manager has GPUs shared. Its methods may be called from everywhere at once;
// those that wait for a GPU's lock stop waiting when their context ends.
type Manager struct {
	Options
	// GPUs have a lock each, of which several are taken in ascending order, and
	// daemons by name, which are taken after those of GPUs.
	gpuLocks    keylock.Locks[gpu.UUID]
	daemonLocks keylock.Locks[string]
	agenda      *agenda.Agenda[gpu.UUID]
	metrics     *metrics

	// use is held for reading by every operation on the hardware.
	use sync.RWMutex
	hw  Hardware
	smi SMI

	mu sync.Mutex
	// found are the daemons that the supervisor has told of, by name; listed says
	// that it has told of all.
	found  map[string]mps.State
	listed bool
	// instances are the MIG devices that partitions are, as Join was told.
	instances map[gpu.Partition]gpu.UUID
	// intervals are what policies want of replicas; nil while that isn't known.
	intervals map[gpu.UUID]string
	// set are the intervals that are known to be in effect.
	set map[gpu.UUID]string
	// recheck are the GPUs whose interval is to be read again.
	recheck map[gpu.UUID]bool
	// unsupported says why a GPU's interval can't be set.
	unsupported map[gpu.UUID]string
	// closed are the daemons that clients don't find, or didn't just now.
	closed    map[string]closure
	closedFor time.Duration
	// modeSeen is the MPS server that a GPU had when its compute mode was last seen to
	// be right; othersMode says what somebody else has set it to.
	modeSeen   map[gpu.UUID]int
	othersMode map[gpu.UUID]string
}

// New builds a Manager without hardware.
func New(o Options) *Manager {
	if o.Step == nil {
		o.Step = func(string) {}
	}
	if o.ConditionsChanged == nil {
		o.ConditionsChanged = func() {}
	}
	if o.Remains == nil {
		o.Remains = func() ([]string, error) { return nil, errors.ErrUnsupported }
	}
	m := &Manager{
		Options: o, agenda: agenda.New[gpu.UUID](retryFirst, retryLast),
		found: map[string]mps.State{}, instances: map[gpu.Partition]gpu.UUID{},
		set: map[gpu.UUID]string{}, recheck: map[gpu.UUID]bool{}, unsupported: map[gpu.UUID]string{},
		closed: map[string]closure{}, closedFor: closedFor, modeSeen: map[gpu.UUID]int{}, othersMode: map[gpu.UUID]string{},
	}
	m.metrics = newMetrics(o.Registerer, m)
	return m
}

// SetHardware says what the GPUs are reached through; nil while there is no
// driver. It waits for the operations under way, so that what was set before
// may be closed after it.
func (m *Manager) SetHardware(hw Hardware, smi SMI) {
	m.use.Lock()
	defer m.use.Unlock()
	m.hw, m.smi = hw, smi
	m.change(func() { clear(m.set); clear(m.unsupported); clear(m.modeSeen); clear(m.othersMode) }) // it may be another driver
}

// SetTimeSlices says which interval policies want for replicas of a GPU; the
// default where nothing is said. It takes effect on replicas that claims have now,
// too. Before the first call, nothing is changed for their sake.
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
	p := m.plan()
	for uuid := range p.replicas {
		m.agenda.At(uuid, time.Now())
	}
}

// Conditions returns what is wrong with what GPUs are shared through: a daemon
// that claims need and that doesn't run, or an interval that can't be set. None
// of it keeps a GPU from being used.
func (m *Manager) Conditions() map[gpu.UUID][]gpu.Condition {
	p := m.plan()
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.conditions(&p)
}

// conditions needs the lock.
func (m *Manager) conditions(p *plan) map[gpu.UUID][]gpu.Condition {
	all := map[gpu.UUID][]gpu.Condition{}
	for _, name := range slices.Sorted(maps.Keys(p.daemons)) {
		message := trouble(m.found[name])
		if message == "" {
			continue
		}
		for _, uuid := range p.daemons[name].gpus() {
			all[uuid] = append(all[uuid], gpu.Condition{Type: gpu.MPSDaemonFailed, Message: message})
		}
	}
	for uuid, message := range m.othersMode {
		all[uuid] = append(all[uuid], gpu.Condition{Type: gpu.ComputeModeChanged, Message: message})
	}
	for uuid, why := range m.unsupported {
		all[uuid] = append(all[uuid], gpu.Condition{Type: gpu.TimeSliceUnsupported, Message: why})
	}
	return all
}

// trouble says why clients of a daemon that claims need fail or wait; empty where
// they don't, and while it is started for the first time.
func trouble(s mps.State) string {
	switch {
	case s.Phase == mps.Running && s.Trouble != "":
		return fmt.Sprintf("MPS daemon %s runs, and its clients may wait or fail: %s. It is left alone, for there may be clients that compute; "+
			"if it stays like this, delete the pods that share the GPU: the daemon ends with the last of them", s.Name, s.Trouble)
	case s.Phase == mps.Failed, s.Phase == mps.Starting && s.Restarts > 0:
		return fmt.Sprintf("MPS daemon %s has ended; the supervisor starts it again: %s", s.Name, s.Message)
	default:
		return ""
	}
}

// change changes what the Manager knows, and passes on if that changes the
// conditions.
func (m *Manager) change(f func()) {
	p := m.plan()
	m.mu.Lock()
	before := m.conditions(&p)
	f()
	same := maps.EqualFunc(before, m.conditions(&p), slices.Equal[[]gpu.Condition])
	m.mu.Unlock()
	if !same {
		m.ConditionsChanged()
	}
}

// Join sets up what a claim, whose record is in the journal, shares: compute
// mode, time slice, MPS daemons. given has its devices that are, or are shares
// of, partitions, with their instances. It returns the directories by which
// containers reach the daemon of each device whose grant has MPS. Idempotent.
//
// After an error, what was set up is known, and taken down by Leave or Run.
func (m *Manager) Join(ctx context.Context, r journal.Record, given map[gpu.DeviceName]gpu.Given) (map[gpu.DeviceName]*gpu.MPSClient, error) {
	m.remember(r, given)
	groups := m.groups(r)
	clients, errs := make([]map[gpu.DeviceName]*gpu.MPSClient, len(groups)), make([]error, len(groups))
	var wg sync.WaitGroup
	for i, uuids := range groups {
		wg.Go(func() {
			errs[i] = m.visit(ctx, uuids, func(v *visit) (err error) {
				clients[i], err = v.join(ctx, r)
				return err
			})
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	all := map[gpu.DeviceName]*gpu.MPSClient{}
	for _, some := range clients {
		maps.Copy(all, some)
	}
	return all, nil
}

// remember keeps which instances the claim's partitions are.
func (m *Manager) remember(r journal.Record, given map[gpu.DeviceName]gpu.Given) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, g := range r.Grants {
		if p, ok := g.Base().(gpu.Partition); ok && given[g.Device].Instance.UUID != "" {
			m.instances[p] = given[g.Device].Instance.UUID
		}
	}
}

// Leave takes down what no claim needs any more on the GPUs of a record that is
// leaving (journal.SetLeaving). When it returns nil, no process of an MPS daemon
// that only leaving claims had is left on their partitions. Of one on whole GPUs
// the end has begun; Run puts the compute mode back after it, and Join and
// AwaitEnds wait for it. Idempotent. A setting that can't be put back now is put
// back later.
func (m *Manager) Leave(ctx context.Context, r journal.Record) error {
	groups := m.groups(r)
	if len(r.Grants) == 0 { // it can't be read
		groups = nil
		for uuid := range m.touched() {
			groups = append(groups, []gpu.UUID{uuid})
		}
	}
	errs := make([]error, len(groups))
	var wg sync.WaitGroup
	for i, uuids := range groups {
		wg.Go(func() {
			errs[i] = m.visit(ctx, uuids, func(v *visit) error { return v.leave(ctx, r) })
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// AwaitEnds returns when no daemon is on the GPU as a whole any more that no claim
// needs.
func (m *Manager) AwaitEnds(ctx context.Context, uuid gpu.UUID) error {
	p := m.plan()
	m.mu.Lock()
	var ending bool
	for name, s := range m.found {
		ending = ending || !p.wants(name) && slices.Contains(s.Devices, uuid)
	}
	m.mu.Unlock()
	if !ending {
		return nil
	}
	return m.visit(ctx, []gpu.UUID{uuid}, func(v *visit) error { return v.stopUnwanted(ctx) })
}

// groups are the GPUs of a record, those that one daemon has together together;
// each group in ascending order. GPUs on which there is nothing to do are left
// out.
func (m *Manager) groups(r journal.Record) [][]gpu.UUID {
	own := plan{daemons: map[string]*wanted{}, slices: map[gpu.UUID]string{}, replicas: map[gpu.UUID]bool{}}
	own.add(r)
	needs, touched := own.touched(), m.touched()
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

// touched are the GPUs that have, or may have, daemons of ours that nobody needs
// or settings that aren't as they were found.
func (m *Manager) touched() map[gpu.UUID]bool {
	uuids := map[gpu.UUID]bool{}
	for _, s := range m.Journal.AllSettings() {
		uuids[s.GPU] = true
	}
	for _, u := range m.Journal.UnreadableSettings() {
		uuids[u.GPU] = true
	}
	p := m.plan()
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

// gpusOf are the GPUs that a daemon has something of, as far as that is known;
// needs the lock.
func (m *Manager) gpusOf(d mps.Daemon) []gpu.UUID {
	uuids := slices.Clone(d.Devices)
	for p, mig := range m.instances {
		if i := slices.Index(uuids, mig); i >= 0 {
			uuids[i] = p.GPU
		}
	}
	return uuids
}

// supervisorWithin bounds the wait for a supervisor that isn't needed just now.
const supervisorWithin = 5 * time.Second

// Recover takes down what a crash has left and nobody needs: daemons, and
// settings that aren't as they were found; records of other boots are dropped.
// What claims need is set up by their Joins. It is for the start and for the
// arrival of a driver. What fails on one GPU stops nothing else; Run tries it
// again.
func (m *Manager) Recover(ctx context.Context) error {
	err := m.dropOld()
	if listErr := m.list(ctx); listErr != nil {
		if !m.needsSupervisor() {
			klog.FromContext(ctx).V(2).Info("No MPS supervisor, and nothing that needs one", "err", listErr)
		} else {
			err = errors.Join(err, listErr)
		}
	}
	return errors.Join(err, m.stopOrphans(ctx), m.tidyAll(ctx))
}

// LeaveHost takes down all that no claim needs; it is for when the plugin ends
// and nothing is prepared. Without a supervisor the settings are put back all the
// same.
func (m *Manager) LeaveHost(ctx context.Context) error {
	if err := m.list(ctx); err != nil {
		if !m.nothingRemains(err) {
			klog.FromContext(ctx).Error(err, "MPS daemons that nobody needs may stay")
		}
		m.mu.Lock()
		m.listed = true // as far as can be known
		m.mu.Unlock()
	}
	return errors.Join(m.dropOld(), m.stopOrphans(ctx), m.tidyAll(ctx))
}

// dropOld drops what is remembered of other boots: the driver has forgotten it.
func (m *Manager) dropOld() error {
	var errs []error
	for _, s := range m.Journal.AllSettings() {
		if s.BootID != m.BootID {
			errs = append(errs, m.Journal.DeleteSettings(s.GPU))
		}
	}
	return errors.Join(errs...)
}

// list asks the supervisor for all daemons.
func (m *Manager) list(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, supervisorWithin)
	defer cancel()
	var states []mps.State
	err := m.call("list", func() (err error) {
		states, err = m.Daemons.List(ctx)
		return err
	})
	if err == nil {
		m.saw(states)
	}
	return err
}

// saw takes in what the supervisor says that it has.
func (m *Manager) saw(states []mps.State) {
	p := m.plan()
	m.change(func() {
		was, first := maps.Clone(m.found), !m.listed
		m.listed = true
		clear(m.found)
		for _, s := range states {
			m.found[s.Name] = s
		}
		m.trackAll(&p, was, first)
	})
	m.planClosures(&p)
}

// sawOne takes in what the supervisor says of one daemon.
func (m *Manager) sawOne(name string, s mps.State) {
	p := m.plan()
	m.change(func() {
		if m.ExclusiveProcess && p.hasWholeOf(name) {
			m.track(name, m.found[name], s)
		}
		m.found[name] = s
	})
	m.planClosures(&p)
}

// needsSupervisor says whether claims need daemons, or a GPU's compute mode
// tells that there may be one.
func (m *Manager) needsSupervisor() bool {
	p := m.plan()
	return len(p.daemons) > 0 || slices.ContainsFunc(m.Journal.AllSettings(), func(s journal.Settings) bool { return s.ComputeModeBefore != "" })
}

// stopOrphans stops the daemons that nobody needs.
func (m *Manager) stopOrphans(ctx context.Context) error {
	p := m.plan()
	var orphans []string
	m.mu.Lock()
	for name := range m.found {
		if !p.wants(name) {
			orphans = append(orphans, name)
		}
	}
	m.mu.Unlock()
	errs := make([]error, len(orphans))
	var wg sync.WaitGroup
	for i, name := range orphans {
		wg.Go(func() { errs[i] = m.stop(ctx, name) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// tidyAll looks after all GPUs that something was done to, at once.
func (m *Manager) tidyAll(ctx context.Context) error {
	uuids := slices.Collect(maps.Keys(m.touched()))
	errs := make([]error, len(uuids))
	var wg sync.WaitGroup
	for i, uuid := range uuids {
		wg.Go(func() { errs[i] = m.tidy(ctx, uuid) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// tidy has a GPU as claims need it, as far as is known how. What fails is planned
// again.
func (m *Manager) tidy(ctx context.Context, uuid gpu.UUID) error {
	p := m.plan()
	err := m.visit(ctx, p.together(uuid), func(v *visit) error { return v.tidy(ctx) })
	if errors.Is(err, errNoDriver) {
		return nil // Recover comes with the driver
	}
	if err != nil {
		m.agenda.Failed(uuid)
		return err
	}
	m.agenda.Succeeded(uuid)
	return nil
}
