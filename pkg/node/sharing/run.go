package sharing

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	// retryFirst and retryLast bound the time after which Run retries a failure; it
	// doubles in between.
	retryFirst = 2 * time.Second
	retryLast  = time.Minute
)

// Run watches the supervisor's daemons, applies what claims need when the supervisor
// answers again, and retries failures. It returns when the context has ended and the
// operations in progress are done.
func (m *Manager) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.Watch(ctx) })
	wg.Go(func() {
		m.daemons.Sweep(ctx, m.settle, func(log klog.Logger, name string, err error) {
			log.Error(err, "Can't start, change or stop an MPS daemon as claims need, retrying", "daemon", name)
		})
	})
	m.worker.Sweep(ctx, m.tidy, func(log klog.Logger, uuid gpu.UUID, err error) {
		log.Error(err, "Can't apply what claims need to a GPU, retrying", "gpu", uuid)
	})
}

// CheckSettings makes Run compare the settings of the GPUs that claims share with what claims
// need: a GPU reset loses the settings, and nothing reports that. It doesn't block.
func (m *Manager) CheckSettings() {
	n := m.readNeeds()
	for uuid := range n.gpus() {
		m.mu.Lock()
		m.seen(uuid).recheck = true
		m.mu.Unlock()
		m.worker.At(uuid, time.Now())
	}
}

// converge schedules the daemons that claims need and that are missing, those that no
// claim needs, and the GPUs whose compute mode has to be verified. It doesn't block: the
// next report of the supervisor waits for it.
func (m *Manager) converge() {
	n := m.readNeeds()
	m.mu.Lock()
	daemons, gpus := m.differing(&n), m.unverified(&n)
	m.mu.Unlock()
	m.schedule(daemons...)
	for _, uuid := range gpus {
		m.worker.At(uuid, time.Now())
	}
}

// schedule makes Run start, change or stop daemons as claims need. Attempts that have
// failed are repeated after a delay, however often the daemon is scheduled: each attempt
// changes the daemon's state, and each change is a report that schedules it.
func (m *Manager) schedule(daemons ...string) {
	for _, name := range daemons {
		m.daemons.At(name, time.Now())
	}
}

// differing returns the daemons that claims need and that are missing, and those that no
// claim needs and that aren't being stopped. Needs the lock.
func (m *Manager) differing(n *needs) []string {
	var names []string
	for name := range n.daemons {
		if _, ok := m.watch.found[name]; !ok {
			names = append(names, name)
		}
	}
	for name, s := range m.watch.found {
		if !n.wants(name) && s.Phase != mps.Ending {
			names = append(names, name)
		}
	}
	return names
}

// unverified returns the GPUs whose MPS server has been replaced since the compute mode
// was last verified. Needs the lock.
func (m *Manager) unverified(n *needs) []gpu.UUID {
	if !m.cfg.ExclusiveProcess {
		return nil
	}
	var uuids []gpu.UUID
	for name, w := range n.daemons {
		s := m.watch.found[name]
		for _, uuid := range w.gpus() {
			if s.ServerPID != 0 && m.seen(uuid).server != s.ServerPID && n.hasWhole(uuid) {
				uuids = append(uuids, uuid)
			}
		}
	}
	return uuids
}

// settle starts a daemon that claims need, sets its limits, or stops one that no claim
// needs. A failure is scheduled for a retry.
func (m *Manager) settle(ctx context.Context, name string) error {
	return m.daemons.Tried(name, m.settleNow(ctx, name))
}

func (m *Manager) settleNow(ctx context.Context, name string) error {
	n := m.readNeeds()
	if w := n.daemons[name]; w != nil {
		v, err := m.visit(ctx, n.together(w.gpus()[0]))
		if err != nil {
			return err
		}
		defer v.end()
		return v.explain(v.start(ctx, name))
	}
	if n.wants(name) {
		return nil // it is kept
	}
	if _, err := m.stop(ctx, name, true); err != nil {
		return err
	}
	for uuid := range m.changedGPUs() { // settings are restored after the daemon's end
		m.worker.At(uuid, time.Now())
	}
	return nil
}

// Recover stops daemons and restores settings that a crash has left and no claim
// needs, and deletes settings of other boots from the journal. The claims' Joins set
// up what claims need. It is called at the start and when a driver is found. A failure
// on one GPU doesn't affect others; Run retries it.
func (m *Manager) Recover(ctx context.Context) error {
	err := m.dropOld()
	if away := m.refresh(ctx); away != nil {
		if !m.needsSupervisor() {
			klog.FromContext(ctx).V(2).Info("No MPS supervisor, and nothing that needs one", "err", away)
		} else {
			err = errors.Join(err, away)
		}
	}
	return errors.Join(err, m.stopAll(ctx, m.orphans()), m.tidyAll(ctx))
}

// LeaveHost takes down everything that no claim needs. It is called when the plugin
// ends, and Run with it, and nothing is prepared. It restores settings also without a
// supervisor.
func (m *Manager) LeaveHost(ctx context.Context) error {
	watching, end := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer end()
	wg.Go(func() { m.Watch(watching) })
	if err := m.refresh(ctx); err != nil {
		if left, leftErr := m.cfg.Daemons.Left(); leftErr != nil || len(left) > 0 {
			klog.FromContext(ctx).Error(err, "MPS daemons that nobody needs may stay", "daemons", left)
		}
		m.mu.Lock()
		if m.watch.found == nil {
			m.watch.found = map[string]mps.State{} // as far as can be known
		}
		m.mu.Unlock()
	}
	return errors.Join(m.dropOld(), m.stopAll(ctx, m.orphans()), m.tidyAll(ctx))
}

// dropOld deletes the settings of other boots: they ended with the boot.
func (m *Manager) dropOld() error {
	var errs []error
	for _, s := range m.cfg.Journal.AllSettings() {
		if s.BootID != m.cfg.BootID {
			errs = append(errs, m.cfg.Journal.DeleteSettings(s.GPU))
		}
	}
	return errors.Join(errs...)
}

// needsSupervisor reports whether claims need daemons, or a GPU's compute mode shows
// that there may be one.
func (m *Manager) needsSupervisor() bool {
	n := m.readNeeds()
	return len(n.daemons) > 0 || slices.ContainsFunc(m.cfg.Journal.AllSettings(), func(s holding.Settings) bool { return s.ComputeModeBefore != "" })
}

// tidyAll calls tidy for all touched GPUs, concurrently.
func (m *Manager) tidyAll(ctx context.Context) error {
	uuids := slices.Collect(maps.Keys(m.unsettledGPUs()))
	return agenda.Each(uuids, func(uuid gpu.UUID) error { return m.tidy(ctx, uuid) })
}

// tidy applies what claims need to a GPU. A failure is scheduled for a retry.
func (m *Manager) tidy(ctx context.Context, uuid gpu.UUID) error {
	return m.worker.Tried(uuid, m.tidyNow(ctx, uuid))
}

func (m *Manager) tidyNow(ctx context.Context, uuid gpu.UUID) error {
	n := m.readNeeds()
	v, err := m.visit(ctx, n.together(uuid))
	if err != nil {
		return err
	}
	defer v.end()
	return v.explain(v.tidy(ctx))
}
