package sharing

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
)

const (
	// retryFirst and retryLast bound the time after which Run retries a failure; it
	// doubles in between.
	retryFirst = 2 * time.Second
	retryLast  = time.Minute
	// redialFirst and redialLast do so for a supervisor that doesn't answer.
	redialFirst = time.Second
	redialLast  = 30 * time.Second
	// verifyEvery is the interval at which settings are compared with the claims'
	// needs.
	verifyEvery = time.Minute
)

// Run watches the supervisor's daemons, applies what claims need when the supervisor
// answers again, and retries failures. It returns when the context has ended and the
// operations in progress are done.
func (m *Manager) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.follow(ctx) })
	wg.Go(func() { m.stopFoundOrphans(ctx) })
	wg.Go(func() { m.verify(ctx) })
	m.worker.Sweep(ctx, "Can't apply what claims need to a GPU, retrying", m.tidy)
}

// follow watches the daemons. The first report of a supervisor that answers again
// has the changes in between.
func (m *Manager) follow(ctx context.Context) {
	said, pause := "", redialFirst
	for ctx.Err() == nil {
		err := m.cfg.Daemons.Watch(ctx, func(report mps.Report) {
			said, pause = "", redialFirst
			m.saw(report)
			m.converge()
		})
		m.mu.Lock()
		m.current = false
		m.mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		if err != nil && err.Error() != said && m.needsSupervisor() {
			said = err.Error()
			klog.FromContext(ctx).Error(err, "Can't watch the MPS daemons that claims need")
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
		pause = min(2*pause, redialLast)
	}
}

// verify schedules the GPUs that claims share for a check of their settings, every
// verifyEvery: a GPU reset loses the settings, and nothing reports that.
func (m *Manager) verify(ctx context.Context) {
	tick := time.NewTicker(verifyEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		p := m.planNow()
		for uuid := range p.gpus() {
			m.mu.Lock()
			m.recheck[uuid] = true
			m.mu.Unlock()
			m.worker.At(uuid, time.Now())
		}
	}
}

// converge schedules the GPUs whose daemons aren't those that claims need, and the
// end of daemons that no claim needs. It doesn't block: the next report of the
// supervisor waits for it.
func (m *Manager) converge() {
	p := m.planNow()
	m.mu.Lock()
	differ, orphans := m.differing(&p), m.orphans(&p)
	m.mu.Unlock()
	for _, uuid := range differ {
		m.worker.At(uuid, time.Now())
	}
	if len(orphans) > 0 {
		select {
		case m.orphaned <- struct{}{}:
		default:
		}
	}
}

// orphans returns the daemons that no claim needs and that aren't being stopped. It needs
// the lock.
func (m *Manager) orphans(p *plan) []string {
	var names []string
	for name, s := range m.found {
		if !p.wants(name) && s.Phase != mps.Ending {
			names = append(names, name)
		}
	}
	return names
}

// stopFoundOrphans stops the daemons that converge finds, until ctx ends.
func (m *Manager) stopFoundOrphans(ctx context.Context) {
	for {
		select {
		case <-m.orphaned:
		case <-ctx.Done():
			return
		}
		p := m.planNow()
		m.mu.Lock()
		names := m.orphans(&p)
		m.mu.Unlock()
		if err := m.stopAll(ctx, names); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).V(2).Info("MPS daemons that no claim needs can't be stopped now", "err", err)
		}
	}
}

// differing returns the GPUs whose daemon is missing, or whose MPS server has been
// replaced since the compute mode was last verified. Needs the lock.
func (m *Manager) differing(p *plan) []gpu.UUID {
	var differ []gpu.UUID
	for name, w := range p.daemons {
		s, ok := m.found[name]
		for _, uuid := range w.gpus() {
			other := m.cfg.ExclusiveProcess && s.ServerPID != 0 && m.modeSeen[uuid] != s.ServerPID && p.hasWhole(uuid)
			if !ok || other {
				differ = append(differ, uuid)
			}
		}
	}
	return differ
}
