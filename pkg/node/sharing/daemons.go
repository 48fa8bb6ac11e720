package sharing

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	// callWithin bounds one call of the supervisor or of a driver's program.
	callWithin = 30 * time.Second
	// reportWithin bounds the wait for a report of a supervisor that may be away.
	reportWithin = 5 * time.Second
	// redialFirst and redialLast bound the delay before a supervisor that doesn't answer is
	// called again; it doubles in between.
	redialFirst = time.Second
	redialLast  = 30 * time.Second
)

// Daemons runs MPS daemons (*mps.Client). Errors wrap mps.ErrUnavailable where
// the supervisor does not answer.
type Daemons interface {
	Ensure(ctx context.Context, d mps.Daemon) (mps.State, error)
	Stop(ctx context.Context, name string) (mps.Revision, error)
	BeginStop(ctx context.Context, name string) (ended bool, revision mps.Revision, err error)
	Watch(ctx context.Context, f func(mps.Report)) error
	Left() ([]string, error)
}

// watch is what the supervisor's reports say, the only source of which daemons there are.
// The Manager's lock guards it.
type watch struct {
	// found are the daemons of the last report, by name; nil before the first.
	found map[string]mps.State
	// revision is that of the last report.
	revision mps.Revision
	// calls counts the calls of Daemons.Watch. answered is the last one that has reported,
	// failed the last one that has ended, with the error err.
	calls, answered, failed int
	err                     error
	// current is set while the supervisor reports changes, ended since Watch has returned.
	current, ended bool
	// again ends the call, or the delay after it: the next one follows at once. nil before
	// the first call.
	again context.CancelFunc
}

// Watch follows the supervisor's daemons until ctx ends. Run calls it. The other methods
// need it, also without Run: they return once it has seen their effect.
func (m *Manager) Watch(ctx context.Context) {
	select {
	case m.watching <- struct{}{}:
		defer func() { <-m.watching }()
	case <-ctx.Done():
		return
	}
	m.mu.Change(func() { m.watch.ended = false })
	said, redial := "", flowcontrol.NewBackOff(redialFirst, redialLast)
	for ctx.Err() == nil {
		call, again := context.WithCancel(ctx)
		lasted, err := m.watchOnce(call, again)
		if call.Err() != nil {
			continue // ctx has ended, or somebody waits for the next report
		}
		// A supervisor that ends soon after each start is called as seldom as one that
		// doesn't start.
		if lasted > redialLast {
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
		case <-call.Done():
		}
		again()
	}
	m.mu.Change(func() { m.watch.failed, m.watch.err, m.watch.ended = m.watch.calls, ctx.Err(), true })
}

// watchKey is the key of the only delay of Watch.
const watchKey = "watch"

// watchOnce calls the supervisor's Watch, and returns for how long that has reported. The
// first report has the changes since the last call, and ends the delays after failures.
func (m *Manager) watchOnce(ctx context.Context, again context.CancelFunc) (lasted time.Duration, err error) {
	m.mu.Lock()
	m.watch.calls++
	m.watch.again = again
	m.mu.Unlock()
	var answered time.Time
	err = m.cfg.Daemons.Watch(ctx, func(report mps.Report) {
		m.saw(report)
		if answered.IsZero() {
			answered = time.Now()
			m.daemons.RetryNow()
		}
		m.converge()
	})
	if !answered.IsZero() {
		lasted = time.Since(answered)
	}
	m.mu.Change(func() {
		if m.watch.current = false; ctx.Err() == nil {
			m.watch.failed, m.watch.err = m.watch.calls, err
		}
	})
	return lasted, err
}

// redial makes Watch call the supervisor again, and returns the number of the call before.
func (m *Manager) redial() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.watch.again != nil {
		m.watch.again()
	}
	return m.watch.calls
}

// refresh returns once a report has arrived that was made after the call. It returns the
// error of a supervisor that doesn't answer.
func (m *Manager) refresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reportWithin)
	defer cancel()
	before := m.redial()
	if err := m.mu.Wait(ctx, func() bool { return max(m.watch.answered, m.watch.failed) > before }); err != nil {
		return fmt.Errorf("wait for the MPS supervisor's report: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.watch.answered > before {
		return nil
	}
	return m.watch.err
}

