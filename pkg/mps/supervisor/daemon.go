package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/files"
	"github.com/tessera-dra/tessera/pkg/mps"
)

const (
	// startTime is the most that a daemon may take to start.
	startTime = 20 * time.Second
	// quitTime bounds the wait for a daemon and its clients to end by themselves,
	// killTime the wait after they were killed.
	quitTime = 2500 * time.Millisecond
	killTime = 2 * time.Second
	// answerQuitTime bounds the wait for a daemon's answer to the request to end, which
	// may take a second if it has clients. A daemon that hasn't ended quitAgain after
	// that is asked again.
	answerQuitTime = 1200 * time.Millisecond
	quitAgain      = 500 * time.Millisecond
	// emptyTime bounds the wait for ended processes to leave their cgroups.
	emptyTime = 500 * time.Millisecond
	// restartFirst and restartLast bound the delay before the second restart in a row
	// and later ones; it doubles in between.
	restartFirst = time.Second
	restartLast  = 30 * time.Second
)

// ensure is Client.Ensure, with the name's lock held.
func (s *Supervisor) ensure(ctx context.Context, want mps.Daemon) error {
	d, ok := s.get(want.Name)
	if ok && !slices.Equal(d.record.Daemon.Devices, want.Devices) {
		if err := s.stop(ctx, want.Name, func() {}); err != nil {
			return err
		}
		d, ok = daemon{}, false
	}
	switch {
	case !ok:
		return s.startFirst(ctx, want)
	case d.phase != mps.Running || !alive(d.record.PID, d.record.Start):
		return s.restart(ctx, want)
	case !mps.EqualLimits(d.record.Daemon, want):
		return s.changeLimits(ctx, d.record, want)
	case !d.unsure:
		return nil
	default:
		err := s.changeLimits(ctx, d.record, want)
		if isAway(err) { // it was started with these, and there is no program to ask it
			return nil
		}
		return err
	}
}

// changeLimits gives the new limits to a daemon that runs. The record comes
// first: whoever adopts the daemon gives it the same.
func (s *Supervisor) changeLimits(ctx context.Context, r mps.Record, want mps.Daemon) error {
	if len(want.MemoryMiB) < len(r.Daemon.MemoryMiB) { // lift the limits that are no longer wanted
		want.MemoryMiB = append(slices.Clone(want.MemoryMiB), make([]int64, len(r.Daemon.MemoryMiB)-len(want.MemoryMiB))...)
	}
	r.Daemon = want
	at := s.cfg.place(want.Name)
	if err := writeRecord(at.record(), r); err != nil {
		return err
	}
	s.cfg.Steps.Reached("change.recorded")
	if err := s.driver.change(ctx, want, at); err != nil {
		return fmt.Errorf("set its limits: %w", err)
	}
	s.cfg.Steps.Reached("change.set")
	s.set(want.Name, func(d *daemon) { d.record, d.unsure = r, false })
	return nil
}

// startFirst starts a daemon that there was none of; nothing is left if it can't
// be.
func (s *Supervisor) startFirst(ctx context.Context, want mps.Daemon) error {
	err := s.start(ctx, mps.Record{Daemon: want})
	if err == nil {
		return nil
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), quitTime+killTime)
	defer cancel()
	return errors.Join(err, s.remove(clean, want.Name))
}

// restart starts a daemon again that has ended, or could not be started again
// before. It stays on the list if it can't be.
func (s *Supervisor) restart(ctx context.Context, want mps.Daemon) error {
	d, _ := s.get(want.Name)
	d.unwatch()
	s.metrics.restarts.Inc()
	r := mps.Record{Daemon: want, Restarts: d.record.Restarts + 1}
	err := s.start(ctx, r)
	if err != nil {
		s.set(want.Name, func(d *daemon) {
			d.record, d.phase, d.message = r, mps.Failed, err.Error()
		})
		s.keepTrying(ctx, want.Name)
	}
	return err
}

