package sharing

import (
	"context"
	"sync"
	"time"

	"k8s.io/client-go/util/flowcontrol"
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
	wg.Go(func() { m.verify(ctx) })
	wg.Go(func() {
		m.daemons.Sweep(ctx, m.settle, func(log klog.Logger, name string, err error) {
			log.Error(err, "Can't start, change or stop an MPS daemon as claims need, retrying", "daemon", name)
		})
	})
	m.worker.Sweep(ctx, m.tidy, func(log klog.Logger, uuid gpu.UUID, err error) {
		log.Error(err, "Can't apply what claims need to a GPU, retrying", "gpu", uuid)
	})
}

// follow watches the daemons. The first report of a supervisor that answers again
// has the changes in between, and ends the delays after failures.
func (m *Manager) follow(ctx context.Context) {
	said, redial := "", flowcontrol.NewBackOff(redialFirst, redialLast)
	for ctx.Err() == nil {
		var answered time.Time
		err := m.cfg.Daemons.Watch(ctx, func(report mps.Report) {
			m.saw(report)
			if answered.IsZero() {
				answered = time.Now()
				m.daemons.RetryNow()
			}
			m.converge()
		})
		m.mu.Lock()
		m.current = false
		m.mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		// A supervisor that ends soon after each start is called as seldom as one that
		// doesn't start.
		if !answered.IsZero() && time.Since(answered) > redialLast {
			said = ""
			redial.Reset(watchKey)
		}
		if err != nil && err.Error() != said && m.needsSupervisor() {
			said = err.Error()
			klog.FromContext(ctx).Error(err, "Can't watch the MPS daemons that claims need")
		}
		redial.Next(watchKey, time.Now())
		select {
		case <-time.After(redial.Get(watchKey)):
		case <-ctx.Done():
		}
	}
}

// watchKey is the key of the only delay of follow.
const watchKey = "watch"

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

// converge schedules the daemons that claims need and that are missing, those that no
// claim needs, and the GPUs whose compute mode has to be verified. It doesn't block: the
// next report of the supervisor waits for it.
func (m *Manager) converge() {
	p := m.planNow()
	m.mu.Lock()
	daemons, gpus := m.differing(&p), m.unverified(&p)
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
func (m *Manager) differing(p *plan) []string {
	var names []string
	for name := range p.daemons {
		if _, ok := m.found[name]; !ok {
			names = append(names, name)
		}
	}
	for name, s := range m.found {
		if !p.wants(name) && s.Phase != mps.Ending {
			names = append(names, name)
		}
	}
	return names
}

// unverified returns the GPUs whose MPS server has been replaced since the compute mode
// was last verified. Needs the lock.
func (m *Manager) unverified(p *plan) []gpu.UUID {
	if !m.cfg.ExclusiveProcess {
		return nil
	}
	var uuids []gpu.UUID
	for name, w := range p.daemons {
		s := m.found[name]
		for _, uuid := range w.gpus() {
			if s.ServerPID != 0 && m.modeSeen[uuid] != s.ServerPID && p.hasWhole(uuid) {
				uuids = append(uuids, uuid)
			}
		}
	}
	return uuids
}

// settle starts a daemon that claims need, sets its limits, or stops one that no claim
// needs. A failure is scheduled for a retry.
func (m *Manager) settle(ctx context.Context, name string) error {
	return m.daemons.Try(name, func() error {
		p := m.planNow()
		if w := p.daemons[name]; w != nil {
			return m.withGPUs(ctx, p.together(w.gpus()[0]), func(v *visit) error { return v.start(ctx, name) })
		}
		if p.wants(name) {
			return nil // it is kept
		}
		if err := m.stop(ctx, name); err != nil {
			return err
		}
		for uuid := range m.changedGPUs() { // settings are restored after the daemon's end
			m.worker.At(uuid, time.Now())
		}
		return nil
	})
}