// await returns once the supervisor has reported the effect of a call that it has answered
// with this revision. A supervisor that ends meanwhile is waited for. It returns at once after Watch
// has ended, with the plugin, because no report follows.
func (m *Manager) await(ctx context.Context, revision mps.Revision) error {
	m.mu.Lock()
	before, current := m.watch.calls, m.watch.current
	m.mu.Unlock()
	if revision == 0 || !current { // 0: it is of a release without revisions
		before = m.redial()
	}
	err := m.mu.Wait(ctx, func() bool {
		return m.watch.ended || m.watch.answered > before || revision != 0 && m.watch.revision >= revision
	})
	if err != nil {
		return fmt.Errorf("wait until the MPS supervisor reports what it has done: %w", err)
	}
	return nil
}

// know returns once it is known which daemons that no claim needs are on the GPU. The
// supervisor is needed only if an earlier plugin, or another program, may have left one.
func (m *Manager) know(ctx context.Context, uuid gpu.UUID) error {
	m.mu.Lock()
	known := m.watch.found != nil
	m.mu.Unlock()
	if known {
		return nil
	}
	left, err := m.cfg.Daemons.Left()
	n := m.readNeeds()
	unwanted := func(name string) bool { return !n.wants(name) && m.mayBeOn(name, uuid) }
	if err == nil && !slices.ContainsFunc(left, unwanted) {
		return nil
	}
	if err := m.refresh(ctx); err != nil {
		return fmt.Errorf("an MPS daemon that no claim needs may still be on GPU %s: %w", uuid, err)
	}
	return nil
}

// mayBeOn reports whether a daemon of which only the name is known may be on the GPU.
func (m *Manager) mayBeOn(daemon string, uuid gpu.UUID) bool {
	owner, ok := holding.OwnerOf(daemon)
	if !ok {
		return gpu.DeviceName(daemon).MayBeOf(uuid)
	}
	c, recorded := m.cfg.Journal.Claim(owner)
	return !recorded || c.MayUse(uuid)
}

