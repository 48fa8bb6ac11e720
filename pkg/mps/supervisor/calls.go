package supervisor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/mps/mpspb"
)

// calls serves the requests of a supervisor's clients.
type calls struct {
	mpspb.UnimplementedSupervisorServer

	s *Supervisor
}

// Ensure implements mpspb.SupervisorServer.
func (c *calls) Ensure(ctx context.Context, w *mpspb.Daemon) (*mpspb.State, error) {
	want := mps.FromWire(w)
	if err := want.Validate(); err != nil {
		return nil, err
	}
	var state mps.State
	done, err := c.s.work(ctx, "start", want.Name, func(ctx context.Context) error {
		if err := c.s.ensure(ctx, want); err != nil {
			return err
		}
		state = c.s.stateOf(want.Name)
		return nil
	})
	if err == nil {
		err = await(ctx, done)
	}
	switch {
	case errors.Is(err, errNotStarted), errors.Is(err, errNoDaemon):
		return nil, status.Error(mps.DaemonFails, err.Error())
	case err != nil:
		return nil, err
	}
	return mps.StateToWire(state), nil
}

// Stop implements mpspb.SupervisorServer.
func (c *calls) Stop(ctx context.Context, r *mpspb.StopRequest) (*mpspb.StopResponse, error) {
	name := r.GetName()
	if err := mps.ValidateName(name); err != nil {
		return nil, err
	}
	begun, ended := make(chan mps.Revision, 1), mps.Revision(0)
	done, err := c.s.work(ctx, "stop", name, func(ctx context.Context) error {
		err := c.s.stop(ctx, name, func() { begun <- c.s.now() })
		ended = c.s.now() // under the lock of the name: it isn't started again before
		return err
	})
	if err != nil {
		return nil, err
	}
	if r.GetBackground() {
		select {
		case revision := <-begun:
			return &mpspb.StopResponse{Revision: uint64(revision)}, nil
		case err = <-done:
		}
	} else {
		err = await(ctx, done)
	}
	if err != nil {
		return nil, err
	}
	return &mpspb.StopResponse{Ended: true, Revision: uint64(ended)}, nil
}

// List implements mpspb.SupervisorServer.
func (c *calls) List(context.Context, *mpspb.ListRequest) (*mpspb.States, error) {
	return mps.ReportToWire(c.s.list()), nil
}

// Watch implements mpspb.SupervisorServer.
func (c *calls) Watch(_ *mpspb.ListRequest, stream grpc.ServerStreamingServer[mpspb.States]) error {
	for {
		report, changed := c.s.watch()
		if err := stream.Send(mps.ReportToWire(report)); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-c.s.ended:
			return nil
		}
	}
}

// work starts a task on a daemon, under the lock of the daemon's name, and returns
// a channel for its result. The task continues when the caller's context ends; the
// next call finds its result.
func (s *Supervisor) work(ctx context.Context, verb, name string, f func(context.Context) error) (<-chan error, error) {
	logger := klog.LoggerWithValues(s.logger, "daemon", name)
	unlock, err := s.locks.Lock(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("wait for another operation on the MPS daemon: %w", err)
	}
	done := make(chan error, 1)
	s.tasks.Go(func() {
		defer unlock()
		began := time.Now()
		err := f(klog.NewContext(context.WithoutCancel(ctx), logger))
		s.metrics.observe(verb, began, err)
		if err != nil {
			logger.Error(err, "Can't serve a request for an MPS daemon", "verb", verb)
		}
		done <- err
	})
	return done, nil
}

func await(ctx context.Context, done <-chan error) error {
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("it is still being done: %w", ctx.Err())
	}
}

// isAway reports whether the error is that the driver, or its program for MPS, isn't
// installed.
func isAway(err error) bool {
	_, noProgram := errors.AsType[*driverroot.NoProgramError](err)
	_, noDriver := errors.AsType[*driverroot.NotFoundError](err)
	return noProgram || noDriver
}
