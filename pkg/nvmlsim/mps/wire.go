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

// Environment of MPS, and where it is without.
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

// Sockets of the control daemon: for everybody, and for who started it and root.
const (
	publicName     = "control"
	privilegedName = "control_privileged"
)

func controlSocket() string { return filepath.Join(pipeDirectory(), publicName) }

// greeting is the first line of a connection to the control daemon.
type greeting struct {
	// UI: lines with commands follow, each is answered with a line that is a
	// JSON string.
	UI bool `json:"ui,omitempty"`
	// Client: the connection becomes one to the server.
	Client *client `json:"client,omitempty"`
}

// client is a CUDA program that wants a context.
type client struct {
	Name string `json:"name"`
	// Namespace is the PID namespace's number.
	Namespace uint64 `json:"namespace"`
	// Visible, Memory and Threads are its environment; Visible nil if not set.
	Visible *string `json:"visible,omitempty"`
	Memory  string  `json:"memory,omitempty"`
	Threads string  `json:"threads,omitempty"`
	// Device is the index of the device it wants, among those it sees.
	Device int `json:"device,omitempty"`
	// PID and UID are filled in by the control daemon, as it sees them.
	PID uint32 `json:"pid,omitempty"`
	UID uint32 `json:"uid,omitempty"`
}

// ask is what a client asks of the server.
type ask struct {
	Alloc uint64 `json:"alloc,omitempty"`
	Fault bool   `json:"fault,omitempty"`
}

// reply is an answer to a client. It may come unasked, with Lost.
type reply struct {
	// Error is "" where all is well.
	Error string `json:"error,omitempty"`
	// Lost: the context is no more.
	Lost bool `json:"lost,omitempty"`
	// UUID and what follows is the context, with which the server begins.
	UUID            string `json:"uuid,omitempty"`
	Multiprocessors uint32 `json:"multiprocessors,omitempty"`
	Free            uint64 `json:"free,omitempty"`
	Total           uint64 `json:"total,omitempty"`
}

// order goes from the control daemon to the server, one in a packet. A client's
// connection goes with it.
type order struct {
	Client *client `json:"client,omitempty"`
	// Threads and Memory are limits for clients to come.
	Threads float64 `json:"threads,omitempty"`
	Memory  limits  `json:"memory,omitempty"`
	// List is answered by a report with the same number.
	List uint64 `json:"list,omitempty"`
	// Drain: take no more clients, and end with the last, or after so many
	// seconds; 0 is no limit.
	Drain   bool `json:"drain,omitempty"`
	Seconds int  `json:"seconds,omitempty"`
	// Terminate ends the client of a PID.
	Terminate uint32 `json:"terminate,omitempty"`
}

// report goes from the server to the control daemon, one in a packet.
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

// link is the connection of control daemon and server: packets, with which
// connections can go.
type link struct{ conn *net.UnixConn }

// newLink makes both ends: one for this process, one to be inherited.
func newLink() (link, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return link{}, nil, fmt.Errorf("connect control daemon and server: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "link")
	mine, err := openLink(os.NewFile(uintptr(fds[0]), "link"))
	return mine, theirs, err
}

// openLink takes the file over.
func openLink(f *os.File) (link, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return link{}, fmt.Errorf("connect control daemon and server: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return link{}, fmt.Errorf("connect control daemon and server: %T is no socket of theirs", c)
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

// receive returns the connection that came along, nil where there was none.
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
