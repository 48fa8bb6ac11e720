package kubelet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"

	"github.com/tessera-dra/tessera/pkg/notify"
)

// settleWithin is how long calls in progress may take to end before they are
// interrupted for a handover, and the successor makes them again. New calls wait
// meanwhile.
const settleWithin = 300 * time.Millisecond

// errHandedOver interrupts a call that the successor makes again.
var errHandedOver = errors.New("another plugin takes over the node")

// gate decides whether this plugin or its successor handles the kubelet's calls.
type gate struct {
	mu notify.Mutex // of all below
	// running are the calls that this plugin handles.
	running map[*gated]bool
	// forwarded are the prepares that the successor handles, or will handle.
	forwarded map[*gated]bool
	// successor handles the calls; nil: this plugin does.
	successor *grpc.ClientConn
}

// gated is a call of the kubelet.
type gated struct {
	claims map[string]bool // by UID, of a prepare
	cancel context.CancelCauseFunc
}

// call has the parts of a request that the gate needs.
type call struct {
	// answer is an empty response of the request's type.
	answer    any
	unprepare bool
	claims    map[string]bool // by UID
}

// readCall returns false for requests that are always handled here.
func readCall(req any) (call, bool) {
	switch r := req.(type) {
	case *drapbv1.NodePrepareResourcesRequest:
		return call{&drapbv1.NodePrepareResourcesResponse{}, false, uids(r.GetClaims())}, true
	case *drapbv1.NodeUnprepareResourcesRequest:
		return call{&drapbv1.NodeUnprepareResourcesResponse{}, true, uids(r.GetClaims())}, true
	case *drapbv1beta1.NodePrepareResourcesRequest:
		return call{&drapbv1beta1.NodePrepareResourcesResponse{}, false, uids(r.GetClaims())}, true
	case *drapbv1beta1.NodeUnprepareResourcesRequest:
		return call{&drapbv1beta1.NodeUnprepareResourcesResponse{}, true, uids(r.GetClaims())}, true
	default:
		return call{}, false
	}
}

func uids[C interface{ GetUid() string }](claims []C) map[string]bool {
	all := make(map[string]bool, len(claims))
	for _, c := range claims {
		all[c.GetUid()] = true
	}
	return all
}

// handle is a gRPC interceptor that passes the kubelet's calls to the successor, once
// there is one. It passes on a call that was interrupted for that, too: preparing and
// unpreparing are idempotent, and an interrupted one is continued as after a crash.
func (g *gate) handle(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	c, ok := readCall(req)
	if !ok {
		return next(ctx, req)
	}
	if own, leave, ok := g.enter(ctx); ok {
		answer, err := next(own, req)
		interrupted := errors.Is(context.Cause(own), errHandedOver)
		leave()
		if !interrupted {
			return answer, err
		}
	}
	ctx, successor, leave := g.follow(ctx, c)
	defer leave()
	if err := successor.Invoke(ctx, info.FullMethod, req, c.answer, grpc.WaitForReady(true)); err != nil {
		return nil, err
	}
	return c.answer, nil
}

// enter returns false if the successor handles the call.
func (g *gate) enter(ctx context.Context) (_ context.Context, leave func(), ok bool) {
	ctx, cancel := context.WithCancelCause(ctx)
	one := &gated{cancel: cancel}
	g.mu.Change(func() {
		if ok = g.successor == nil; !ok {
			return
		}
		if g.running == nil {
			g.running = map[*gated]bool{}
		}
		g.running[one] = true
	})
	return ctx, func() {
		g.mu.Change(func() { delete(g.running, one) })
		cancel(nil)
	}, ok
}

// follow returns the successor, and the context for a call of it. An unprepare cancels
// prepares of its claims that came before: one that still waits for the successor must
// not reach it after the unprepare.
func (g *gate) follow(ctx context.Context, c call) (_ context.Context, successor *grpc.ClientConn, leave func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	one := &gated{claims: c.claims, cancel: cancel}
	g.mu.Change(func() {
		successor = g.successor
		if c.unprepare {
			g.cancelPrepares(c.claims)
			return
		}
		if g.forwarded == nil {
			g.forwarded = map[*gated]bool{}
		}
		g.forwarded[one] = true
	})
	return ctx, successor, func() {
		g.mu.Change(func() { delete(g.forwarded, one) })
		cancel(nil)
	}
}

// cancelPrepares needs the lock.
func (g *gate) cancelPrepares(claims map[string]bool) {
	for prepare := range g.forwarded {
		for uid := range claims {
			if prepare.claims[uid] {
				prepare.cancel(context.Canceled)
			}
		}
	}
}

// handOver passes all further calls to the plugin that will serve at the socket, and
// returns when this plugin handles none any more. Calls that don't end soon are
// interrupted and passed on.
func (g *gate) handOver(ctx context.Context, socket string) error {
	successor, err := dialSuccessor(socket)
	if err != nil {
		return err
	}
	g.mu.Change(func() { g.successor = successor })
	soon, cancel := context.WithTimeout(ctx, settleWithin)
	defer cancel()
	if g.waitIdle(soon) == nil {
		return nil
	}
	g.mu.Change(func() {
		for one := range g.running {
			one.cancel(errHandedOver)
		}
	})
	if err := g.waitIdle(ctx); err != nil {
		return fmt.Errorf("wait for the kubelet's calls to end: %w", err)
	}
	return nil
}

func (g *gate) waitIdle(ctx context.Context) error {
	return g.mu.Wait(ctx, func() bool { return len(g.running) == 0 })
}

// dialSuccessor connects to a socket that is created soon: it is tried often.
func dialSuccessor(socket string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.2, Jitter: 0.2, MaxDelay: 50 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}))
	if err != nil {
		return nil, fmt.Errorf("connect to the next plugin's socket %s: %w", socket, err)
	}
	return conn, nil
}

// handedOver reports whether a successor handles the calls.
func (g *gate) handedOver() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.successor != nil
}

// close interrupts the calls that were passed on; they fail.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.successor != nil {
		_ = g.successor.Close()
	}
}
