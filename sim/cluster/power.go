package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
)

// starting is a machine whose pid 1 waits for the sign to go.
type starting struct {
	name       string
	cmd        *exec.Cmd
	goFD, okFD *os.File
}

// switchOn starts the machines that aren't running, and links all of them.
func (c *Cluster) switchOn(ctx context.Context) error {
	pids, fresh := map[string]int{}, map[string]bool{}
	var begun []*starting
	defer func() {
		for _, s := range begun {
			_ = s.goFD.Close() // a pid 1 that gets no signal ends
			_ = s.okFD.Close()
		}
	}()
	for _, name := range c.Machines() {
		if pid, err := c.machinePID(name); err == nil && c.answers(name) {
			pids[name] = pid
			continue
		}
		s, err := c.begin(ctx, name)
		if err != nil {
			return fmt.Errorf("start the machine %s: %w", name, err)
		}
		begun = append(begun, s)
		pids[name], fresh[name] = s.cmd.Process.Pid, true
	}
	if err := c.plan.connect(pids, fresh); err != nil {
		return err
	}
	for _, s := range begun {
		if _, err := s.goFD.Write([]byte{1}); err != nil {
			return fmt.Errorf("start the machine %s: %w", s.name, err)
		}
	}
	for _, s := range begun {
		if err := s.outcome(ctx); err != nil {
			return err
		}
	}
	return nil
}

// begin starts a machine's pid 1 in new namespaces and in its cgroup.
func (c *Cluster) begin(ctx context.Context, name string) (*starting, error) {
	if err := c.reset(ctx, name); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(c.LogPath(name, "init"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	goRead, goWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer goRead.Close()
	okRead, okWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer okWrite.Close()
	s := &starting{name: name, goFD: goWrite, okFD: okRead}
	// Not bound to the context: the machine outlives the caller.
	s.cmd = exec.Command(c.Binary("machine-init"), c.machineDir(name))
	s.cmd.Args[0] = "machine-init:" + c.plan.name + "/" + name
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.ExtraFiles = []*os.File{machine.GoFD - 3: goRead, machine.ReadyFD - 3: okWrite}
	s.cmd.Env = []string{"PATH=" + searchPath}
	s.cmd.Dir = "/"
	s.cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET,
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { _ = s.cmd.Wait() }() // collects the process if it ends before us
	return s, enterCgroup(c.machineCgroup(name)+"/system", s.cmd.Process.Pid)
}

// reset ends what may be left of a machine and empties the directories that
// don't outlive it.
func (c *Cluster) reset(ctx context.Context, name string) error {
	group := c.machineCgroup(name)
	if err := emptyCgroup(ctx, group); err != nil {
		return err
	}
	if err := removeCgroup(group); err != nil {
		return err
	}
	for _, dir := range volatileDirs() {
		path := filepath.Join(c.NodeDir(name), dir)
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("empty %s: %w", dir, err)
		}
		if err := os.MkdirAll(path, 0o755); err != nil {
			return fmt.Errorf("make %s: %w", dir, err)
		}
	}
	return createCgroup(group + "/system")
}

// outcome waits until the machine's pid 1 has set it up.
func (s *starting) outcome(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = s.okFD.SetReadDeadline(time.Now()) })
	defer stop()
	text, err := io.ReadAll(s.okFD)
	if err != nil {
		return fmt.Errorf("start the machine %s: %w", s.name, err)
	}
	if string(text) != "ok" {
		return fmt.Errorf("start the machine %s: %s", s.name, text)
	}
	return nil
}

// errOff means that a machine's pid 1 doesn't answer.
var errOff = errors.New("the machine is not running")

func (c *Cluster) dial(machineName string) (*net.UnixConn, error) {
	if !slices.Contains(c.Machines(), machineName) {
		return nil, fmt.Errorf("cluster %s has no machine %q: it has %v", c.Name(), machineName, c.Machines())
	}
	address := &net.UnixAddr{Net: "unix", Name: c.controlSocket(machineName)}
	conn, err := net.DialUnix("unix", nil, address)
	if err != nil {
		return nil, fmt.Errorf("%s: %w (%w)", machineName, errOff, err)
	}
	return conn, nil
}

