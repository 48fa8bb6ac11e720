package sharing

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Leave takes down everything that no claim needs on the GPUs of a record that is
// leaving (holding.Leaving). When it returns nil, no process of an MPS daemon
// that only leaving claims had is left on their partitions. Of one on whole GPUs
// the end has begun; Run puts the compute mode back after it, and Join and
// AwaitDaemonEnds wait for it. Idempotent. A setting that can't be put back now is put
// back later.
func (m *Manager) Leave(ctx context.Context, r holding.Record) error {
	m.joined.Delete(r.ClaimUID)
	groups := m.groups(r)
	if len(r.Holdings) == 0 { // it can't be read
		groups = nil
		for uuid := range m.unsettledGPUs() {
			groups = append(groups, []gpu.UUID{uuid})
		}
	}
	errs := make([]error, len(groups))
	var wg sync.WaitGroup
	for i, uuids := range groups {
		wg.Go(func() {
			errs[i] = m.withGPUs(ctx, uuids, func(v *visit) error { return v.leave(ctx, r) })
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// AwaitDaemonEnds returns when no daemon is on the GPU as a whole any more that no claim
// needs.
func (m *Manager) AwaitDaemonEnds(ctx context.Context, uuid gpu.UUID) error {
	if err := m.knowRemains(ctx, uuid); err != nil {
		return err
	}
	p := m.planNow()
	m.mu.Lock()
	var ending bool
	for name, s := range m.found {
		ending = ending || !p.wants(name) && slices.Contains(s.Devices, uuid)
	}
	m.mu.Unlock()
	if !ending {
		return nil
	}
	return m.withGPUs(ctx, []gpu.UUID{uuid}, func(v *visit) error { return v.stopUnwanted(ctx) })
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
		if v.plan.daemons[name] == nil {
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
		if v.m.isOnPartition(name) {
			errs = append(errs, v.m.stop(ctx, name))
			continue
		}
		ended, err := v.m.beginStop(ctx, name, v.uuids)
		ending = ending || !ended
		errs = append(errs, err)
	}
	v.replan(names)
	return ending, errors.Join(errs...)
}

// beginStop begins to stop a daemon on whole GPUs, unless a claim needs it by now.
// ended reports whether it has ended already.
func (m *Manager) beginStop(ctx context.Context, name string, on []gpu.UUID) (ended bool, err error) {
	unlock, err := m.daemonLocks.Lock(ctx, name)
	if err != nil {
		return false, fmt.Errorf("wait for another operation on MPS daemon %s: %w", name, err)
	}
	defer unlock()
	if p := m.planNow(); p.wants(name) {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	var revision mps.Revision
	err = m.call("beginStop", func() (err error) {
		ended, revision, err = m.cfg.Daemons.BeginStop(ctx, name)
		return err
	})
	if err != nil && !m.nothingRemains(err, name) {
		return false, err
	}
	if ended = ended || err != nil; ended {
		m.sawGone(name, revision)
		m.cfg.Step("sharing.stopped")
		return true, nil
	}
	m.sawEnding(name, revision, on)
	m.cfg.Step("sharing.stopBegun")
	klog.FromContext(ctx).V(2).Info("MPS daemon is being stopped", "daemon", name)
	return false, nil
}

// isOnPartition reports whether a daemon runs, or may run, on a MIG partition.
func (m *Manager) isOnPartition(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.found[name]
	return !ok || len(s.Devices) == 0 || !s.Devices[0].IsWhole()
}
