package healthmonitor

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/node/usage"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// Session is the door to the hardware (*nvml.Session).
type Session interface {
	// Vitals reads the state of a GPU's health.
	Vitals(uuid gpu.UUID) (gpu.Vitals, error)
	// Probe asks every GPU for an answer, and returns those that give none.
	Probe() []string
	// Usage reads how much of a GPU programs use. It must return in the end, also for a GPU
	// that doesn't respond.
	Usage(uuid gpu.UUID, over time.Duration) (gpu.Usage, error)
	// EndUsage frees what Usage keeps for its next call for the GPU. It must return in the end, too.
	EndUsage(uuid gpu.UUID) (freed bool)
}

// Hardware is a driver that works.
type Hardware struct {
	Session Session
	// Sys is the path of the host's /sys, and KernelLog that of the kernel log (/dev/kmsg), as
	// this process sees them.
	Sys, KernelLog string
}

// Config has the parts and settings of a Monitor.
type Config struct {
	NodeName string
	// BootID of the running kernel.
	BootID string
	// Client removes the GPUInventory's annotation.
	Client     kubernetes.Interface
	Journal    *journal.Journal
	Facts      *facts.Facts
	Containers *containers.Containers
	// Preparer and Sharing keep claims off a GPU that is reset. Preparer has the outcomes of
	// prepares, and Sharing knows the faults of MPS daemons. Without a Preparer, GPUs are never
	// reset, and conditions say nothing of it.
	Preparer *prepare.Preparer
	Sharing  *sharing.Manager
	// Readings gets the usage of each GPU while scrapes want it.
	Readings   *usage.Readings
	Events     Events
	Registerer prometheus.Registerer
}

// Monitor watches the GPUs' health. Its methods may be called concurrently. Run, SetHardware,
// End, EndUnlisted, Reset and OrderForget may block, the others don't.
type Monitor struct {
	cfg     Config
	metrics *metrics
	limiter limiter
	// refusals is for the events of SawOutcome.
	refusals limiter
	log      *kernelLog
	// logPath has the path of the kernel log, once; notices wait for Run to report them.
	logPath chan string
	notices chan health.Notice
	// queued are the errors of which a notice waits there: more of the same would only
	// keep others waiting.
	queued sync.Map
	// orders are for whoever opens and closes NVML.
	orders chan *Order
	tasks  *agenda.Agenda[task]
	// resettable has the GPUs that policies let the plugin reset; nil: not known yet.
	resettable atomic.Pointer[map[gpu.UUID]bool]

	// using is held for reading while the hardware is used.
	using    sync.RWMutex
	hardware *Hardware // nil: none
	// notResponding has the GPUs that the last probe found so; of the task askGPUs.
	notResponding []string

	mu   sync.Mutex // of all below, but for what watchedGPU.deciding is of
	gpus map[gpu.UUID]*watchedGPU
	// ending is the last request to end a condition by hand, until it is handled.
	ending string
}

// New returns a Monitor that has read the journal and set the conditions in it in the
// facts.
func New(cfg Config) *Monitor {
	m := &Monitor{
		cfg: cfg, metrics: newMetrics(cfg.Registerer), log: newKernelLog(cfg.Containers),
		logPath: make(chan string, 1), notices: make(chan health.Notice, 64), gpus: map[gpu.UUID]*watchedGPU{},
		orders: make(chan *Order, 1), tasks: agenda.New[task](removeFirst, removeLast),
	}
	for _, h := range cfg.Journal.AllHealth() {
		m.gpus[h.GPU] = newWatchedGPU(h.GPU, h.State)
	}
	for _, u := range cfg.Journal.UnreadableHealth() {
		w := newWatchedGPU(u.GPU, health.State{Causes: []health.Cause{forgotten(time.Now())}})
		w.unsaved = true
		m.gpus[u.GPU] = w
	}
	m.publish()
	return m
}

// forgotten is the cause of a GPU whose record can't be read.
func forgotten(at time.Time) health.Cause {
	return health.Cause{
		Type: gpu.NeedsInspection, Source: health.FromRecord, Since: at,
		Message: "the node's record of the GPU's health could not be read; an earlier error, which the driver doesn't report any more, may be forgotten",
	}
}

