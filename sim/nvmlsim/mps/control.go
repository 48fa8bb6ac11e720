package mps

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

const (
	pidFile  = "nvidia-cuda-mps-control.pid"
	lockFile = "control_lock"
	logPipe  = "log"
)

var errRunning = errors.New("An instance of this daemon is already running") //nolint:staticcheck // the program's words

// control is the control daemon.
type control struct {
	machine   *nvmlsim.Machine // nil if there is none
	server    string           // path of the server program
	multiuser bool
	pipe      string
	log       journal
	logFile   *os.File
	lock      *os.File
	listeners []net.Listener

	mu       sync.Mutex
	upcoming bounds // limits of future servers
	running  *child
	quitting bool
	ended    chan struct{} // closed when quit is done
	// talking is held for reading while a command is carried out and answered.
	talking sync.RWMutex
}

// child is a server as its control daemon knows it.
type child struct {
	pid   uint32
	uid   uint32
	link  link
	ready chan struct{} // closed when the server is ready
	ended chan struct{} // closed when the server has ended
	limit bounds

	asking  sync.Mutex
	lists   uint64
	answers chan report
}

// newControl claims the pipe directory and listens there. It returns errRunning
// if another daemon has the directory.
func newControl(program string, open func() (*nvmlsim.Machine, error), multiuser bool) (*control, error) {
	c := &control{
		server:    filepath.Join(filepath.Dir(program), serverProgram),
		multiuser: multiuser, pipe: pipeDirectory(), ended: make(chan struct{}),
		upcoming: bounds{threads: 100, memory: parseLimits(os.Getenv(memoryEnv))},
	}
	if p, ok := parsePercentage(os.Getenv(threadsEnv)); ok {
		c.upcoming.threads = p
	}
	if err := c.take(); err != nil {
		return nil, err
	}
	c.log, c.logFile = openJournal("control.log", "Control")
	if m, err := open(); err == nil {
		c.machine = m
		// Read the state before the daemon is ready, so that a later kill is noticed.
		began := m.State()
		if err := m.Meet("MPSControl"); err != nil {
			return nil, fmt.Errorf("Failed to start: %w", err) //nolint:staticcheck // as nvidia's programs speak
		}
		go dieWith(m, began, func(k nvmlsim.MPSKills) uint64 { return k.Control })
	}
	if err := c.listen(); err != nil {
		return nil, err
	}
	c.log.printf("Starting control daemon using socket %s/control", c.pipe)
	c.log.printf("To connect CUDA applications to this daemon, set env %s=%s", pipeEnv, c.pipe)
	return c, nil
}

func (c *control) take() error {
	if err := os.MkdirAll(c.pipe, 0o755); err != nil {
		return fmt.Errorf("pipe directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(c.pipe, lockFile), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return fmt.Errorf("pipe directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return errors.Join(errRunning, f.Close())
	}
	c.lock = f
	return f.Chmod(0o666)
}

// listen creates the daemon's files in the pipe directory, and replaces those
// of a dead daemon.
func (c *control) listen() error {
	for _, name := range []string{publicName, privilegedName, logPipe, pidFile} {
		if err := os.Remove(filepath.Join(c.pipe, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("pipe directory: %w", err)
		}
	}
	log := filepath.Join(c.pipe, logPipe)
	if err := unix.Mkfifo(log, 0o777); err != nil {
		return fmt.Errorf("make %s: %w", log, err)
	}
	pid := filepath.Join(c.pipe, pidFile)
	if err := os.WriteFile(pid, []byte(strconv.Itoa(os.Getpid())), 0o666); err != nil {
		return fmt.Errorf("pipe directory: %w", err)
	}
	for name, mode := range map[string]fs.FileMode{privilegedName: 0o755, publicName: 0o666} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(c.pipe, name), Net: "unix"})
		if err != nil {
			return fmt.Errorf("pipe directory: %w", err)
		}
		l.SetUnlinkOnClose(false) // the real one leaves its sockets there
		c.listeners = append(c.listeners, l)
		if err := os.Chmod(filepath.Join(c.pipe, name), mode); err != nil {
			return fmt.Errorf("pipe directory: %w", err)
		}
	}
	// Set the modes regardless of the umask.
	return errors.Join(os.Chmod(log, 0o777), os.Chmod(pid, 0o666))
}

