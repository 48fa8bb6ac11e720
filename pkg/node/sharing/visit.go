package sharing

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// visit is one operation on GPUs whose locks are held until end is called.
type visit struct {
	m     *Manager
	uuids []gpu.UUID
	needs needs
	end   func()
}

// visit takes the locks of the GPUs, which are in ascending order.
func (m *Manager) visit(ctx context.Context, uuids []gpu.UUID) (*visit, error) {
	end, err := m.worker.Lock(ctx, uuids)
	if err != nil {
		return nil, err
	}
	return &visit{m: m, uuids: uuids, needs: m.readNeeds(), end: end}, nil
}

// explain adds the GPU to an error.
func (v *visit) explain(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("share GPU %s: %w", v.uuids[0], err)
}

// join applies what claims need to the GPUs, and starts the daemons of the claim r. It returns a
// gpu.RefusedError for a daemon that doesn't start, and for a compute mode that can't be set.
func (v *visit) join(ctx context.Context, r holding.Record) (map[string]gpu.MPSDirs, error) {
	if err := v.applyNeeds(ctx); err != nil {
		return nil, err
	}
	dirs := map[string]gpu.MPSDirs{}
	for _, g := range r.Holdings {
		name := r.Daemon(g)
		if _, done := dirs[name]; done || name == "" || !slices.Contains(v.uuids, g.GPU) {
			continue
		}
		s, err := v.m.ensure(ctx, name)
		if errors.Is(err, mps.ErrDaemonFails) {
			return nil, refused(r, name, err)
		}
		if err != nil {
			return nil, err
		}
		dirs[name] = gpu.MPSDirs{PipeDir: s.PipeDir, ShmDir: s.ShmDir}
	}
	return dirs, v.open(ctx, slices.Collect(maps.Keys(dirs)))
}

// applyNeeds stops the daemons that no claim needs, and then applies the settings that
// claims need.
func (v *visit) applyNeeds(ctx context.Context) error {
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
			return err
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

// leave takes down what only leaving claims had. Limits that can't be widened and
// settings that can't be restored now are retried later; a failure to stop a daemon
// is an error.
func (v *visit) leave(ctx context.Context, r holding.Record) error {
	names := v.daemonsOf(r)
	ending, err := v.beginStopUnwanted(ctx, names)
	if err != nil {
		return err
	}
	if ending { // the mode is put back after the daemon's end
		for _, uuid := range v.uuids {
			v.m.worker.At(uuid, time.Now())
		}
		return nil
	}
	if err := v.applySettings(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Can't apply what the remaining claims need to a GPU, retrying", "gpu", v.uuids[0])
		for _, uuid := range v.uuids {
			v.m.worker.Failed(uuid)
		}
	}
	for _, name := range names {
		if v.needs.daemons[name] == nil {
			continue
		}
		if err := v.adjust(ctx, name); err != nil {
			klog.FromContext(ctx).Error(err, "Can't set the limits that the remaining claims need, retrying", "daemon", name)
			v.m.daemons.Failed(name)
		}
	}
	return nil
}

// daemonsOf returns the daemons of a record that may run on the GPUs.
func (v *visit) daemonsOf(r holding.Record) []string {
	var names []string
	for _, g := range r.Holdings {
		name := r.Daemon(g)
		old := r.BootID != "" && r.BootID != v.m.cfg.BootID // "": it can't be read
		if name != "" && !old && slices.Contains(v.uuids, g.GPU) && !slices.Contains(names, name) {
			names = append(names, name) // those of another boot are gone
		}
	}
	return names
}

// beginStopUnwanted stops the unwanted daemons on partitions, because the partitions
// may be destroyed next. It only begins to stop those on whole GPUs: the next claim
// of such a GPU waits for their end. ending reports whether one still runs.
func (v *visit) beginStopUnwanted(ctx context.Context, names []string) (ending bool, err error) {
	names = v.unwanted(names)
	var errs []error
	for _, name := range names {
		ended, err := v.m.stop(ctx, name, v.m.isOnPartition(name))
		ending = ending || !ended
		errs = append(errs, err)
	}
	v.rereadNeeds(names)
	return ending, errors.Join(errs...)
}

// isOnPartition reports whether a daemon runs, or may run, on a MIG partition.
func (m *Manager) isOnPartition(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.watch.found[name]
	return !ok || len(s.Devices) == 0 || !s.Devices[0].IsWhole()
}

// tidy applies the settings that claims need, and schedules the daemons of the GPUs that
// aren't as claims need them. The settings wait for the end of daemons that no claim
// needs.
func (v *visit) tidy(ctx context.Context) error {
	if names := v.unwanted(nil); len(names) > 0 {
		v.m.schedule(names...)
		return nil
	}
	for name, w := range v.needs.daemons {
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
	for name, s := range v.m.watch.found {
		if v.m.isOn(s.Daemon, v.uuids...) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return slices.DeleteFunc(names, v.needs.wants)
}

// stopUnwanted stops the unwanted daemons on the GPUs.
func (v *visit) stopUnwanted(ctx context.Context) error {
	names := v.unwanted(nil)
	err := v.m.stopAll(ctx, names)
	v.rereadNeeds(names)
	return err
}

// stopAll stops daemons that no claim needs, at the same time.
func (m *Manager) stopAll(ctx context.Context, names []string) error {
	return agenda.Each(names, func(name string) error {
		_, err := m.stop(ctx, name, true)
		return err
	})
}

// rereadNeeds reads them again after daemons were to be stopped: a claim may have come since the
// visit began, and kept one of them.
func (v *visit) rereadNeeds(daemons []string) {
	if len(daemons) > 0 {
		v.needs = v.m.readNeeds()
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
	have, ok := v.m.watch.found[name]
	return !ok || !slices.Equal(have.Devices, want.Devices) || !mps.EqualLimits(have.Daemon, want)
}
