package handover

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// Request asks the acting plugin for the node.
type Request struct {
	// PodUID of the successor.
	PodUID types.UID `json:"podUID"`
	// Service is the socket at which the successor will serve the kubelet.
	Service string `json:"service"`
}

// answer is the acting plugin's.
type answer struct {
	// Refused is the reason; empty: the node is the successor's.
	Refused string `json:"refused,omitempty"`
	// PodUID of the acting plugin.
	PodUID types.UID `json:"podUID,omitempty"`
}

// taken is the successor's last message.
type taken struct {
	Taken bool `json:"taken"`
}

var (
	// ErrNobody says that no plugin offers the node: none runs, or one that doesn't know
	// the protocol.
	ErrNobody = errors.New("no plugin hands over the node")
	// ErrRefused says that the acting plugin keeps the node.
	ErrRefused = errors.New("the running plugin keeps the node")
)

// answerWithin is how long the acting plugin may take to release the node.
const answerWithin = time.Minute

// Granted is a node that the acting plugin has released.
type Granted struct {
	// PodUID of the plugin before.
	PodUID types.UID

	conn net.Conn
}

// Ask asks the plugin that listens at the socket for the node, and returns when it has
// released the lock. The caller takes the lock and calls Taken; until then, and for as
// long as the acting plugin waits for that, nobody else takes it. The error is ErrNobody
// or ErrRefused, or another one if the acting plugin doesn't answer.
func Ask(ctx context.Context, socket string, r Request) (_ *Granted, err error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, ErrNobody
	}
	if err != nil {
		return nil, fmt.Errorf("ask for the node: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, conn.Close())
		}
	}()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := conn.SetDeadline(time.Now().Add(answerWithin)); err != nil {
		return nil, fmt.Errorf("ask for the node: %w", err)
	}
	var a answer
	if err := errors.Join(send(conn, r), receive(conn, &a)); err != nil {
		return nil, fmt.Errorf("ask for the node: %w", err)
	}
	if a.Refused != "" {
		return nil, fmt.Errorf("%w: %s", ErrRefused, a.Refused)
	}
	return &Granted{PodUID: a.PodUID, conn: conn}, nil
}

// Taken tells the plugin before that the caller has the lock, or, if it hasn't, that it
// won't take it.
func (g *Granted) Taken(locked bool) error {
	return errors.Join(send(g.conn, taken{locked}), g.conn.Close())
}

func send(conn net.Conn, message any) error {
	line, err := json.Marshal(message)
	if err != nil {
		return err
	}
	_, err = conn.Write(append(line, '\n'))
	return err
}

// longest is the length of the longest message that is read.
const longest = 64 << 10

func receive(conn net.Conn, message any) error {
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, longest)
	if !lines.Scan() {
		return errors.Join(errors.New("the connection ended without a message"), lines.Err())
	}
	return json.Unmarshal(lines.Bytes(), message)
}