// serve returns after quit.
func (c *control) serve() {
	for _, l := range c.listeners {
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return // closed
				}
				go c.attend(conn)
			}
		}()
	}
	<-c.ended
	c.talking.Lock() // the last answers
}

// attend serves a connection: of a user's commands until its end, of a client
// until it is passed to the server.
func (c *control) attend(conn net.Conn) {
	defer conn.Close()
	c.log.printf("Accepting connection...")
	r := bufio.NewReader(conn)
	var g greeting
	switch err := readLine(r, &g); {
	case err != nil:
		c.log.printf("User did not send valid credentials")
	case g.UI:
		c.log.printf("NEW UI")
		c.converse(r, conn)
		c.log.printf("UI closed")
	case g.Client != nil:
		if problem := c.introduce(conn, *g.Client); problem != "" {
			_ = writeLine(conn, reply{Error: problem}) // the client sees that the connection ends
		}
	}
}

func (c *control) converse(r *bufio.Reader, conn net.Conn) {
	for {
		var text string
		if readLine(r, &text) != nil {
			return
		}
		c.log.printf("Cmd:%s", text)
		if c.obey(conn, text) != nil {
			return
		}
	}
}

// obey executes a command and answers.
func (c *control) obey(conn net.Conn, text string) error {
	c.talking.RLock()
	defer c.talking.RUnlock()
	answer, refused := "", false
	if filepath.Base(conn.LocalAddr().String()) != privilegedName {
		answer, refused = refuse(text, uidOf(conn))
	}
	if err := c.meet("MPSCommand"); err != nil {
		answer = err.Error() + "\n"
	} else if !refused {
		answer = execute(c, text)
	}
	return writeLine(conn, answer)
}

func (c *control) meet(call string) error {
	if c.machine == nil {
		return nil
	}
	return c.machine.Meet(call)
}

// peerOf returns the connection as a file, which the caller closes, and the
// credentials of the peer.
func peerOf(conn net.Conn) (*os.File, *unix.Ucred, error) {
	f, err := conn.(*net.UnixConn).File() //nolint:forcetypeassert // a unix listener made it
	if err != nil {
		return nil, nil, fmt.Errorf("connection: %w", err)
	}
	peer, err := unix.GetsockoptUcred(int(f.Fd()), unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("connection: %w", err), f.Close())
	}
	return f, peer, nil
}

// uidOf returns the user of the peer; the user nobody if that is unknown.
func uidOf(conn net.Conn) uint32 {
	f, peer, err := peerOf(conn)
	if err != nil {
		return nobody
	}
	_ = f.Close()
	return peer.Uid
}

const nobody = 65534

// introduce passes a client to the server, which it starts if necessary, or
// returns the error text for the client.
func (c *control) introduce(conn net.Conn, who client) string {
	f, peer, err := peerOf(conn)
	if err != nil {
		return notConnected
	}
	defer f.Close()
	who.PID, who.UID = uint32(peer.Pid), c.serverUser(peer.Uid)
	for {
		s, problem := c.serverFor(who)
		if problem != "" {
			return problem
		}
		if s.uid != who.UID {
			c.retire(s)
			continue
		}
		select {
		case <-s.ready:
		case <-s.ended:
			return notConnected
		}
		if s.link.send(order{Client: &who}, f) == nil {
			return ""
		}
		<-s.ended // the server was killed: start another one for the client
	}
}

// serverUser returns the user whose server serves a user's clients: with -M they all pass
// for root's (measured).
func (c *control) serverUser(uid uint32) uint32 {
	if c.multiuser {
		return 0
	}
	return uid
}

// Pauses between two attempts to end the server of another user; they double (measured;
// that they don't grow further is an assumption).
const (
	firstRetirePause = 200 * time.Millisecond
	lastRetirePause  = 3200 * time.Millisecond
)

// retire asks a server of another user to end, until it does; it stays while it has clients.
func (c *control) retire(s *child) {
	c.log.printf("Try shutting down server %d, backoff is disabled", s.pid)
	for pause := firstRetirePause; ; pause = min(2*pause, lastRetirePause) {
		_ = s.link.send(order{Retire: true}, nil) // fails if the server has ended
		c.log.printf("Control will try shutting down server %d again in at most %dms", s.pid, pause.Milliseconds())
		select {
		case <-s.ended:
			return
		case <-time.After(pause):
		}
	}
}

