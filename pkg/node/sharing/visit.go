package sharing

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// callWithin bounds one call of the supervisor or of a driver's program.
const callWithin = 30 * time.Second

// visit is one operation on GPUs whose locks are held.
type visit struct {
	m     *Manager
	uuids []gpu.UUID
	plan  plan
}

// withGPUs calls do with the locks of the GPUs held. uuids are in ascending order.
func (m *Manager) withGPUs(ctx context.Context, uuids []gpu.UUID, do func(*visit) error) error {
	return m.worker.Do(ctx, uuids, func() error {
		if err := do(&visit{m: m, uuids: uuids, plan: m.planNow()}); err != nil {
			return fmt.Errorf("share GPU %s: %w", uuids[0], err)
		}
		return nil
	})
}

// join applies what claims need to the GPUs, and starts the daemons of the claim r.
func (v *visit) join(ctx context.Context, r holding.Record) (map[gpu.DeviceName]gpu.MPSDirs, error) {
	if err := v.applyPlan(ctx); err != nil {
		return nil, err
	}
	dirs, states := map[gpu.DeviceName]gpu.MPSDirs{}, map[string]mps.State{}
	for _, g := range r.Holdings {
		name := r.Daemon(g)
		if name == "" || !slices.Contains(v.uuids, g.GPU) {
			continue
		}
		s, ok := states[name]
		if !ok {
			var err error
			if s, err = v.m.ensure(ctx, name); err != nil {
				return nil, err
			}
			states[name] = s
		}
		dirs[g.Device] = gpu.MPSDirs{PipeDir: s.PipeDir, ShmDir: s.ShmDir}
	}
	return dirs, v.open(ctx, slices.Collect(maps.Keys(states)))
}

// applyPlan stops the daemons that no claim needs, and then applies the settings that
// claims need.
func (v *visit) applyPlan(ctx context.Context) error {
	if err := v.stopUnwanted(ctx); err != nil {
		return err
	}
	return v.applySettings(ctx)
}

// open opens the GPUs of running daemons again that were closed while a daemon was
// away.
func (v *visit) open(ctx context.Context, daemons []string) error {
	for _, name := range daemons {
		if err := v.m.awaitOpen(ctx, name); err != nil {
			return fmt.Errorf("wait until programs that didn't find MPS daemon %s have failed: %w", name, err)
		}
	}
	var errs []error
	for _, uuid := range v.uuids {
		if v.settings(uuid).Closed {
			errs = append(errs, v.applyMode(ctx, uuid))
		}
	}
	return errors.Join(errs...)
}

// tidy applies the settings that claims need, and schedules the daemons of the GPUs that
// aren't as claims need them. The settings wait for the end of daemons that no claim
// needs.
func (v *visit) tidy(ctx context.Context) error {
	if names := v.unwanted(nil); len(names) > 0 {
		v.m.schedule(names...)
		return nil
	}
	for name, w := range v.plan.daemons {
		if slices.ContainsFunc(w.gpus(), func(uuid gpu.UUID) bool { return slices.Contains(v.uuids, uuid) }) && v.differs(name) {
			v.m.schedule(name)
		}
	}
	return v.applySettings(ctx)
}

// start starts a needed daemon, or changes its limits, after the settings of its GPUs. While
// there are daemons that no claim needs, it only schedules these: their end schedules the GPUs.
func (v *visit) start(ctx context.Context, name string) error {
	if names := v.unwanted(nil); len(names) > 0 {
		v.m.schedule(names...)
		return nil
	}
	if err := v.applySettings(ctx); err != nil {
		return err
	}
	return v.adjust(ctx, name)
}

