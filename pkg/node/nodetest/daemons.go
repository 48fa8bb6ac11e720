package nodetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/tessera-dra/tessera/pkg/mps"
)

// Daemons is an MPS supervisor whose daemons are entries in memory, and
// directories. Its methods are those of *mps.Client.
type Daemons struct {
	// Dir has a directory for each daemon. It is a path of the fake host, which is
	// at Host.
	Host, Dir string

	mu       sync.Mutex
	away     bool
	fault    func(call, daemon string) error
	revision mps.Revision
	all      map[string]mps.State
	watchers map[chan struct{}]bool
}

// NewDaemons returns a supervisor without daemons.
func NewDaemons(host, dir string) *Daemons {
	return &Daemons{Host: host, Dir: dir, revision: 1, all: map[string]mps.State{}, watchers: map[chan struct{}]bool{}}
}

// SetAway makes the supervisor stop answering, or answer again.
func (d *Daemons) SetAway(away bool) { _ = d.change(func() error { d.away = away; return nil }) }

// SetFault makes f, which may be nil, be asked before each Ensure ("ensure") and each stop
// ("stop") of a daemon; an error is the supervisor's answer.
func (d *Daemons) SetFault(f func(call, daemon string) error) {
	_ = d.change(func() error { d.fault = f; return nil })
}

// SetState replaces the state of a daemon.
func (d *Daemons) SetState(s mps.State) { _ = d.change(func() error { d.all[s.Name] = s; return nil }) }

// Reboot ends all daemons, and removes their directories.
func (d *Daemons) Reboot() error {
	return d.change(func() error {
		clear(d.all)
		return os.RemoveAll(filepath.Join(d.Host, d.Dir))
	})
}

// CopyTo starts the same daemons at another supervisor, in directories of its own.
func (d *Daemons) CopyTo(other *Daemons) error {
	d.mu.Lock()
	all := maps.Clone(d.all)
	d.mu.Unlock()
	for _, s := range all {
		if _, err := other.Ensure(context.Background(), s.Daemon); err != nil {
			return err
		}
	}
	return nil
}

// Ensure starts the daemon, or replaces its settings.
func (d *Daemons) Ensure(_ context.Context, want mps.Daemon) (mps.State, error) {
	if err := errors.Join(want.Validate(), d.asked("ensure", want.Name)); err != nil {
		return mps.State{}, err
	}
	s := mps.State{Daemon: want, PID: 1, PipeDir: filepath.Join(d.Dir, want.Name, "pipe"), Phase: mps.Running}
	err := d.change(func() error {
		if d.away {
			return mps.ErrUnavailable
		}
		s.Revision = d.revision
		d.all[want.Name] = s
		return os.MkdirAll(filepath.Join(d.Host, s.PipeDir), 0o755)
	})
	return s, err
}

// Stop stops the daemon.
func (d *Daemons) Stop(_ context.Context, name string) (mps.Revision, error) {
	if err := d.asked("stop", name); err != nil {
		return 0, err
	}
	var revision mps.Revision
	err := d.change(func() error {
		if d.away {
			return mps.ErrUnavailable
		}
		revision = d.revision
		delete(d.all, name)
		return os.RemoveAll(filepath.Join(d.Host, d.Dir, name))
	})
	return revision, err
}

// BeginStop stops the daemon.
func (d *Daemons) BeginStop(ctx context.Context, name string) (ended bool, revision mps.Revision, err error) {
	revision, err = d.Stop(ctx, name)
	return err == nil, revision, err
}

// List returns all daemons.
func (d *Daemons) List(context.Context) (mps.Report, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.away {
		return mps.Report{}, mps.ErrUnavailable
	}
	report := mps.Report{Revision: d.revision}
	for _, name := range slices.Sorted(maps.Keys(d.all)) {
		report.Daemons = append(report.Daemons, d.all[name])
	}
	return report, nil
}

// Watch calls f with all daemons, at once and after each change.
func (d *Daemons) Watch(ctx context.Context, f func(mps.Report)) error {
	changed := make(chan struct{}, 1)
	d.mu.Lock()
	d.watchers[changed] = true
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.watchers, changed)
	}()
	for {
		report, err := d.List(ctx)
		if err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		f(report)
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Left returns the names of the daemons that have a directory.
func (d *Daemons) Left() ([]string, error) {
	return mps.RunDir(filepath.Join(d.Host, filepath.Dir(d.Dir))).Names()
}

// asked returns the fault of a call. It doesn't hold the lock meanwhile.
func (d *Daemons) asked(call, daemon string) error {
	d.mu.Lock()
	fault := d.fault
	d.mu.Unlock()
	if fault == nil {
		return nil
	}
	return fault(call, daemon)
}

func (d *Daemons) change(f func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.revision++
	err := f()
	for w := range d.watchers {
		select {
		case w <- struct{}{}:
		default:
		}
	}
	return err
}