// serverFor returns the running server, which may not be ready yet or belong to another
// user. If there is none, it starts one for the client.
func (c *control) serverFor(who client) (*child, string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.quitting:
		return nil, notReady
	case c.running == nil:
		c.log.printf("NEW CLIENT %d from user %d: Server is not ready, push client to pending list", who.PID, who.UID)
		if err := c.start(who.UID); err != nil {
			c.log.printf("%v", err)
			return nil, notConnected
		}
	case c.running.uid != who.UID:
		c.log.printf("NEW CLIENT %d from user %d: Server is not ready, push client to pending list", who.PID, who.UID)
	default:
		c.log.printf("NEW CLIENT %d from user %d: Server already exists", who.PID, who.UID)
	}
	return c.running, ""
}

// start starts a server with the current defaults. The caller has the lock.
func (c *control) start(uid uint32) error {
	mine, theirs, err := newLink()
	if err != nil {
		return err
	}
	defer theirs.Close()
	s := &child{
		uid: uid, link: mine, ready: make(chan struct{}), ended: make(chan struct{}), answers: make(chan report),
		limit: c.upcoming.clone(),
	}
	cmd := exec.Command(c.server)
	cmd.Args = []string{serverProgram}
	if c.multiuser {
		cmd.Args = append(cmd.Args, "-multiuser-server")
	}
	if !c.multiuser && os.Geteuid() == 0 { // the server is a process of its user (measured)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uint32(os.Getgid()), NoSetGroups: true}}
	}
	cmd.ExtraFiles = []*os.File{theirs}
	// In a chroot there may be no /dev/null.
	if c.logFile != nil {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = c.logFile, c.logFile, c.logFile
	}
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("start server: %w", err), mine.conn.Close())
	}
	s.pid = uint32(cmd.Process.Pid)
	c.log.printf("Starting new server %d for user %d", s.pid, uid)
	c.running = s
	go c.follow(s, cmd)
	return mine.send(order{Threads: s.limit.threads, Memory: s.limit.memory}, nil)
}

// follow receives the messages of a server until its end.
func (c *control) follow(s *child, cmd *exec.Cmd) {
	for {
		var r report
		if _, err := s.link.receive(&r); err != nil {
			break
		}
		if r.Ready {
			c.log.printf("NEW SERVER %d: Ready", s.pid)
			close(s.ready)
		}
		if r.List > 0 {
			s.answers <- r
		}
	}
	err := cmd.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.log.printf("Server %d exited with status %d", s.pid, cmd.ProcessState.ExitCode())
	if err != nil {
		c.log.printf("Server %d: %v", s.pid, err)
	}
	if c.running == s {
		c.running = nil
	}
	_ = s.link.conn.Close() // it has ended
	close(s.ended)
}

// clean removes the daemon's files at its end. The caller has the lock.
func (c *control) clean() {
	for _, l := range c.listeners {
		_ = l.Close() // no new connections; the sockets stay, as those of the real daemon do
	}
	c.listeners = nil
	for _, name := range []string{logPipe, pidFile} {
		_ = os.Remove(filepath.Join(c.pipe, name)) // a missing file is fine
	}
	_ = c.lock.Close()
	c.log.printf("Exit with status 0")
	close(c.ended)
}

// The following methods implement commands.

func (c *control) startServer(uid uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running != nil || c.quitting {
		return
	}
	if err := c.start(c.serverUser(uid)); err != nil {
		c.log.printf("%v", err)
	}
}

func (c *control) quit(seconds int) {
	c.mu.Lock()
	c.quitting = true
	s := c.running
	c.mu.Unlock()
	if s != nil {
		c.log.printf("Try shutting down server %d, backoff is disabled", s.pid)
		_ = s.link.send(order{Drain: true, Seconds: seconds}, nil) // if the server has ended, the channel ended is closed
		<-s.ended
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.listeners != nil {
		c.clean()
	}
}

// say prints the error for the user.
func say(out io.Writer, err error) int {
	fmt.Fprintln(out, err)
	return 1
}
