package sharing

import (
	"context"
	"math/bits"
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
)

// Run follows what the supervisor says of the daemons, has them as claims need
// them when it is back, and tries again what failed. It returns when the context
// has ended and what it began is done.
func (m *Manager) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.follow(ctx) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-m.wake:
		}
		due, next := m.takeDue(time.Now())
		for _, uuid := range due {
			wg.Go(func() { m.sweep(ctx, uuid) })
		}
		timer.Reset(next)
	}
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

// compare has Run look at the GPUs whose daemons aren't those that claims need.
func (m *Manager) compare(ctx context.Context) {
	p := m.plan()
	m.mu.Lock()
	var differ []gpu.UUID
	orphans := false
	for name, w := range p.daemons {
		if _, ok := m.found[name]; !ok {
			differ = append(differ, w.gpus()...)
		}
	}
	for name := range m.found {
		orphans = orphans || !p.wants(name)
	}
	m.mu.Unlock()
	for _, uuid := range differ {
		m.look(uuid, time.Now())
	}
	if !orphans {
		return
	}
	if err := m.stopOrphans(ctx); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).V(2).Info("MPS daemons that nobody needs stay for now", "err", err)
	}
}

func (m *Manager) sweep(ctx context.Context, uuid gpu.UUID) {
	err := m.tidy(ctx, uuid)
	if err != nil && ctx.Err() == nil && m.isNews(uuid) {
		klog.FromContext(ctx).Error(err, "A GPU isn't as claims need it; it is tried again", "gpu", uuid)
	}
}

// isNews says whether a failure on the GPU is worth a line: the first ones are,
// and then fewer and fewer.
func (m *Manager) isNews(uuid gpu.UUID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return bits.OnesCount(uint(m.failures[uuid])) == 1
}

// takeDue returns the GPUs that are due and after which time the next one is.
func (m *Manager) takeDue(now time.Time) (due []gpu.UUID, next time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	next = time.Hour
	for uuid, at := range m.due {
		if wait := at.Sub(now); wait > 0 {
			next = min(next, wait)
			continue
		}
		due = append(due, uuid)
		delete(m.due, uuid)
	}
	return due, next
}

// look has Run look at the GPU at that time, or before.
func (m *Manager) look(uuid gpu.UUID, at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if before, ok := m.due[uuid]; ok && before.Before(at) {
		return
	}
	m.due[uuid] = at
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// lookAgain has Run look at the GPU after a failure.
func (m *Manager) lookAgain(uuid gpu.UUID) {
	m.mu.Lock()
	wait := min(retryFirst<<min(m.failures[uuid], 10), retryLast)
	m.failures[uuid]++
	m.mu.Unlock()
	m.look(uuid, time.Now().Add(wait))
}
