package handover

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
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
	// BesideDevicePlugin: the successor registers with the kubelet beside a device plugin,
	// too. Older releases, which don't send this, wait for the device plugin's end.
	BesideDevicePlugin bool `json:"besideDevicePlugin,omitempty"`
}

// answer is the acting plugin's. If it doesn't refuse, the lock comes with it.
type answer struct {
	// Refused is the reason; empty: the node is the successor's.
	Refused string `json:"refused,omitempty"`
	// PodUID of the acting plugin.
	PodUID types.UID `json:"podUID,omitempty"`
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
	// Lock is the lock that it has given. The caller closes it.
	Lock *os.File
}

// Ask asks the plugin that listens at the socket for the node, and returns when it has
// given the lock. The error is ErrNobody or ErrRefused, or another one if the acting plugin
// doesn't answer.
func Ask(ctx context.Context, socket string, r Request) (Granted, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return Granted{}, ErrNobody
	}
	if err != nil {
		return Granted{}, fmt.Errorf("ask for the node: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := conn.SetDeadline(time.Now().Add(answerWithin)); err != nil {
		return Granted{}, fmt.Errorf("ask for the node: %w", err)
	}
	if err := send(conn, r); err != nil {
		return Granted{}, fmt.Errorf("ask for the node: %w", err)
	}
	files := &withFiles{UnixConn: conn.(*net.UnixConn)}
	var a answer
	if err := receive(files, &a); err != nil {
		return Granted{}, errors.Join(fmt.Errorf("ask for the node: %w", err), files.closeFiles())
	}
	switch {
	case a.Refused != "":
		return Granted{}, errors.Join(fmt.Errorf("%w: %s", ErrRefused, a.Refused), files.closeFiles())
	case len(files.got) != 1:
		return Granted{}, errors.Join(fmt.Errorf("ask for the node: the answer came with %d files, not with the lock", len(files.got)), files.closeFiles())
	}
	return Granted{PodUID: a.PodUID, Lock: files.got[0]}, nil
}

// withFiles is a connection that keeps the files that arrive with the data.
type withFiles struct {
	*net.UnixConn
	got []*os.File
}

func (w *withFiles) Read(b []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := w.ReadMsgUnix(b, oob)
	messages, parseErr := unix.ParseSocketControlMessage(oob[:oobn])
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		parseErr = errors.Join(parseErr, err)
		for _, fd := range fds {
			w.got = append(w.got, os.NewFile(uintptr(fd), "lock"))
		}
	}
	return n, cmp.Or(err, parseErr)
}

func (w *withFiles) closeFiles() (err error) {
	for _, f := range w.got {
		err = errors.Join(err, f.Close())
	}
	return err
}

func send(conn net.Conn, message any) error {
	line, err := lineOf(message)
	if err != nil {
		return err
	}
	_, err = conn.Write(line)
	return err
}

func lineOf(message any) ([]byte, error) {
	line, err := json.Marshal(message)
	return append(line, '\n'), err
}

// longest is the length of the longest message that is read.
const longest = 64 << 10

func receive(conn io.Reader, message any) error {
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, longest)
	if !lines.Scan() {
		return errors.Join(errors.New("the connection ended without a message"), lines.Err())
	}
	return json.Unmarshal(lines.Bytes(), message)
}
