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
	// retryFirst and retryLast bound the time after which Run tries again what
	// failed; it doubles in between.
	retryFirst = 2 * time.Second
	retryLast  = time.Minute
	// redialFirst and redialLast do so for a supervisor that doesn't answer.
	redialFirst = time.Second
	redialLast  = 30 * time.Second
	// verifyEvery is how often settings are compared with what claims need.
	verifyEvery = time.Minute
)

// Run follows what the supervisor says of the daemons, has them as claims need
// them when it is back, and tries again what failed. It returns when the context
// has ended and what it began is done.
func (m *Manager) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.follow(ctx) })
	wg.Go(func() { m.verify(ctx) })
	m.agenda.Run(ctx, m.sweep)
}

// follow watches the daemons. The first word of a supervisor that answers again
// tells what became of them meanwhile.
func (m *Manager) follow(ctx context.Context) {
	said, pause := "", redialFirst
	for ctx.Err() == nil {
		err := m.Daemons.Watch(ctx, func(states []mps.State) {
			said, pause = "", redialFirst
			m.saw(states)
			m.compare(ctx)
		})
		if ctx.Err() != nil {
			return
		}
		if err != nil && err.Error() != said && m.needsSupervisor() {
			said = err.Error()
			klog.FromContext(ctx).Error(err, "MPS daemons that claims need are not looked after")
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
		p := m.plan()
		for uuid := range p.touched() {
			m.mu.Lock()
			m.recheck[uuid] = true
			m.mu.Unlock()
			m.agenda.At(uuid, time.Now())
		}
	}
}

// compare has Run look at the GPUs whose daemons aren't those that claims need.
func (m *Manager) compare(ctx context.Context) {
	p := m.plan()
	m.mu.Lock()
	differ := m.differing(&p)
	orphans := false
	for name, s := range m.found {
		orphans = orphans || !p.wants(name) && s.Phase != mps.Ending
	}
	m.mu.Unlock()
	for _, uuid := range differ {
		m.agenda.At(uuid, time.Now())
	}
	if !orphans {
		return
	}
	if err := m.stopOrphans(ctx); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).V(2).Info("MPS daemons that nobody needs stay for now", "err", err)
	}
}

// differing returns the GPUs whose daemon is missing, or whose MPS server has been
// replaced since the compute mode was last verified. Needs the lock.
func (m *Manager) differing(p *plan) []gpu.UUID {
	var differ []gpu.UUID
	for name, w := range p.daemons {
		s, ok := m.found[name]
		for _, uuid := range w.gpus() {
			other := m.ExclusiveProcess && s.ServerPID != 0 && m.modeSeen[uuid] != s.ServerPID && p.hasWhole(uuid)
			if !ok || other {
				differ = append(differ, uuid)
			}
		}
	}
	return differ
}

func (m *Manager) sweep(ctx context.Context, uuid gpu.UUID) {
	err := m.tidy(ctx, uuid)
	if err != nil && ctx.Err() == nil && m.agenda.IsNews(uuid) {
		klog.FromContext(ctx).Error(err, "A GPU isn't as claims need it; it is tried again", "gpu", uuid)
	}
}