// machinePID finds a machine's pid 1 as the host numbers it. The kernel says
// who listens on the control socket, so a stale file can't mislead.
func (c *Cluster) machinePID(machineName string) (int, error) {
	conn, err := c.dial(machineName)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	controlErr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(controlErr, err); err != nil {
		return 0, fmt.Errorf("ask who runs %s: %w", machineName, err)
	}
	return int(peer.Pid), nil
}

// answers distinguishes a running machine from one that is being killed, whose
// socket may still accept connections.
func (c *Cluster) answers(machineName string) bool {
	_, err := c.Status(machineName)
	return err == nil
}

func (c *Cluster) ask(machineName string, request machine.Request) ([]machine.ComponentStatus, error) {
	conn, err := c.dial(machineName)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return nil, err
	}
	var response machine.Response
	if err := json.NewEncoder(conn).Encode(request); err != nil {
		return nil, fmt.Errorf("ask %s: %w", machineName, err)
	}
	if err := json.NewDecoder(conn).Decode(&response); err != nil {
		return nil, fmt.Errorf("ask %s: %w", machineName, err)
	}
	if response.Error != "" {
		return nil, fmt.Errorf("%s: %s", machineName, response.Error)
	}
	return response.Components, nil
}

// Status reports the components of a machine.
func (c *Cluster) Status(machineName string) ([]machine.ComponentStatus, error) {
	return c.ask(machineName, machine.Request{Op: machine.OpStatus})
}

// Kill ends a component ("kubelet", "containerd", "kube-apiserver" …) with
// SIGKILL. The machine starts it again within a second.
func (c *Cluster) Kill(machineName, component string) error {
	_, err := c.ask(machineName, machine.Request{Op: machine.OpSignal, Component: component, Signal: int(syscall.SIGKILL)})
	return err
}

// Stop ends a component with SIGTERM and leaves it down until Start.
func (c *Cluster) Stop(ctx context.Context, machineName, component string) error {
	if _, err := c.ask(machineName, machine.Request{Op: machine.OpStop, Component: component}); err != nil {
		return err
	}
	return c.waitComponent(ctx, machineName, component, func(s machine.ComponentStatus) bool { return s.PID == 0 })
}

// Start starts a component after Stop and returns when its process is there.
func (c *Cluster) Start(ctx context.Context, machineName, component string) error {
	if _, err := c.ask(machineName, machine.Request{Op: machine.OpStart, Component: component}); err != nil {
		return err
	}
	return c.waitComponent(ctx, machineName, component, func(s machine.ComponentStatus) bool { return s.PID != 0 })
}

// Restart stops a component and starts it again.
func (c *Cluster) Restart(ctx context.Context, machineName, component string) error {
	if err := c.Stop(ctx, machineName, component); err != nil {
		return err
	}
	return c.Start(ctx, machineName, component)
}

func (c *Cluster) waitComponent(ctx context.Context, machineName, component string, done func(machine.ComponentStatus) bool) error {
	return poll(ctx, 20*time.Millisecond, func() (bool, error) {
		all, err := c.Status(machineName)
		if err != nil {
			return false, err
		}
		return slices.ContainsFunc(all, func(s machine.ComponentStatus) bool { return s.Name == component && done(s) }), nil
	})
}

// PowerOff kills a machine with everything in it, as a power cut does. Up or
// PowerOn switch it on again.
func (c *Cluster) PowerOff(ctx context.Context, machineName string) error {
	if !slices.Contains(c.Machines(), machineName) {
		return fmt.Errorf("cluster %s has no machine %q", c.Name(), machineName)
	}
	return emptyCgroup(ctx, c.machineCgroup(machineName))
}

// PowerOn switches on all machines that are off. /run and /tmp of those start
// empty, as after a reboot; their disks are as they were.
func (c *Cluster) PowerOn(ctx context.Context) error { return c.switchOn(ctx) }

// poll calls done until it says yes, fails, or the context ends.
func poll(ctx context.Context, every time.Duration, done func() (bool, error)) error {
	for {
		yes, err := done()
		if yes || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(every):
		}
	}
}