// SetHardware sets the hardware; nil: none. It returns when the previous one isn't
// used any more.
func (m *Monitor) SetHardware(h *Hardware) {
	m.using.Lock()
	m.hardware = h
	m.cfg.Readings.Drop()
	m.using.Unlock()
	if h != nil {
		select {
		case m.logPath <- h.KernelLog:
		default: // a driver with another root comes with another process
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.gpus {
		m.requestVitals(w.uuid)
	}
}

// SawInventory takes in what policies and admins request in the GPUInventory.
func (m *Monitor) SawInventory(inv *v1alpha1.GPUInventory) {
	resettable := inventory.Resettable(inv)
	m.resettable.Store(&resettable)
	m.enqueue(inv)
}

// Saw handles an event of the driver.
func (m *Monitor) Saw(e nvml.Event) {
	switch {
	case e.XID != nil:
		m.SawXID(*e.XID)
	case e.Kind != nvml.EventMIG:
		m.SawEvent(e.GPU)
	}
}

// SawXID handles an XID.
func (m *Monitor) SawXID(x gpu.XID) {
	m.metrics.xids.WithLabelValues(string(x.GPU), codeLabel(x.Code)).Inc()
	if x.GPU == "" {
		m.SawEvent("")
		return
	}
	m.add(m.getOrAdd(x.GPU), x)
	m.requestVitals(x.GPU)
}

// SawEvent handles another event of a GPU; empty: the driver doesn't name it.
func (m *Monitor) SawEvent(uuid gpu.UUID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.gpus {
		if w.uuid == uuid || uuid == "" {
			m.requestVitals(w.uuid)
		}
	}
}

// Run watches the GPUs until ctx ends.
func (m *Monitor) Run(ctx context.Context) {
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { m.followLog(ctx) })
	all.Go(func() { m.reportNotices(ctx) })
	all.Go(func() { m.doTasks(ctx) })
	var outcomes <-chan prepare.Outcome // nil: none
	if m.cfg.Preparer != nil {
		outcomes = m.cfg.Preparer.Outcomes()
	}
	var before, silentBefore []gpu.UUID
	for ctx.Err() == nil {
		uuids, silent, changed := m.cfg.Facts.GPUs()
		for _, uuid := range without(uuids, before) {
			m.requestUsage(uuid)
			m.requestVitals(uuid)
		}
		// A GPU that became silent: only the monitor counts how often that happens.
		for _, uuid := range without(silent, silentBefore) {
			m.requestVitals(uuid)
		}
		before, silentBefore = uuids, silent
		select {
		case <-changed:
		case <-m.cfg.Sharing.DaemonFaultsChanged():
			m.SawEvent("")
		case o := <-outcomes:
			m.SawOutcome(ctx, o)
		case <-m.cfg.Readings.Asked():
			for _, uuid := range uuids {
				m.requestUsage(uuid)
			}
		case <-ctx.Done():
		}
	}
}

// without returns the GPUs that others doesn't have.
func without(gpus, others []gpu.UUID) []gpu.UUID {
	return slices.DeleteFunc(slices.Clone(gpus), func(uuid gpu.UUID) bool { return slices.Contains(others, uuid) })
}

// followLog follows the kernel log of the first driver.
func (m *Monitor) followLog(ctx context.Context) {
	select {
	case path := <-m.logPath:
		m.log.follow(ctx, path)
	case <-ctx.Done():
	}
}

// getOrAdd returns the GPU, which it adds if it is new.
func (m *Monitor) getOrAdd(uuid gpu.UUID) *watchedGPU {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gpus[uuid] == nil {
		m.gpus[uuid] = newWatchedGPU(uuid, health.State{})
	}
	return m.gpus[uuid]
}

// publish sets all conditions in the facts.
func (m *Monitor) publish() {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := map[gpu.UUID][]gpu.Condition{}
	for _, w := range m.gpus {
		if c := w.conditions(); len(c) > 0 {
			all[w.uuid] = c
		}
	}
	m.cfg.Facts.SetHealth(all)
}

// End ends a condition of a GPU that has begun by a time, as an admin wants, and records an
// event.
func (m *Monitor) End(ctx context.Context, uuid gpu.UUID, e health.Ending, begunBy time.Time) error {
	return m.end(ctx, uuid, e, func(s health.State) (health.State, error) { return s.End(e, begunBy) })
}

// EndUnlisted is End for a GPU that is lost, which it removes from the facts. It returns an
// error if NVML still lists it, or a claim has it.
func (m *Monitor) EndUnlisted(ctx context.Context, uuid gpu.UUID, e health.Ending, begunBy time.Time) error {
	end := func(s health.State) (health.State, error) { return s.EndUnlisted(e, begunBy) }
	if _, err := end(m.stateOf(m.getOrAdd(uuid))); err != nil {
		return err
	}
	if err := m.forgetUnlisted(ctx, uuid); err != nil {
		return fmt.Errorf("end %s by hand, which needs that NVML doesn't list the GPU and no claim has it: %w", e.Type, err)
	}
	return m.end(ctx, uuid, e, end)
}

func (m *Monitor) end(ctx context.Context, uuid gpu.UUID, e health.Ending, decide func(health.State) (health.State, error)) error {
	if _, _, err := m.replace(ctx, m.getOrAdd(uuid), decide); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("A condition of a GPU was ended by hand", "node", m.cfg.NodeName, "gpu", uuid, "condition", e.Type, "by", e.By, "why", e.Why)
	m.cfg.Events.OnNode(corev1.EventTypeNormal, reasonEnded, fmt.Sprintf("GPU %s: %s was ended by %s: %s", uuid, e.Type, e.By, e.Why))
	return nil
}

// change replaces the GPU's state by the result of decide, and reports the causes
// that began and ended.
func (m *Monitor) change(ctx context.Context, w *watchedGPU, decide func(health.State) health.State) {
	began, ended, _ := m.replace(ctx, w, func(s health.State) (health.State, error) { return decide(s), nil })
	for _, c := range began {
		klog.FromContext(ctx).Info("Something is wrong with a GPU", "node", m.cfg.NodeName, "gpu", w.uuid, "condition", c.Type, "message", c.Message, "xid", c.XID)
	}
	for _, c := range ended {
		klog.FromContext(ctx).Info("A cause of a GPU's condition has ended", "node", m.cfg.NodeName, "gpu", w.uuid, "condition", c.Type, "message", c.Message, "since", c.Since)
	}
	m.reportChange(w.uuid, began, ended)
}

// replace replaces the GPU's state by the result of decide: it stores the state, and sets
// its conditions in the facts. It returns which causes began and ended.
func (m *Monitor) replace(ctx context.Context, w *watchedGPU, decide func(health.State) (health.State, error)) (began, ended []health.Cause, _ error) {
	w.deciding.Lock()
	defer w.deciding.Unlock()
	before := m.stateOf(w)
	after, err := decide(before)
	if err != nil {
		return nil, nil, err
	}
	changed := !after.Equal(before)
	if changed || w.unsaved {
		m.save(ctx, w, after)
	}
	m.set(w, after)
	if !changed {
		return nil, nil, nil
	}
	m.publish()
	began, ended = health.Changes(before, after)
	return began, ended, nil
}

// isSaved reports whether the journal has the GPU's state.
func (m *Monitor) isSaved(w *watchedGPU) bool {
	w.deciding.Lock()
	defer w.deciding.Unlock()
	return !w.unsaved
}

// save stores the state. After a failure it is tried again at the next reading.
func (m *Monitor) save(ctx context.Context, w *watchedGPU, s health.State) {
	var err error
	if s.Equal(health.State{}) {
		err = m.cfg.Journal.DeleteHealth(w.uuid)
	} else {
		err = m.cfg.Journal.PutHealth(holding.Health{GPU: w.uuid, State: s})
	}
	if err != nil && !w.unsaved {
		klog.FromContext(ctx).Error(err, "A GPU's health can't be stored, retrying; a restart may forget it", "node", m.cfg.NodeName, "gpu", w.uuid)
	}
	w.unsaved = err != nil
}
