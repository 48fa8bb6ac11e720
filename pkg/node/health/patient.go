package health

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

const (
	// readEvery is how often a GPU is read without an event.
	readEvery = time.Minute
	// readSickEvery is the same while something is wrong with it: two readings have to
	// agree that it is over, within ten seconds.
	readSickEvery = 4 * time.Second
	// answerWithin is how long XIDs wait for the driver's recovery action. After that
	// the catalog of XIDs decides, until the driver answers.
	answerWithin = 500 * time.Millisecond
	// calm is the least time between two readings: events come in storms.
	calm = 200 * time.Millisecond
)

// patient is a GPU that is watched.
type patient struct {
	uuid gpu.UUID
	wake chan struct{}

	// deciding is held while the state is replaced; unsaved, whether the journal has
	// another one, is under it.
	deciding sync.Mutex
	unsaved  bool
	// said is the last failed reading that was logged; only watch uses it.
	said string

	mu      sync.Mutex
	current health.State
	xids    []gpu.XID // not decided on yet, each kind once
}

func newPatient(uuid gpu.UUID, s health.State) *patient {
	return &patient{uuid: uuid, wake: make(chan struct{}, 1), current: s}
}

func (p *patient) state() health.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current
}

func (p *patient) set(s health.State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current = s
}

// requestReading requests that the GPU is read soon.
func (p *patient) requestReading() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// add adds an XID, unless one like it waits to be decided on.
func (p *patient) add(x gpu.XID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.ContainsFunc(p.xids, func(y gpu.XID) bool { return sameKind(x, y) }) {
		p.xids = append(p.xids, x)
	}
}

// sameKind reports whether two XIDs of a GPU have the same code and instance.
func sameKind(x, y gpu.XID) bool {
	same := func(a, b *int) bool { return a == b || a != nil && b != nil && *a == *b }
	return x.Code == y.Code && same(x.GPUInstance, y.GPUInstance) && same(x.ComputeInstance, y.ComputeInstance)
}

// take returns the XIDs that wait to be decided on, and removes them.
func (p *patient) take() []gpu.XID {
	p.mu.Lock()
	defer p.mu.Unlock()
	xids := p.xids
	p.xids = nil
	return xids
}

// watch reads the GPU until ctx ends.
func (m *Monitor) watch(ctx context.Context, p *patient) {
	for ctx.Err() == nil {
		m.examine(ctx, p)
		every := readEvery
		if p.state().HasOpen() {
			every = readSickEvery
		}
		pause(ctx, calm, nil)
		pause(ctx, every-calm, p.wake)
	}
}

// pause returns after the time, at a signal or at the end of ctx.
func pause(ctx context.Context, d time.Duration, signal <-chan struct{}) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-signal:
	case <-ctx.Done():
	}
}

// answer is the result of a reading.
type answer struct {
	vitals gpu.Vitals
	err    error
}

// examine reads the GPU, and decides on its XIDs and on the reading. Without
// hardware there is nothing to decide on.
func (m *Monitor) examine(ctx context.Context, p *patient) {
	m.using.RLock()
	defer m.using.RUnlock()
	if m.hardware == nil {
		return
	}
	xids := p.take()
	answered := make(chan answer, 1)
	go func() {
		vitals, err := m.hardware.Session.Vitals(p.uuid)
		answered <- answer{vitals, err}
	}()
	late := time.NewTimer(answerWithin)
	defer late.Stop()
	var a answer
	select {
	case a = <-answered:
	case <-late.C:
		m.decide(ctx, p, xids, gpu.RecoveryUnknown)
		xids = nil
		a = <-answered
	}
	m.decide(ctx, p, xids, a.vitals.Recovery)
	m.observe(ctx, p, a)
}

// decide decides on XIDs.
func (m *Monitor) decide(ctx context.Context, p *patient, xids []gpu.XID, recovery gpu.RecoveryAction) {
	for _, x := range xids {
		var notice *health.Notice
		m.change(ctx, p, func(s health.State) health.State {
			s, notice = s.XID(x, recovery, m.hardware.Load())
			return s
		})
		if notice != nil {
			m.queue(*notice)
		}
	}
}

// observe decides on a reading. An error that may be one of this program says
// nothing about the GPU; the reading of its facts has conditions for it.
func (m *Monitor) observe(ctx context.Context, p *patient, a answer) {
	r := health.Reading{At: time.Now(), Load: m.hardware.Load()}
	said := ""
	switch {
	case a.err == nil:
		r.Vitals = &a.vitals
	case errors.Is(a.err, nvml.ErrLost):
		r.Conditions = []gpu.Condition{{Type: gpu.Lost, Message: a.err.Error()}}
	case errors.Is(a.err, nvml.ErrNotResponding):
		r.Conditions = []gpu.Condition{{Type: gpu.NotResponding, Message: a.err.Error()}}
	default:
		said = a.err.Error()
	}
	if said != "" && said != p.said {
		klog.FromContext(ctx).Error(a.err, "A GPU's vitals can't be read", "node", m.cfg.NodeName, "gpu", p.uuid)
	}
	p.said = said
	m.change(ctx, p, func(s health.State) health.State { return s.Observe(r) })
}
