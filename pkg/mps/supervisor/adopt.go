package supervisor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/mps"
)

// adopt takes over the daemon whose directory was found at the start. Repairs
// that take longer continue in the background.
func (s *Supervisor) adopt(ctx context.Context, name string) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "daemon", name)
	ctx = klog.NewContext(ctx, logger)
	unlock, err := s.locks.Lock(ctx, name)
	if err != nil {
		return
	}
	defer unlock()
	r, err := s.cfg.runDir().ReadRecord(name)
	if errors.Is(err, fs.ErrNotExist) {
		logger.Info("Removing the directory of an MPS daemon that was never started")
		s.discard(ctx, name)
		return
	}
	if err != nil {
		s.abandon(ctx, name, err)
		return
	}
	if r.Stopping {
		logger.Info("MPS daemon was being stopped")
		s.discard(ctx, name)
		return
	}
	if found, ok := s.recognise(r); ok {
		s.takeOver(ctx, found)
		return
	}
	if r.PID == 0 && r.Restarts == 0 {
		logger.Info("Removing an MPS daemon that was not started completely, it has no clients")
		s.discard(ctx, name)
		return
	}
	logger.Info("MPS daemon died while there was no supervisor", "pid", r.PID)
	s.revive(ctx, r, "the control daemon ended while there was no supervisor")
}

// revive has a daemon started again beside the calls.
func (s *Supervisor) revive(ctx context.Context, r mps.Record, why string) {
	r.PID, r.Start = 0, 0
	s.set(r.Daemon.Name, func(d *daemon) { d.record, d.phase, d.message = r, mps.Starting, why })
	s.keepTrying(ctx, r.Daemon.Name)
}

// takeOver adopts a running daemon. It checks only that the process is the recorded
// one: the daemon may be slow to answer while its clients compute. The daemon's
// limits are set again in the background, because the supervisor may have crashed
// before it set them.
func (s *Supervisor) takeOver(ctx context.Context, r mps.Record) {
	at := s.cfg.place(r.Daemon.Name)
	if err := writeRecord(at.record(), r); err != nil {
		klog.FromContext(ctx).Error(err, "MPS daemon runs, and its record can't be written", "pid", r.PID)
	}
	for _, p := range users(at.pipe()) { // the daemon and its server
		protect(p.pid) // the supervisor may have crashed before it did
	}
	s.cfg.Steps.Reached("adopt.known")
	s.set(r.Daemon.Name, func(d *daemon) { d.unsure = true })
	s.running(ctx, r)
}

// abandon ends a daemon whose record can't be read. The record is kept
// beside the directory.
func (s *Supervisor) abandon(ctx context.Context, name string, why error) {
	at := s.cfg.place(name)
	logger := klog.FromContext(ctx)
	logger.Error(why, "MPS daemon is unknown and is stopped; its record is renamed", "to", at.aside())
	if err := os.Rename(at.record(), at.aside()); err != nil {
		logger.Error(err, "Can't rename the record of an MPS daemon")
		return
	}
	s.cfg.Steps.Reached("adopt.aside")
	s.discard(ctx, name)
}

// discard removes a daemon that no client wants. If it can't, the daemon is listed,
// so that it is stopped again.
func (s *Supervisor) discard(ctx context.Context, name string) {
	if err := s.remove(ctx, name); err != nil {
		klog.FromContext(ctx).Error(err, "Can't remove what is left of an MPS daemon")
		s.set(name, func(d *daemon) {
			d.record.Daemon.Name, d.phase, d.message = name, mps.Failed, err.Error()
		})
	}
}

// recognise reports whether the daemon of the record runs. If it was started and
// never written down, the record that is returned says which process it is.
func (s *Supervisor) recognise(r mps.Record) (mps.Record, bool) {
	at := s.cfg.place(r.Daemon.Name)
	if r.PID == 0 {
		data, err := os.ReadFile(at.pidFile())
		if err != nil {
			return r, false
		}
		pid, err := parsePID(data)
		found := users(at.pipe())
		i := slices.IndexFunc(found, func(p process) bool { return p.pid == pid })
		if err != nil || i < 0 {
			return r, false
		}
		r.PID, r.Start, r.BootID = pid, found[i].start, s.boot
	}
	return r, r.BootID == s.boot && alive(r.PID, r.Start)
}