// unwanted returns the daemons that no claim needs, of those named and of those
// known to be on the GPUs.
func (v *visit) unwanted(names []string) []string {
	v.m.mu.Lock()
	defer v.m.mu.Unlock()
	names = slices.Clone(names)
	for name, s := range v.m.found {
		on := func(uuid gpu.UUID) bool { return slices.Contains(v.uuids, uuid) }
		if slices.ContainsFunc(v.m.gpusOf(s.Daemon), on) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return slices.DeleteFunc(names, v.plan.wants)
}

// stopUnwanted stops the unwanted daemons on the GPUs.
func (v *visit) stopUnwanted(ctx context.Context) error {
	names := v.unwanted(nil)
	var errs []error
	for _, name := range names {
		errs = append(errs, v.m.stop(ctx, name))
	}
	v.replan(names)
	return errors.Join(errs...)
}

// replan plans again after daemons were to be stopped: a claim may have come since the
// visit began, and kept one of them.
func (v *visit) replan(daemons []string) {
	if len(daemons) > 0 {
		v.plan = v.m.planNow()
	}
}

// applySettings applies the settings that claims need to the GPUs.
func (v *visit) applySettings(ctx context.Context) error {
	var errs []error
	for _, uuid := range v.uuids {
		errs = append(errs, v.applyMode(ctx, uuid), v.applyTimeSlice(ctx, uuid))
	}
	return errors.Join(errs...)
}

// adjust starts a needed daemon, or changes its limits, if that is necessary and its
// devices are known.
func (v *visit) adjust(ctx context.Context, name string) error {
	if !v.differs(name) {
		return nil
	}
	_, err := v.m.ensure(ctx, name)
	return err
}

// differs reports whether a needed daemon whose devices are known isn't there, or has
// other devices or limits than claims need.
func (v *visit) differs(name string) bool {
	want, err := v.m.daemon(name)
	if err != nil {
		return false // Join finds out, or fails
	}
	v.m.mu.Lock()
	defer v.m.mu.Unlock()
	have, ok := v.m.found[name]
	return !ok || !equal(have.Daemon, want)
}

func equal(a, b mps.Daemon) bool {
	return slices.Equal(a.Devices, b.Devices) && mps.EqualLimits(a, b)
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
	var s mps.State
	err = m.call("ensure", func() (err error) {
		s, err = m.cfg.Daemons.Ensure(ctx, d)
		return err
	})
	if err != nil {
		return mps.State{}, err
	}
	m.sawOne(name, s)
	m.cfg.Step("sharing.ensured")
	klog.FromContext(ctx).V(2).Info("MPS daemon runs", "daemon", name, "threads", d.ThreadPercentage, "memoryMiB", d.MemoryMiB)
	return s, nil
}

// stop stops a daemon, unless a claim needs it by now.
func (m *Manager) stop(ctx context.Context, name string) error {
	unlock, err := m.daemonLocks.Lock(ctx, name)
	if err != nil {
		return fmt.Errorf("wait for another operation on MPS daemon %s: %w", name, err)
	}
	defer unlock()
	if p := m.planNow(); p.wants(name) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	var revision mps.Revision
	err = m.call("stop", func() (err error) {
		revision, err = m.cfg.Daemons.Stop(ctx, name)
		return err
	})
	if err != nil && !m.nothingRemains(err, name) {
		return err
	}
	m.sawGone(name, revision)
	m.cfg.Step("sharing.stopped")
	klog.FromContext(ctx).V(2).Info("MPS daemon stopped", "daemon", name)
	return nil
}

// nothingRemains reports whether the supervisor doesn't answer, and there is no
// directory of the daemons, or of any daemon if none is named: then none runs.
func (m *Manager) nothingRemains(err error, daemons ...string) bool {
	if !errors.Is(err, mps.ErrUnavailable) {
		return false
	}
	remains, err := m.cfg.Remains()
	asked := func(d mps.Daemon) bool { return len(daemons) == 0 || slices.Contains(daemons, d.Name) }
	return err == nil && !slices.ContainsFunc(remains, asked)
}

// daemon returns the daemon as claims need it now.
func (m *Manager) daemon(name string) (mps.Daemon, error) {
	p := m.planNow()
	w := p.daemons[name]
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

// call does one thing outside and measures it.
func (m *Manager) call(op string, do func() error) error {
	start := time.Now()
	err := do()
	m.metrics.calls.WithLabelValues(op, result(err)).Observe(time.Since(start).Seconds())
	return err
}

// result is the label of an outcome.
func result(err error) string {
	switch {
	case err == nil:
		return "success"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "stopped"
	case errors.Is(err, mps.ErrUnavailable):
		return "unavailable"
	case errors.Is(err, errNoTimeSlices), errors.Is(err, nvml.ErrNotSupported):
		return "unsupported"
	default:
		return "error"
	}
}
