package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Delays between two starts of a component that keeps dying, and between two
// looks at what it waits for.
const (
	firstDelay = 300 * time.Millisecond
	lastDelay  = 5 * time.Second
	steadyTime = 10 * time.Second
	pollDelay  = 30 * time.Millisecond
)

// supervisor keeps the components of a machine running.
type supervisor struct {
	mu      sync.Mutex // guards all below; held across fork so that reap knows every child
	order   []*running
	byName  map[string]*running
	byPID   map[int]*running
	started chan struct{} // has a token after each start, for reap to wake up
}

// running is the state of one component.
type running struct {
	Component
	pid      int
	restarts int
	stopped  bool
	since    time.Time
	delay    time.Duration
	lastExit string
}

func newSupervisor(spec *Spec) *supervisor {
	s := &supervisor{byName: map[string]*running{}, byPID: map[int]*running{}, started: make(chan struct{}, 1)}
	for _, component := range spec.Components {
		r := &running{Component: component, delay: firstDelay}
		s.order = append(s.order, r)
		s.byName[component.Name] = r
	}
	return s
}

func (s *supervisor) startAll() {
	for _, r := range s.order {
		go s.start(r)
	}
}

// start waits for the component's dependencies and then starts it, unless it
// was stopped in the meantime or is already running.
func (s *supervisor) start(r *running) {
	for _, address := range r.WaitFor {
		waitFor(address)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.stopped || r.pid != 0 {
		return
	}
	pid, err := launch(r.Component)
	if err != nil {
		r.lastExit = err.Error()
		s.restartLater(r)
		return
	}
	r.pid, r.since = pid, time.Now()
	s.byPID[pid] = r
	select {
	case s.started <- struct{}{}:
	default:
	}
}

func waitFor(address string) {
	network, target, _ := strings.Cut(address, "://")
	for {
		conn, err := net.DialTimeout(network, target, time.Second)
		if err == nil {
			_ = conn.Close()
			return
		}
		time.Sleep(pollDelay)
	}
}

// launch starts a component with its output appended to its log file.
func launch(c Component) (pid int, err error) {
	log, err := os.OpenFile(filepath.Join(StateDir, LogDir, c.Name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return 0, fmt.Errorf("open the log of %s: %w", c.Name, err)
	}
	defer log.Close()
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if len(c.View) > 0 {
		cmd = exec.Command("/proc/self/exe", viewedArgs(c)...)
		// Not Unshareflags: with those, Go ends the sharing of mounts with the machine.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: syscall.CLONE_NEWNS}
	}
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.Dir = c.Env, log, log, "/"
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start %s: %w", c.Name, err)
	}
	pid = cmd.Process.Pid
	return pid, cmd.Process.Release()
}

// reap collects every child that ends, adopted orphans included, and restarts
// components. It never returns.
func (s *supervisor) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.ECHILD):
			<-s.started
		case err == nil:
			s.ended(pid, status)
		}
	}
}

func (s *supervisor) ended(pid int, status syscall.WaitStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byPID[pid]
	if r == nil {
		return
	}
	delete(s.byPID, pid)
	r.pid, r.lastExit = 0, describe(status)
	fmt.Fprintf(os.Stderr, "%s %s: %s\n", time.Now().UTC().Format(time.RFC3339), r.Name, r.lastExit)
	if r.stopped {
		return
	}
	if time.Since(r.since) > steadyTime {
		r.delay = firstDelay
	}
	s.restartLater(r)
}

func (s *supervisor) restartLater(r *running) {
	r.restarts++
	time.AfterFunc(r.delay, func() { s.start(r) })
	r.delay = min(2*r.delay, lastDelay)
}

func describe(status syscall.WaitStatus) string {
	if status.Signaled() {
		return "killed by signal " + status.Signal().String()
	}
	return fmt.Sprintf("exited with status %d", status.ExitStatus())
}

func (s *supervisor) serve(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			fmt.Fprintln(os.Stderr, "control socket:", err)
			return
		}
		go s.answer(conn)
	}
}

func (s *supervisor) answer(conn net.Conn) {
	defer conn.Close()
	var request Request
	response := Response{}
	if err := json.NewDecoder(conn).Decode(&request); err != nil {
		response.Error = fmt.Sprintf("read the request: %v", err)
	} else if err := s.do(request); err != nil {
		response.Error = err.Error()
	} else {
		response.Components = s.status()
	}
	_ = json.NewEncoder(conn).Encode(response) // the asker may be gone
}

func (s *supervisor) do(request Request) error {
	if request.Op == OpStatus {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byName[request.Component]
	if r == nil {
		return fmt.Errorf("no component %q", request.Component)
	}
	switch request.Op {
	case OpSignal:
		return r.signal(syscall.Signal(request.Signal))
	case OpStop:
		r.stopped = true
		if r.pid == 0 {
			return nil
		}
		return r.signal(syscall.SIGTERM)
	case OpStart:
		return s.startAgain(r)
	}
	return fmt.Errorf("no operation %q", request.Op)
}

// startAgain starts a component that was stopped as the spec says now.
func (s *supervisor) startAgain(r *running) error {
	spec, err := readSpec(filepath.Join(StateDir, SpecFile))
	if err != nil {
		return err
	}
	for _, component := range spec.Components {
		if component.Name == r.Name {
			r.Component = component
		}
	}
	r.stopped = false
	go s.start(r)
	return nil
}

func (r *running) signal(signal syscall.Signal) error {
	if r.pid == 0 {
		return fmt.Errorf("%s is not running", r.Name)
	}
	if err := syscall.Kill(r.pid, signal); err != nil {
		return fmt.Errorf("signal %s: %w", r.Name, err)
	}
	return nil
}

func (s *supervisor) status() []ComponentStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []ComponentStatus
	for _, r := range s.order {
		all = append(all, ComponentStatus{Name: r.Name, PID: r.pid, Restarts: r.restarts, Stopped: r.stopped, LastExit: r.lastExit})
	}
	return all
}
