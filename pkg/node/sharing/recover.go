package sharing

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// supervisorWithin bounds the wait for a supervisor that isn't needed just now.
const supervisorWithin = 5 * time.Second

// Recover stops daemons and restores settings that a crash has left and no claim
// needs, and deletes settings of other boots from the journal. The claims' Joins set
// up what claims need. It is called at the start and when a driver is found. A failure
// on one GPU doesn't affect others; Run retries it.
func (m *Manager) Recover(ctx context.Context) error {
	err := m.dropOld()
	if listErr := m.list(ctx); listErr != nil {
		if !m.needsSupervisor() {
			klog.FromContext(ctx).V(2).Info("No MPS supervisor, and nothing that needs one", "err", listErr)
		} else {
			err = errors.Join(err, listErr)
		}
	}
	return errors.Join(err, m.stopOrphans(ctx), m.tidyAll(ctx))
}

// LeaveHost takes down everything that no claim needs. It is called when the plugin
// ends and nothing is prepared. It restores settings also without a supervisor.
func (m *Manager) LeaveHost(ctx context.Context) error {
	if err := m.list(ctx); err != nil {
		if !m.nothingRemains(err) {
			klog.FromContext(ctx).Error(err, "MPS daemons that nobody needs may stay")
		}
		m.mu.Lock()
		m.listed = true // as far as can be known
		m.mu.Unlock()
	}
	return errors.Join(m.dropOld(), m.stopOrphans(ctx), m.tidyAll(ctx))
}

// dropOld deletes the settings of other boots: they ended with the boot.
func (m *Manager) dropOld() error {
	var errs []error
	for _, s := range m.cfg.Journal.AllSettings() {
		if s.BootID != m.cfg.BootID {
			errs = append(errs, m.cfg.Journal.DeleteSettings(s.GPU))
		}
	}
	return errors.Join(errs...)
}

// list asks the supervisor for all daemons.
func (m *Manager) list(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, supervisorWithin)
	defer cancel()
	var report mps.Report
	err := m.call("list", func() (err error) {
		report, err = m.cfg.Daemons.List(ctx)
		return err
	})
	if err == nil {
		m.saw(report)
	}
	return err
}

// needsSupervisor reports whether claims need daemons, or a GPU's compute mode shows
// that there may be one.
func (m *Manager) needsSupervisor() bool {
	p := m.planNow()
	return len(p.daemons) > 0 || slices.ContainsFunc(m.cfg.Journal.AllSettings(), func(s holding.Settings) bool { return s.ComputeModeBefore != "" })
}

// stopOrphans stops the daemons that no claim needs, and waits for the end of those
// that are being stopped.
func (m *Manager) stopOrphans(ctx context.Context) error {
	p := m.planNow()
	var orphans []string
	m.mu.Lock()
	for name := range m.found {
		if !p.wants(name) {
			orphans = append(orphans, name)
		}
	}
	m.mu.Unlock()
	return m.stopAll(ctx, orphans)
}

// stopAll stops daemons, at the same time.
func (m *Manager) stopAll(ctx context.Context, names []string) error {
	errs := make([]error, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() { errs[i] = m.stop(ctx, name) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// tidyAll calls tidy for all touched GPUs, concurrently.
func (m *Manager) tidyAll(ctx context.Context) error {
	uuids := slices.Collect(maps.Keys(m.unsettledGPUs()))
	return agenda.Each(uuids, func(uuid gpu.UUID) error { return m.tidy(ctx, uuid) })
}

// tidy applies what claims need to a GPU. A failure is scheduled for a retry.
func (m *Manager) tidy(ctx context.Context, uuid gpu.UUID) error {
	return m.worker.Try(uuid, func() error {
		p := m.planNow()
		return m.withGPUs(ctx, p.together(uuid), func(v *visit) error { return v.tidy(ctx) })
	})
}
