package kubelet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/apimachinery/pkg/types"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"

	"github.com/tessera-dra/tessera/pkg/notify"
)

const (
	// settleWithin is how long calls in progress may take to end before they are
	// interrupted for a handover, and the successor makes them again. New calls wait
	// meanwhile.
	settleWithin = 300 * time.Millisecond
	// forwardWithin is how long a plugin that has handed over waits at its end for the
	// calls that it has passed on: the kubelet cancels them when the plugin's sockets are
	// removed.
	forwardWithin = 20 * time.Second
	// flushFor is how long the server may take to send the last answer after the call has
	// returned.
	flushFor = 100 * time.Millisecond
)

// errHandedOver interrupts a call that the successor makes again.
var errHandedOver = errors.New("another plugin takes over the node")

// gate has the kubelet's calls that have not ended, and decides whether this plugin or its
// successor handles them. The end of a call wakes those who wait for a change.
type gate struct {
	mu    notify.Mutex // of all below
	calls map[*call]bool
	// successor handles the calls; nil: this plugin does.
	successor *grpc.ClientConn
}

// call is a call of the kubelet. All but place and cancel stay as they are.
type call struct {
	began time.Time
	// answer is an empty response of the request's type. It is nil for requests that are
	// handled here also after a handover.
	answer    any
	unprepare bool
	claims    map[types.UID]bool
	place     place
	cancel    context.CancelCauseFunc
}

// place is who handles a call.
type place int

const (
	// apart: this plugin, also after a handover.
	apart place = iota
	// here: this plugin.
	here
	// passedOn: the successor, as soon as it serves.
	passedOn
)

func readCall(req any) *call {
	c := &call{began: time.Now()}
	switch r := req.(type) {
	case *drapbv1.NodePrepareResourcesRequest:
		c.answer, c.claims = &drapbv1.NodePrepareResourcesResponse{}, uids(r.GetClaims())
	case *drapbv1.NodeUnprepareResourcesRequest:
		c.answer, c.claims, c.unprepare = &drapbv1.NodeUnprepareResourcesResponse{}, uids(r.GetClaims()), true
	case *drapbv1beta1.NodePrepareResourcesRequest:
		c.answer, c.claims = &drapbv1beta1.NodePrepareResourcesResponse{}, uids(r.GetClaims())
	case *drapbv1beta1.NodeUnprepareResourcesRequest:
		c.answer, c.claims, c.unprepare = &drapbv1beta1.NodeUnprepareResourcesResponse{}, uids(r.GetClaims()), true
	}
	return c
}

func uids[C interface{ GetUid() string }](claims []C) map[types.UID]bool {
	all := make(map[types.UID]bool, len(claims))
	for _, c := range claims {
		all[types.UID(c.GetUid())] = true
	}
	return all
}

// handle is a gRPC interceptor that passes the kubelet's calls to the successor, once
// there is one. It passes on a call that was interrupted for that, too: preparing and
// unpreparing are idempotent, and an interrupted one is continued as after a crash.
func (g *gate) handle(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	c := readCall(req)
	defer g.leave(c)
	own, successor := g.enter(ctx, c)
	if successor == nil {
		answer, err := next(own, req)
		if !errors.Is(context.Cause(own), errHandedOver) {
			return answer, err
		}
		own, successor = g.enter(ctx, c)
	}
	if err := successor.Invoke(own, info.FullMethod, req, c.answer, grpc.WaitForReady(true)); err != nil {
		return nil, err
	}
	return c.answer, nil
}

// enter returns the context for a call, and the successor if that handles it.
func (g *gate) enter(ctx context.Context, c *call) (_ context.Context, successor *grpc.ClientConn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	ctx, c.cancel = context.WithCancelCause(ctx)
	if g.calls == nil {
		g.calls = map[*call]bool{}
	}
	g.calls[c] = true
	switch {
	case c.answer == nil:
		c.place = apart
	case g.successor == nil:
		c.place = here
	default:
		c.place = passedOn
		successor = g.successor
		g.cancelPrepares(c)
		g.mu.Wake()
	}
	return ctx, successor
}

// cancelPrepares cancels the prepares that an unprepare of their claims overtakes: one that
// still waits for the successor must not reach it after the unprepare. It needs the lock.
func (g *gate) cancelPrepares(unprepare *call) {
	for c := range g.calls {
		if unprepare.unprepare && !c.unprepare && c.place == passedOn && c.sharesClaim(unprepare) {
			c.cancel(context.Canceled)
		}
	}
}

func (c *call) sharesClaim(with *call) bool {
	for uid := range c.claims {
		if with.claims[uid] {
			return true
		}
	}
	return false
}

func (g *gate) leave(c *call) {
	g.mu.Change(func() {
		delete(g.calls, c)
		c.cancel(nil)
	})
}

// HandOver passes the kubelet's further calls to the plugin that will serve at the
// socket, and returns when this plugin handles none any more. Calls that don't end soon are
// interrupted and passed on. The sockets stay until Run ends: the kubelet knows the next
// plugin a moment after that serves. Call it once.
func (p *Plugin) HandOver(ctx context.Context, socket string) error {
	g := &p.gate
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
		for c := range g.calls {
			if c.place == here {
				c.cancel(errHandedOver)
			}
		}
	})
	if err := g.waitIdle(ctx); err != nil {
		return fmt.Errorf("wait for the kubelet's calls to end: %w", err)
	}
	return nil
}

// waitIdle waits until this plugin handles none of the calls that can be passed on.
func (g *gate) waitIdle(ctx context.Context) error {
	return g.mu.Wait(ctx, func() bool {
		for c := range g.calls {
			if c.place == here {
				return false
			}
		}
		return true
	})
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

// changed returns a channel that is closed at the next end of a call, or at a handover.
func (g *gate) changed() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mu.Changed()
}

// EndForwarding interrupts calls that were passed to the next plugin, which has ended. They
// and later ones fail.
func (p *Plugin) EndForwarding() {
	p.gate.mu.Lock()
	defer p.gate.mu.Unlock()
	if p.gate.successor != nil {
		_ = p.gate.successor.Close()
	}
}

// awaitForwarded waits until the calls that were passed on have ended, also after the end
// of ctx.
func (p *Plugin) awaitForwarded(ctx context.Context) {
	if !p.gate.handedOver() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), forwardWithin)
	defer cancel()
	_ = p.gate.mu.Wait(ctx, func() bool { return len(p.gate.calls) == 0 })
	<-time.After(flushFor)
}

// OldestCall returns the duration of the oldest call of the kubelet that has not
// ended; 0 if there is none.
func (p *Plugin) OldestCall() time.Duration {
	p.gate.mu.Lock()
	defer p.gate.mu.Unlock()
	var oldest time.Duration
	for c := range p.gate.calls {
		oldest = max(oldest, time.Since(c.began))
	}
	return oldest
}