// ensure starts a daemon, or changes its limits to those that claims need now.
func (m *Manager) ensure(ctx context.Context, name string) (mps.State, error) {
	unlock, err := m.daemonLocks.Lock(ctx, name)
	if err != nil {
		return mps.State{}, fmt.Errorf("wait for another operation on MPS daemon %s: %w", name, err)
	}
	defer unlock()
	d, err := m.daemon(name)
	if err != nil {
		return mps.State{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	began := time.Now()
	s, err := m.cfg.Daemons.Ensure(ctx, d)
	if err == nil {
		err = m.await(ctx, s.Revision)
	}
	m.observe("ensure", began, err)
	if err != nil {
		return mps.State{}, err
	}
	m.cfg.Steps.Reached("sharing.ensured")
	klog.FromContext(ctx).V(2).Info("MPS daemon runs", "daemon", name, "threads", d.ThreadPercentage, "memoryMiB", d.MemoryMiB)
	return s, nil
}

// stop stops a daemon, unless a claim needs it by now. If wait is unset it returns when
// the end has begun; ended reports whether nothing is left of the daemon.
func (m *Manager) stop(ctx context.Context, name string, wait bool) (ended bool, err error) {
	unlock, err := m.daemonLocks.Lock(ctx, name)
	if err != nil {
		return false, fmt.Errorf("wait for another operation on MPS daemon %s: %w", name, err)
	}
	defer unlock()
	if n := m.readNeeds(); n.wants(name) {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	ended, op, step, began := true, "stop", "sharing.stopped", time.Now()
	var revision mps.Revision
	if wait {
		revision, err = m.cfg.Daemons.Stop(ctx, name)
	} else {
		op = "beginStop"
		ended, revision, err = m.cfg.Daemons.BeginStop(ctx, name)
	}
	if err == nil {
		err = m.await(ctx, revision)
	}
	m.observe(op, began, err)
	if err != nil && m.isGone(err, name) {
		ended, err = true, nil
	}
	if err != nil {
		return false, err
	}
	if !ended {
		step = "sharing.stopBegun"
	} else {
		m.forgetUnreported(name, revision)
	}
	m.cfg.Steps.Reached(step)
	klog.FromContext(ctx).V(2).Info("MPS daemon is stopped", "daemon", name, "ended", ended)
	return ended, nil
}

// forgetUnreported notes the end of a daemon, at a revision, that the watch has not reported
// because it has ended.
func (m *Manager) forgetUnreported(name string, revision mps.Revision) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.watch.ended || m.watch.revision < revision {
		delete(m.watch.found, name)
	}
}

// isGone reports whether the supervisor doesn't answer, and the daemon has no directory:
// then it doesn't run. The supervisor, when it is back, reports the same.
func (m *Manager) isGone(err error, name string) bool {
	if !errors.Is(err, mps.ErrUnavailable) {
		return false
	}
	left, err := m.cfg.Daemons.Left()
	if err != nil || slices.Contains(left, name) {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.watch.found, name)
	return true
}

// daemon returns the daemon as claims need it now.
func (m *Manager) daemon(name string) (mps.Daemon, error) {
	n := m.readNeeds()
	w := n.daemons[name]
	if w == nil {
		return mps.Daemon{}, fmt.Errorf("no claim needs MPS daemon %s any more", name)
	}
	d := mps.Daemon{Name: name, ThreadPercentage: w.threads}
	for _, base := range w.devices {
		switch base := base.(type) {
		case gpu.Whole:
			d.Devices = append(d.Devices, base.GPU)
		case gpu.Partition:
			if len(w.devices) > 1 {
				return mps.Daemon{}, errors.New("one MPS daemon can serve several whole GPUs, or one MIG partition, and nothing else: use one claim for each partition")
			}
			mig := m.instance(w, base)
			if mig == "" {
				return mps.Daemon{}, fmt.Errorf("which MIG device %s on GPU %s is isn't known yet", base.Profile, base.GPU)
			}
			d.Devices = append(d.Devices, mig)
		case gpu.Share, gpu.Replica:
			return mps.Daemon{}, fmt.Errorf("a %T has no MPS daemon", base)
		}
	}
	if slices.Max(w.bounds) > 0 {
		d.MemoryMiB = w.bounds
	}
	return d, nil
}

// remember adds the claim to joined and stores the MIG devices of its partitions that others
// created. It drops those of claims without a record.
func (m *Manager) remember(r holding.Record, instances map[gpu.Partition]gpu.Instance) {
	others := map[gpu.Partition]gpu.UUID{}
	for _, g := range r.Holdings {
		p, ok := g.Base().(gpu.Partition)
		if _, made := m.made(p); ok && !made && instances[p].UUID != "" {
			others[p] = instances[p].UUID
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.others, func(uid string, _ map[gpu.Partition]gpu.UUID) bool {
		_, there := m.cfg.Journal.Claim(uid)
		return !there
	})
	if delete(m.others, r.ClaimUID); len(others) > 0 {
		m.others[r.ClaimUID] = others
	}
	m.joined[r.ClaimUID] = true
}

// made returns the MIG device of a partition that Tessera has created, or is destroying. It
// is empty while the partition is being created.
func (m *Manager) made(p gpu.Partition) (mig gpu.UUID, ok bool) {
	r, ok := m.cfg.Journal.GPU(p.GPU)
	if !ok || r.BootID != m.cfg.BootID {
		return "", false
	}
	for _, made := range r.Partitions {
		switch {
		case made.Partition != holding.PartitionOf(p):
		case made.Made == nil:
			return "", true
		default:
			return made.Made.UUID, true
		}
	}
	return "", false
}

// instance returns the MIG device of a partition; empty if unknown. What Join was told for an
// earlier claim isn't used, because UUIDs of MIG devices are reused.
func (m *Manager) instance(w *wanted, p gpu.Partition) gpu.UUID {
	if mig, ok := m.made(p); ok {
		return mig
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, claim := range w.claims {
		if mig := m.others[claim.ClaimUID][p]; mig != "" {
			return mig
		}
	}
	return ""
}

// isOn reports whether a daemon is known to use one of the GPUs. Needs the lock.
func (m *Manager) isOn(d mps.Daemon, uuids ...gpu.UUID) bool {
	return slices.ContainsFunc(m.gpusOf(d), func(uuid gpu.UUID) bool { return slices.Contains(uuids, uuid) })
}

// gpusOf returns the GPUs that a daemon uses, as far as they are known. Needs the
// lock.
func (m *Manager) gpusOf(d mps.Daemon) []gpu.UUID {
	var uuids []gpu.UUID
	for _, device := range d.Devices {
		if uuid := m.gpuOf(device); uuid != "" {
			uuids = append(uuids, uuid)
		}
	}
	return uuids
}

// gpuOf returns the GPU that a daemon's device is or is of, empty for a MIG device that
// isn't known. Needs the lock.
func (m *Manager) gpuOf(device gpu.UUID) gpu.UUID {
	if device.IsWhole() {
		return device
	}
	for _, r := range m.cfg.Journal.GPUs() {
		for _, p := range r.Partitions {
			if r.BootID == m.cfg.BootID && p.Made != nil && p.Made.UUID == device {
				return r.GPU
			}
		}
	}
	for _, instances := range m.others {
		for p, mig := range instances {
			if mig == device {
				return p.GPU
			}
		}
	}
	return ""
}
