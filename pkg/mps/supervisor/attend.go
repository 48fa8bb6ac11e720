package supervisor

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/mps"
)

const (
	// attendEvery is how often a daemon whose server runs is asked for it.
	attendEvery = time.Minute
	// attendFirst and attendLast bound the delay before a daemon that has no server is
	// asked for one again; it doubles in between. It starts over with a new daemon, and
	// after a server that has lived for twice attendLast.
	attendFirst = 250 * time.Millisecond
	attendLast  = 30 * time.Second
	// troubleFrom is the failure in a row from which on there is trouble, and
	// replaceFrom that from which on a daemon that has no server is replaced: 4 and 8
	// seconds after the first. A server can't start at first while its GPU is kept closed
	// after a daemon's death.
	troubleFrom = 5
	replaceFrom = 6
)

// attend sets a running daemon's limits and keeps a server running that accepts
// clients, until ctx ends. It never kills a daemon because it doesn't answer: its
// clients may still compute. State.Trouble has the reason.
func (s *Supervisor) attend(ctx context.Context, r mps.Record) {
	name, failures := r.Daemon.Name, 0
	for ctx.Err() == nil {
		began := time.Now()
		pid, err := s.attendOnce(ctx, name)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			failures = 0
			s.serves(ctx, name, pid)
			if !s.awaitServerExit(ctx, name, pid) {
				continue
			}
		} else {
			failures++
			s.troubled(ctx, name, err, failures >= troubleFrom || time.Since(began) >= answerTime)
			if failures >= replaceFrom && s.replace(ctx, r) {
				return
			}
		}
		s.attention.Next(name, s.attention.Clock.Now())
		select {
		case <-time.After(s.attention.Get(name)):
		case <-ctx.Done():
		}
	}
}

func (s *Supervisor) attendOnce(ctx context.Context, name string) (server int, err error) {
	if err := s.setLimits(ctx, name); err != nil {
		return 0, err
	}
	return s.driver.serve(ctx, s.cfg.place(name))
}

// setLimits sets an adopted daemon's limits, and then admits clients.
func (s *Supervisor) setLimits(ctx context.Context, name string) error {
	unlock, err := s.locks.Lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	d, ok := s.get(name)
	if !ok || !d.unsure || ctx.Err() != nil {
		return ctx.Err()
	}
	short, cancel := context.WithTimeout(ctx, answerTime) // somebody may want to stop it
	defer cancel()
	at := s.cfg.place(name)
	if err := s.driver.change(short, d.record.Daemon, at); err != nil {
		return err
	}
	if err := at.admit(); err != nil {
		return err
	}
	s.cfg.Steps.Reached("adopt.limited")
	s.set(name, func(d *daemon) { d.unsure = false })
	return nil
}

// serves records that the daemon has a server that accepts clients.
func (s *Supervisor) serves(ctx context.Context, name string, server int) {
	d, ok := s.get(name)
	if !ok || d.server == server && d.trouble == "" {
		return
	}
	klog.FromContext(ctx).Info("MPS server takes clients", "daemon", name, "server", server)
	s.set(name, func(d *daemon) { d.server, d.trouble = server, "" })
}

// troubled records that the daemon has no server that accepts clients and, if
// lasts is set, why. The first reason stays until there is such a server.
func (s *Supervisor) troubled(ctx context.Context, name string, err error, lasts bool) {
	d, ok := s.get(name)
	news := lasts && d.trouble == ""
	if !ok || d.server == 0 && !news {
		return
	}
	if news {
		klog.FromContext(ctx).Error(err, "MPS daemon runs and takes no clients", "daemon", name)
	}
	s.set(name, func(d *daemon) {
		if d.server = 0; news {
			d.trouble = err.Error()
		}
	})
}

// awaitServerExit returns when the server has ended, or after a while. It reports whether
// the server has ended.
func (s *Supervisor) awaitServerExit(ctx context.Context, name string, pid int) bool {
	ctx, cancel := context.WithTimeout(ctx, attendEvery)
	defer cancel()
	start, ok := startOf(pid)
	if !ok {
		return true
	}
	err := awaitExit(ctx, pid, start)
	if err == nil {
		klog.FromContext(ctx).Info("MPS server ended, its clients have failed", "daemon", name, "server", pid)
	} else if ctx.Err() == nil {
		<-ctx.Done() // it can't be watched
	}
	return err == nil
}

// replace restarts a control daemon that has no server. It does nothing if there
// is a server, because that may have clients.
func (s *Supervisor) replace(ctx context.Context, r mps.Record) bool {
	name := r.Daemon.Name
	unlock, err := s.locks.Lock(ctx, name)
	if err != nil {
		return false
	}
	defer unlock()
	d, ok := s.get(name)
	if !ok || d.record.PID != r.PID || d.record.Start != r.Start || d.phase != mps.Running {
		return false
	}
	others := slices.DeleteFunc(users(s.cfg.place(name).pipe()), func(p process) bool { return p.pid == r.PID })
	if len(others) > 0 {
		return false
	}
	klog.FromContext(ctx).Info("MPS daemon gets no server and is started again", "daemon", name, "pid", r.PID)
	return process{r.PID, r.Start}.kill() == nil // died starts it again
}
