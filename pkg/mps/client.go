package mps

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/tessera-dra/tessera/pkg/mps/mpspb"
)

// ErrUnavailable says that no supervisor answers on this node.
var ErrUnavailable = errors.New("the MPS supervisor of this node does not answer: look at the node's pod of the DaemonSet tessera-mps")

// ErrDaemonFails says that the supervisor has run a daemon's program, and the daemon has not
// started, or takes no commands. The cause may be its devices.
var ErrDaemonFails = errors.New("the MPS daemon doesn't work")

// DaemonFails is the code of this error on the wire. Supervisors of earlier releases don't
// use it.
const DaemonFails = codes.Aborted

// Client asks the supervisor of the node. It may be used by several goroutines.
// Each call makes a connection, so a supervisor that was restarted is found at once.
type Client struct {
	socket string
}

// Dial returns a client of the supervisor at a unix socket, which needn't be
// there yet.
func Dial(socket string) (*Client, error) {
	if !filepath.IsAbs(socket) {
		return nil, fmt.Errorf("the MPS supervisor's socket %q is not an absolute path", socket)
	}
	return &Client{socket: socket}, nil
}

// Ensure starts the daemon, unless it runs, and sets its limits. Its MPS server may
// start a moment later; clients wait for it by themselves, and State.Trouble says
// if it doesn't start. A running daemon's limits are changed, and a daemon with
// other devices is stopped and started again. If a daemon of this name is being
// stopped, Ensure waits for its end. Idempotent.
//
// A daemon that can't be started is not kept; the error says why, and wraps ErrDaemonFails
// if its program was run. A supervisor that isn't there is waited for, since it may be
// starting: the kubelet's next try would come a minute later.
func (c *Client) Ensure(ctx context.Context, d Daemon) (State, error) {
	var state State
	err := c.call(ctx, patience, func(s mpspb.SupervisorClient) error {
		answer, err := s.Ensure(ctx, ToWire(d))
		state = StateFromWire(answer)
		return err
	})
	if err != nil {
		return State{}, fmt.Errorf("start the MPS daemon %s: %w", d.Name, err)
	}
	return state, nil
}

// Stop stops the daemon. When it returns nil, no process or file of it is left.
// Clients have a moment to end before they are killed; Stop takes at most 5 seconds.
// Idempotent. It returns the supervisor's revision at which the daemon was gone.
func (c *Client) Stop(ctx context.Context, name string) (Revision, error) {
	_, revision, err := c.stop(ctx, &mpspb.StopRequest{Name: name})
	return revision, err
}

// BeginStop is Stop without waiting for the daemon's end: it returns once the stop is
// recorded, so that it is completed even after a crash. Until then the daemon's
// phase is Ending. ended reports whether the daemon is gone already, revision since
// when it has been in that state.
func (c *Client) BeginStop(ctx context.Context, name string) (ended bool, revision Revision, err error) {
	return c.stop(ctx, &mpspb.StopRequest{Name: name, Background: true})
}

func (c *Client) stop(ctx context.Context, r *mpspb.StopRequest) (ended bool, revision Revision, err error) {
	var answer *mpspb.StopResponse
	err = c.call(ctx, 0, func(s mpspb.SupervisorClient) (err error) {
		answer, err = s.Stop(ctx, r)
		return err
	})
	if err != nil {
		return false, 0, fmt.Errorf("stop the MPS daemon %s: %w", r.GetName(), err)
	}
	return answer.GetEnded(), Revision(answer.GetRevision()), nil
}

// List returns all daemons.
func (c *Client) List(ctx context.Context) (Report, error) {
	var report Report
	err := c.call(ctx, 0, func(s mpspb.SupervisorClient) error {
		answer, err := s.List(ctx, &mpspb.ListRequest{})
		report = ReportFromWire(answer)
		return err
	})
	if err != nil {
		return Report{}, fmt.Errorf("list the MPS daemons: %w", err)
	}
	return report, nil
}

// Left returns the names of the daemons that have a directory, also while the supervisor
// doesn't answer: it makes the directory before it starts the daemon, and removes it when
// nothing of the daemon is left.
func (c *Client) Left() ([]string, error) {
	names, err := RunDirOf(c.socket).Names()
	if err != nil {
		return nil, fmt.Errorf("list the directories of MPS daemons: %w", err)
	}
	return names, nil
}

// Watch calls f with all daemons, at once and after each change; changes that
// follow in quick succession may be reported together. A report may arrive after the
// reply to a later call: compare their revisions. Watch returns
// ctx's error when that ends, and ErrUnavailable when the supervisor is gone.
func (c *Client) Watch(ctx context.Context, f func(Report)) error {
	err := c.call(ctx, 0, func(s mpspb.SupervisorClient) error {
		stream, err := s.Watch(ctx, &mpspb.ListRequest{})
		if err != nil {
			return err
		}
		for {
			answer, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return ErrUnavailable // it is being stopped
			}
			if err != nil {
				return err
			}
			f(ReportFromWire(answer))
		}
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("watch the MPS daemons: %w", err)
}

func (c *Client) connect(ctx context.Context, _ string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
}

const (
	// patience is how long a supervisor that isn't there is waited for.
	patience = 10 * time.Second
	// firstRetry and lastRetry are between two looks for it.
	firstRetry = 20 * time.Millisecond
	lastRetry  = 500 * time.Millisecond
)

// ready returns when the supervisor has answered, or won't any more.
func ready(ctx context.Context, conn *grpc.ClientConn, wait time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	conn.Connect()
	for s := conn.GetState(); s != connectivity.Ready; s = conn.GetState() {
		if !conn.WaitForStateChange(ctx, s) {
			return
		}
	}
}

// call connects for one call, waiting that long for somebody to answer, and says
// in our own words what went wrong.
func (c *Client) call(ctx context.Context, wait time.Duration, f func(mpspb.SupervisorClient) error) error {
	again := backoff.Config{BaseDelay: firstRetry, Multiplier: 1.6, Jitter: 0.2, MaxDelay: lastRetry}
	conn, err := grpc.NewClient("passthrough:///mps-supervisor", // the path may not be a URL
		grpc.WithContextDialer(c.connect), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: again, MinConnectTimeout: time.Second}))
	if err != nil {
		return fmt.Errorf("connect to %s: %w", c.socket, err)
	}
	defer conn.Close()
	if wait > 0 {
		ready(ctx, conn, wait)
	}
	err = f(mpspb.NewSupervisorClient(conn))
	if ctx.Err() != nil && err != nil {
		return ctx.Err()
	}
	s, ok := status.FromError(err)
	switch {
	case !ok || err == nil:
		return err
	case s.Code() == codes.Unavailable:
		return fmt.Errorf("%w (%s: %s)", ErrUnavailable, c.socket, s.Message())
	case s.Code() == DaemonFails:
		return fmt.Errorf("%w: %s", ErrDaemonFails, s.Message())
	default:
		return errors.New(s.Message())
	}
}
