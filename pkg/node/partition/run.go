package partition

import (
	"context"
	"math/bits"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	// retryFirst and retryLast bound the time after which Run tries again what
	// failed; it doubles in between.
	retryFirst = 5 * time.Second
	retryLast  = time.Minute
)

// Run destroys partitions that nobody has used for as long as SetKeepWarm says,
// switches MIG mode off some seconds after the last partition of ours is gone,
// and tries again what failed. It returns when the context has ended and what
// it began is done.
func (m *Manager) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
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

func (m *Manager) sweep(ctx context.Context, uuid gpu.UUID) {
	err := m.tidy(ctx, "sweep", uuid, limits{keepWarm: m.keep(uuid), linger: modeLinger})
	if err != nil && ctx.Err() == nil && m.isNews(uuid) {
		klog.FromContext(ctx).Error(err, "Idle MIG partitions stay for now; it is tried again", "gpu", uuid)
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

// plan has Run look at the GPU at that time, or before.
func (m *Manager) plan(uuid gpu.UUID, at time.Time) {
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

// planAgain has Run look at the GPU after a failure.
func (m *Manager) planAgain(uuid gpu.UUID) {
	m.mu.Lock()
	wait := min(retryFirst<<min(m.failures[uuid], 10), retryLast)
	m.failures[uuid]++
	m.mu.Unlock()
	m.plan(uuid, time.Now().Add(wait))
}

// plan has Run come back when something of ours is due to go.
func (v *visit) plan() {
	for _, o := range v.ours {
		v.planOwn(o)
	}
	switch {
	case !v.switched || len(v.ours) > 0:
		v.m.notEmpty(v.uuid)
	case len(v.others) > 0: // the mode stays on for their sake
		v.planIn(retryLast)
	default:
		v.planIn(modeLinger - v.m.emptyFor(v.uuid))
	}
}

// planOwn is plan for one of ours; what a claim holds goes when that gives it up.
func (v *visit) planOwn(o own) {
	keep := v.m.keep(v.uuid)
	switch {
	case o.instance == nil:
	case v.m.holder(o.Partition) == "":
		v.planIn(keep - v.m.idleFor(o.Partition))
	case v.m.isIdle(o.Partition): // given up, and the claim's record is about to go
		v.planIn(max(keep-v.m.idleFor(o.Partition), retryFirst))
	case len(v.m.Journal.Unreadable()) > 0: // whose claims give up what their names tell, and that may not be all
		v.planIn(retryLast)
	}
}

func (v *visit) planIn(wait time.Duration) { v.m.plan(v.uuid, time.Now().Add(wait)) }