// start starts the daemon in a directory that it makes clean. On failure its
// processes are gone.
func (s *Supervisor) start(ctx context.Context, r mps.Record) error {
	name := r.Daemon.Name
	s.set(name, func(d *daemon) { d.record, d.phase, d.message, d.server, d.unsure = r, mps.Starting, "", 0, false })
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	at, watch := s.cfg.place(name), s.metrics.stopwatch()
	err := s.launch(ctx, &r, at, watch)
	if err == nil {
		err = s.driver.limits(ctx, r.Daemon, at)
	}
	if err == nil {
		watch.done("limits")
		s.cfg.Steps.Reached("start.limited")
		err = at.admit() // not before it has its limits
	}
	if err == nil {
		watch.done("admit")
		s.cfg.Steps.Reached("start.admitted")
		s.running(ctx, r)
		return nil
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	return errors.Join(err, killUsers(clean, at.pipe()))
}

// launch starts the daemon and records its process.
func (s *Supervisor) launch(ctx context.Context, r *mps.Record, at place, watch *stopwatch) error {
	fresh, err := s.makePlace(at, r.Daemon.Name)
	if err != nil {
		return err
	}
	s.cfg.Steps.Reached("start.made")
	if err := writeRecord(at.record(), *r); err != nil {
		return err
	}
	watch.done("record")
	s.cfg.Steps.Reached("start.recorded")
	if !fresh {
		if err := killUsers(ctx, at.pipe()); err != nil {
			return err
		}
	}
	if err := clean(s.cfg.HostRoot, at); err != nil {
		return err
	}
	watch.done("clean")
	s.cfg.Steps.Reached("start.cleaned")
	pid, err := s.driver.start(ctx, r.Daemon, at)
	if err != nil {
		return err
	}
	watch.done("launch")
	s.cfg.Steps.Reached("start.launched")
	start, ok := startOf(pid)
	if !ok {
		return withLog(fmt.Errorf("%w: it ended as soon as it had started", errNotStarted), at)
	}
	r.PID, r.Start, r.BootID = pid, start, s.boot
	if err := writeRecord(at.record(), *r); err != nil {
		return err
	}
	s.cfg.Steps.Reached("start.known")
	return nil
}

// makePlace makes the daemon's directory. fresh says that no process of an earlier
// daemon can be there: then none is looked for among all processes of the host.
func (s *Supervisor) makePlace(at place, name string) (fresh bool, err error) {
	if err := os.MkdirAll(filepath.Dir(string(at)), 0o755); err != nil {
		return false, fmt.Errorf("make the daemon's directory: %w", err)
	}
	err = os.Mkdir(string(at), 0o755)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return false, fmt.Errorf("make the daemon's directory: %w", err)
	}
	return err == nil && !s.hasGroup(name), nil
}

// clean empties the directories for the next daemon, and labels them so that containers may
// use them also where SELinux confines these.
func clean(hostRoot string, at place) error {
	// Containers mount clients and shm. The sockets in clients are links to those in pipe,
	// whose label they have from that directory.
	used := []string{at.clients(), at.pipe(), at.shm()}
	for _, dir := range used {
		if err := empty(dir); err != nil {
			return fmt.Errorf("clean up after an earlier daemon: %w", err)
		}
	}
	for dir, mode := range map[string]fs.FileMode{
		at.pipe(): 0o755, at.clients(): 0o755, at.log(): 0o755, at.shm(): 0o777 | fs.ModeSticky,
	} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make the daemon's directories: %w", err)
		}
		if err := os.Chmod(dir, mode); err != nil {
			return fmt.Errorf("make the daemon's directories: %w", err)
		}
	}
	if err := errors.Join(at.mountShm(), at.shorten(0)); err != nil {
		return err
	}
	for _, dir := range used {
		if err := labelForContainers(hostRoot, dir, unix.Setxattr); err != nil {
			return err
		}
	}
	return nil
}

// empty removes the contents of a directory, but not the directory: containers of
// clients have it mounted, and find the next daemon there.
func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(dir + "/" + e.Name()); err != nil {
			return err
		}
	}
	return nil
}

// running notes that the daemon runs, watches over its process, and sees to its
// server.
func (s *Supervisor) running(ctx context.Context, r mps.Record) {
	name := r.Daemon.Name
	watching, cancel := s.outlive(ctx)
	s.set(name, func(d *daemon) {
		d.unwatch()
		d.record, d.phase, d.message, d.unwatch = r, mps.Running, "", cancel
	})
	s.attention.Reset(name)
	klog.FromContext(ctx).Info("MPS daemon runs", "devices", r.Daemon.Devices, "pid", r.PID, "restarts", r.Restarts)
	s.tasks.Go(func() {
		defer cancel()
		if err := awaitExit(watching, r.PID, r.Start); err != nil {
			if watching.Err() == nil {
				klog.FromContext(ctx).Error(err, "Can't watch an MPS daemon")
			}
			return
		}
		s.died(watching, name, r)
	})
	s.tasks.Go(func() { s.attend(watching, r) })
}

// died records that the daemon has ended without a request, and restarts it.
func (s *Supervisor) died(ctx context.Context, name string, r mps.Record) {
	unlock, err := s.locks.Lock(ctx, name)
	if err != nil {
		return // it isn't watched any more
	}
	defer unlock()
	if d, ok := s.get(name); !ok || d.record.PID != r.PID || d.record.Start != r.Start || d.phase != mps.Running {
		return
	}
	klog.FromContext(ctx).Info("MPS daemon died, its clients have failed", "pid", r.PID, "log", tail(s.cfg.place(name).log()+"/control.log"))
	s.set(name, func(d *daemon) {
		d.phase, d.message, d.server = mps.Starting, "the control daemon ended by itself", 0
		d.record.PID, d.record.Start = 0, 0
	})
	s.keepTrying(ctx, name)
}

