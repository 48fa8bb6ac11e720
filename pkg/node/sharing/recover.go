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

// saw stores the daemons that the supervisor has reported, which are all. A report
// may arrive after newer ones, and after replies that are newer.
func (m *Manager) saw(report mps.Report) {
	p := m.planNow()
	var was map[string]mps.State
	m.change(func() {
		first := !m.listed
		was = maps.Clone(m.found)
		m.listed, m.current = true, true
		m.merge(report)
		m.trackAll(&p, was, first)
	})
	m.planClosures(&p)
	m.warn(&p, was)
}

// merge stores a report, except the daemons of which something newer is known. Needs
// the lock.
func (m *Manager) merge(report mps.Report) {
	if report.Revision != 0 && report.Revision < m.reported {
		return
	}
	known := func(name string) bool { return report.Revision != 0 && report.Revision < m.replied[name] }
	maps.DeleteFunc(m.replied, func(name string, _ mps.Revision) bool { return !known(name) })
	maps.DeleteFunc(m.found, func(name string, _ mps.State) bool { return !known(name) })
	for _, s := range report.Daemons {
		if !known(s.Name) {
			m.found[s.Name] = s
		}
	}
	m.reported = report.Revision
}

// isNews notes the revision of a reply about a daemon, and reports whether no report of
// all daemons is newer. Needs the lock.
func (m *Manager) isNews(name string, revision mps.Revision) bool {
	if revision != 0 && revision < m.reported {
		return false
	}
	m.replied[name] = revision
	return true
}

// sawGone stores that a daemon is gone.
func (m *Manager) sawGone(name string, revision mps.Revision) {
	m.change(func() {
		if m.isNews(name, revision) {
			delete(m.found, name)
		}
	})
}

// sawEnding stores that a daemon is being stopped. If its devices aren't known, it may
// be on the GPUs.
func (m *Manager) sawEnding(name string, revision mps.Revision, on []gpu.UUID) {
	m.change(func() {
		if !m.isNews(name, revision) {
			return
		}
		s := m.found[name]
		s.Name, s.Phase = name, mps.Ending
		if len(s.Devices) == 0 {
			s.Devices = on
		}
		m.found[name] = s
	})
}

// sawOne stores the state that the supervisor has replied of one daemon.
func (m *Manager) sawOne(name string, s mps.State) {
	p := m.planNow()
	var was mps.State
	m.change(func() {
		was = m.found[name]
		if !m.isNews(name, s.Revision) {
			return
		}
		if m.cfg.ExclusiveProcess && p.hasWholeOf(name) {
			m.track(name, was, s)
		}
		m.found[name] = s
	})
	m.planClosures(&p)
	m.warn(&p, map[string]mps.State{name: was})
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
