// Package engine answers the calls of libnvidia-ml.so.1 (package library),
// which sends them with copies of the caller's memory, in the layout of nvml.h.
// Its behaviour is that of package nvmlsim.
//
// The library starts a child process, which calls Run. So the process that uses
// NVML contains no Go code, and its event sets and hanging calls end with the
// child.
package engine

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

//go:generate go run ./gen

// ProgramName is the name under which the library starts the program as an
// engine.
const ProgramName = "nvmlsim-engine"

// controlFD is the file descriptor of the control socket; maxMessage is the
// longest request and answer. Both as in forward.c.
const (
	controlFD  = 3
	maxMessage = 1 << 16
)

// Run serves the library that started this process, and returns the exit code
// after the library has closed the control socket or its process has ended.
// image is the file with the machine's description, see nvmlsim.OpenInstalled.
func Run(image string) int {
	e := &engine{image: image}
	for {
		connection, err := accept(controlFD)
		if err != nil {
			return 1
		}
		if connection < 0 {
			return 0
		}
		go e.serve(connection)
	}
}

// accept receives a connection over the control socket; -1 at its end.
func accept(control int) (int, error) {
	data, rights := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	n, rightsLen, _, _, err := unix.Recvmsg(control, data, rights, unix.MSG_CMSG_CLOEXEC)
	for errors.Is(err, unix.EINTR) {
		n, rightsLen, _, _, err = unix.Recvmsg(control, data, rights, unix.MSG_CMSG_CLOEXEC)
	}
	if err != nil || n == 0 {
		return -1, err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:rightsLen])
	if err != nil {
		return -1, err
	}
	if len(messages) != 1 {
		return -1, errors.New("no connection in the message")
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, errors.Join(err, errors.New("no connection in the message"))
	}
	return fds[0], nil
}

// engine serves one process.
type engine struct {
	image string
	mu    sync.Mutex
	open  atomic.Pointer[opened]
}

// opened holds the machine and the session that the first nvmlInit opened.
type opened struct {
	machine *nvmlsim.Machine
	calls   map[string]func(*frame) nvmlsim.Return
}

// serve answers the calls of a connection, one after the other, until it is
// closed. Reading blocks a thread, which is faster than waiting for the runtime's
// poller at each call.
func (e *engine) serve(connection int) {
	file := os.NewFile(uintptr(connection), "connection")
	defer file.Close()
	buffer := make([]byte, maxMessage)
	for {
		n, err := unix.Read(connection, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return
		}
		answer, err := e.answer(buffer[:n])
		if err != nil {
			return
		}
		if _, err := unix.Write(connection, answer); err != nil {
			return
		}
	}
}

// answer executes the call of a request. It returns an error for a malformed
// request.
func (e *engine) answer(request []byte) ([]byte, error) {
	f, err := decode(request)
	if err != nil {
		return nil, err
	}
	if f.call == "Init" {
		return f.answer(nvmlsim.Code(e.init()))
	}
	open := e.open.Load()
	if open == nil {
		return f.answer(nvmlsim.Uninitialized)
	}
	call, known := open.calls[f.call]
	if !known {
		return f.answer(nvmlsim.NotSupported) // the library has another version
	}
	return f.answer(call(f))
}

// init is nvmlInit. The library counts its calls.
func (e *engine) init() error {
	open, err := e.opened()
	if err != nil {
		return err
	}
	return open.machine.Init()
}

func (e *engine) opened() (*opened, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if open := e.open.Load(); open != nil {
		return open, nil
	}
	m, err := nvmlsim.OpenInstalled(e.image)
	if err != nil {
		return nil, err
	}
	open := &opened{machine: m, calls: newSession(m).calls()}
	e.open.Store(open)
	return open, nil
}
