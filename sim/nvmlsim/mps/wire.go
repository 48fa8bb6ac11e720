package mps

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Environment variables of MPS, and their default values.
const (
	pipeEnv    = "CUDA_MPS_PIPE_DIRECTORY"
	logEnv     = "CUDA_MPS_LOG_DIRECTORY"
	threadsEnv = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
	memoryEnv  = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	visibleEnv = "CUDA_VISIBLE_DEVICES"

	defaultPipe = "/tmp/nvidia-mps"
	defaultLog  = "/var/log/nvidia-mps"
)

// Texts of cudaGetErrorString.
const (
	noError         = "no error"
	outOfMemory     = "out of memory"
	noDevice        = "no CUDA-capable device is detected"
	unavailable     = "all CUDA-capable devices are busy or unavailable"
	illegalAccess   = "an illegal memory access was encountered"
	rpcFailed       = "the remote procedural call between the MPS server and the MPS client failed"
	notConnected    = "MPS client failed to connect to the MPS control daemon or the MPS server"
	notReady        = "MPS server is not ready to accept new MPS client requests"
	tooManyClients  = "the hardware resources required to create MPS client have been exhausted"
	unknownError    = "unknown error"
	noControlDaemon = "Cannot find MPS control daemon process"
)

func setting(name, without string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return without
}

func pipeDirectory() string { return setting(pipeEnv, defaultPipe) }

// Sockets of the control daemon: for all users, and for root and the user who
// started it.
const (
	publicName     = "control"
	privilegedName = "control_privileged"
)

func controlSocket() string { return filepath.Join(pipeDirectory(), publicName) }

// greeting is the first line of a connection to the control daemon.
type greeting struct {
	// UI announces lines with commands; the answer to each is a line with a JSON
	// string.
	UI bool `json:"ui,omitempty"`
	// Client requests that the connection is passed to the server.
	Client *client `json:"client,omitempty"`
}

// client is a CUDA program that wants a context.
type client struct {
	Name string `json:"name"`
	// Namespace is the PID namespace's number.
	Namespace uint64 `json:"namespace"`
	// Visible, Memory and Threads are from its environment; Visible is nil if not
	// set.
	Visible *string `json:"visible,omitempty"`
	Memory  string  `json:"memory,omitempty"`
	Threads string  `json:"threads,omitempty"`
	// Device is the index of the device it wants, among those it sees.
	Device int `json:"device,omitempty"`
	// PID and UID are set by the control daemon, from the socket's credentials.
	PID uint32 `json:"pid,omitempty"`
	UID uint32 `json:"uid,omitempty"`
}

// ask is a request of a client to the server.
type ask struct {
	Alloc uint64 `json:"alloc,omitempty"`
	Fault bool   `json:"fault,omitempty"`
	// Load is the percentage of the time in which the client computes from now on.
	Load *uint32 `json:"load,omitempty"`
}

// reply is an answer to a client. With Lost it may come without a request.
type reply struct {
	// Error is "" on success.
	Error string `json:"error,omitempty"`
	// Lost means that the context is lost.
	Lost bool `json:"lost,omitempty"`
	// UUID and the following fields describe the context, in the first reply.
	UUID            string `json:"uuid,omitempty"`
	Multiprocessors uint32 `json:"multiprocessors,omitempty"`
	Free            uint64 `json:"free,omitempty"`
	Total           uint64 `json:"total,omitempty"`
}

// order is a message from the control daemon to the server, one per packet,
// with a client's connection if it has one.
type order struct {
	Client *client `json:"client,omitempty"`
	// Threads and Memory are limits for future clients.
	Threads float64 `json:"threads,omitempty"`
	Memory  limits  `json:"memory,omitempty"`
	// List requests a report with the same number.
	List uint64 `json:"list,omitempty"`
	// Drain orders the server to accept no more clients, and to end with the last
	// one or after Seconds; 0 means no limit.
	Drain   bool `json:"drain,omitempty"`
	Seconds int  `json:"seconds,omitempty"`
	// Retire orders the server to end if it serves nobody.
	Retire bool `json:"retire,omitempty"`
	// Terminate ends the client of a PID.
	Terminate uint32 `json:"terminate,omitempty"`
}

// report is a message from the server to the control daemon, one per packet.
type report struct {
	Ready   bool     `json:"ready,omitempty"`
	List    uint64   `json:"list,omitempty"`
	Devices []served `json:"devices,omitempty"`
}

// served is a device of a server with its clients, oldest first.
type served struct {
	UUID    string      `json:"uuid"`
	Name    string      `json:"name"`
	Bus     string      `json:"bus"`
	Clients []connected `json:"clients,omitempty"`
}

// connected is a client with its context.
type connected struct {
	client
	ID int `json:"id"`
}

func writeLine(c net.Conn, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	_, err = c.Write(append(b, '\n'))
	return err
}

func readLine(r *bufio.Reader, v any) error {
	b, err := r.ReadBytes('\n')
	if err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}

// link is the connection between control daemon and server. A packet can carry
// a connection.
type link struct{ conn *net.UnixConn }

// newLink creates both ends: one for this process, one for a child process.
func newLink() (link, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return link{}, nil, fmt.Errorf("connect control daemon and server: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "link")
	mine, err := openLink(os.NewFile(uintptr(fds[0]), "link"))
	return mine, theirs, err
}

// openLink returns the link of the file, and closes the file.
func openLink(f *os.File) (link, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return link{}, fmt.Errorf("connect control daemon and server: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return link{}, fmt.Errorf("connect control daemon and server: %T is not a unix socket", c)
	}
	return link{u}, nil
}

func (l link) send(v any, connection *os.File) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	var rights []byte
	if connection != nil {
		rights = unix.UnixRights(int(connection.Fd()))
	}
	_, _, err = l.conn.WriteMsgUnix(b, rights, nil)
	return err
}

// receive returns the connection in the packet, nil if there was none.
func (l link) receive(v any) (*os.File, error) {
	b, oob := make([]byte, 128<<10), make([]byte, 64)
	n, oobn, _, _, err := l.conn.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, fmt.Errorf("the other end is gone")
	}
	f := received(oob[:oobn])
	return f, json.Unmarshal(b[:n], v)
}

func received(oob []byte) *os.File {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(messages) == 0 {
		return nil
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) == 0 {
		return nil
	}
	unix.CloseOnExec(fds[0])
	return os.NewFile(uintptr(fds[0]), "client")
}