// keepTrying starts a daemon again, beside the calls, until it runs or isn't
// wanted any more. The name's lock is held.
func (s *Supervisor) keepTrying(ctx context.Context, name string) {
	delay := s.nextDelay(name)
	trying, cancel := s.outlive(ctx)
	s.set(name, func(d *daemon) { d.unwatch = cancel })
	s.tasks.Go(func() {
		defer cancel()
		timer := time.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-trying.Done():
			return
		}
		unlock, err := s.locks.Lock(trying, name)
		if err != nil {
			return
		}
		defer unlock()
		d, ok := s.get(name)
		if trying.Err() != nil || !ok {
			return
		}
		if err := s.restart(context.WithoutCancel(trying), d.record.Daemon); err != nil {
			klog.FromContext(ctx).Error(err, "MPS daemon could not be started again, trying again")
		}
	})
}

// stop implements Client.Stop; the name's lock is held. It calls begun once the
// record says that the daemon is to be stopped, so that a crash doesn't undo it.
func (s *Supervisor) stop(ctx context.Context, name string, begun func()) error {
	at := s.cfg.place(name)
	if d, ok := s.get(name); ok {
		d.unwatch()
		again := d.record.Stopping && d.phase == mps.Failed // that is no news, or each failure would be two
		d.record.Stopping = true
		err := writeRecord(at.record(), d.record)
		s.set(name, func(one *daemon) {
			one.record, one.trouble, one.server = d.record, "", 0
			if !again {
				one.phase, one.message = mps.Ending, ""
			}
		})
		switch {
		case err == nil:
			s.cfg.Steps.Reached("stop.recorded")
			begun()
		case !errors.Is(err, fs.ErrNotExist):
			// Where there is no room left, stopping makes some. After a crash now the daemon
			// is adopted, and whoever asked asks again.
			klog.FromContext(ctx).Error(err, "Can't note that an MPS daemon is being stopped")
		}
	}
	if err := s.remove(ctx, name); err != nil {
		s.set(name, func(d *daemon) { d.record.Daemon.Name, d.phase, d.message = name, mps.Failed, err.Error() })
		return err
	}
	if err := files.RemoveIfThere(at.aside()); err != nil {
		return fmt.Errorf("remove what the daemon had: %w", err)
	}
	return nil
}

// remove ends a daemon, known or not, and removes all that is its own, except
// an unreadable record that was renamed.
func (s *Supervisor) remove(ctx context.Context, name string) error {
	at, watch := s.cfg.place(name), s.metrics.stopwatch()
	if err := s.end(ctx, name); err != nil {
		return err
	}
	watch.done("end")
	s.cfg.Steps.Reached("stop.ended")
	all, err := hostGroups()
	if err != nil && !errors.Is(err, errNoPod) { // then none was made
		return err
	}
	emptied, cancel := context.WithTimeout(context.WithoutCancel(ctx), emptyTime)
	defer cancel()
	if err := removeGroups(emptied, all, name); err != nil {
		return err
	}
	s.cfg.Steps.Reached("stop.ungrouped")
	if err := at.unmountShm(); err != nil {
		return err
	}
	if err := os.RemoveAll(string(at)); err != nil {
		return fmt.Errorf("remove what the daemon had: %w", err)
	}
	s.driver.unfurnish(at)
	watch.done("remove")
	s.cfg.Steps.Reached("stop.removed")
	s.forget(name)
	return nil
}

// end ends the processes of a daemon: those that work end by themselves, the
// others are killed.
func (s *Supervisor) end(ctx context.Context, name string) error {
	at := s.cfg.place(name)
	if found := users(at.pipe()); len(found) > 0 && !s.quit(ctx, at, found) {
		klog.FromContext(ctx).Info("MPS daemon doesn't end by itself and is killed", "daemon", name, "log", tail(at.log()+"/control.log"))
	}
	hard, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	err := killUsers(hard, at.pipe())
	if d, ok := s.get(name); ok && alive(d.record.PID, d.record.Start) { // somebody has removed its directory
		err = errors.Join(err, kill(hard, []process{{d.record.PID, d.record.Start}}))
	}
	return err
}

// quit asks the daemon to end until all of its processes have ended, and reports
// whether they have. A daemon that is asked while its server starts may miss it.
func (s *Supervisor) quit(ctx context.Context, at place, all []process) bool {
	ctx, cancel := context.WithTimeout(ctx, quitTime)
	defer cancel()
	for ctx.Err() == nil {
		listens := s.driver.quit(ctx, at)
		if haveEnded(ctx, all, quitAgain) {
			return true
		}
		if !listens { // nor will it; a server whose daemon has ended just now is ending too
			return slices.ContainsFunc(all, process.ended) && haveEnded(ctx, all, quitTime)
		}
	}
	return false
}

// haveEnded reports whether the processes end within the time.
func haveEnded(ctx context.Context, all []process, within time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for _, p := range all {
		if awaitExit(ctx, p.pid, p.start) != nil {
			return false
		}
	}
	return true
}
