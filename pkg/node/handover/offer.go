package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/files"
)

const (
	// requestWithin is how long a successor may take to send its request.
	requestWithin = 2 * time.Second
	// takeWithin is how long the acting plugin waits for the successor to take the lock
	// that it has released, before it wants it back.
	takeWithin = 5 * time.Second
)

// Accepted is a request that the acting plugin has accepted.
type Accepted struct {
	Request

	conn net.Conn
}

// Await listens at the socket until a request comes that accept returns nil for; others
// are refused with accept's error. The socket is removed when Await returns. The caller
// releases the node and calls Released.
func Await(ctx context.Context, socket string, accept func(Request) error) (_ *Accepted, err error) {
	if err := files.RemoveIfThere(socket); err != nil {
		return nil, fmt.Errorf("remove the socket of a plugin that was killed: %w", err)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("listen for the next plugin: %w", err)
	}
	defer l.Close()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	if err := os.Chmod(socket, 0o600); err != nil {
		return nil, fmt.Errorf("listen for the next plugin: %w", err)
	}
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			return nil, fmt.Errorf("listen for the next plugin: %w", err)
		}
		r, err := read(conn, accept)
		if err == nil {
			return &Accepted{Request: r, conn: conn}, nil
		}
		klog.FromContext(ctx).Info("Not handing over the node", "podUID", r.PodUID, "err", err)
		if err := errors.Join(send(conn, answer{Refused: err.Error()}), conn.Close()); err != nil {
			klog.FromContext(ctx).V(2).Info("The other plugin doesn't listen", "podUID", r.PodUID, "err", err)
		}
	}
}

func read(conn net.Conn, accept func(Request) error) (r Request, err error) {
	if err := conn.SetDeadline(time.Now().Add(requestWithin)); err != nil {
		return r, err
	}
	if err := receive(conn, &r); err != nil {
		return r, err
	}
	return r, errors.Join(accept(r), conn.SetDeadline(time.Time{}))
}

// Released tells the successor that the lock is free, and returns when it has the lock
// or the caller may want it back: the successor has ended, or doesn't take it. podUID is
// the caller's.
func (a *Accepted) Released(ctx context.Context, podUID types.UID) error {
	defer a.conn.Close()
	defer context.AfterFunc(ctx, func() { a.conn.Close() })()
	if err := a.conn.SetDeadline(time.Now().Add(takeWithin)); err != nil {
		return fmt.Errorf("hand over the node: %w", err)
	}
	var t taken
	if err := errors.Join(send(a.conn, answer{PodUID: podUID}), receive(a.conn, &t)); err != nil {
		return fmt.Errorf("hand over the node: %w", err)
	}
	if !t.Taken {
		return errors.New("hand over the node: the successor couldn't take it")
	}
	return nil
}

// Close ends a handover for which the node isn't released.
func (a *Accepted) Close() error { return a.conn.Close() }
