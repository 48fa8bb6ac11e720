package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/files"
)

// requestWithin is how long a successor may take to send its request.
const requestWithin = 2 * time.Second

// Accepted is a request that the acting plugin has accepted.
type Accepted struct {
	Request

	conn *net.UnixConn
}

// Await listens at the socket until a request comes that accept returns nil for; others
// are refused with accept's error. The socket is removed when Await returns. The caller
// releases the node and calls Give.
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
	for said := ""; ; {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			return nil, fmt.Errorf("listen for the next plugin: %w", err)
		}
		r, err := read(conn, accept)
		if err == nil {
			return &Accepted{Request: r, conn: conn.(*net.UnixConn)}, nil
		}
		if why := fmt.Sprint(r.PodUID, err); said != why { // it asks every few seconds
			said = why
			klog.FromContext(ctx).Info("Not handing over the node", "podUID", r.PodUID, "err", err)
		}
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

// Give sends the lock to the successor, which alone has it when the caller has closed its own
// copy. If the successor ends before it reads the answer, the lock is free then. podUID is
// the caller's.
func (a *Accepted) Give(podUID types.UID, lock *os.File) error {
	defer a.conn.Close()
	line, err := lineOf(answer{PodUID: podUID})
	if err != nil {
		return fmt.Errorf("hand over the node: %w", err)
	}
	if _, _, err := a.conn.WriteMsgUnix(line, unix.UnixRights(int(lock.Fd())), nil); err != nil {
		return fmt.Errorf("hand over the node: %w", err)
	}
	return nil
}

// Close ends a handover for which the node isn't released.
func (a *Accepted) Close() error { return a.conn.Close() }
