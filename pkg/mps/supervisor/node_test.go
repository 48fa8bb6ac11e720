package supervisor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
)

func signalled() context.Context {
	ctx, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	return ctx
}

// node has a driver, a run directory, and at times a supervisor.
type node struct {
	*mps.Client

	t   *testing.T
	cfg Config
	// running is the supervisor's process.
	running *exec.Cmd
	// cgroups that the supervisor is put into.
	cgroups []string
	// steps it came to; closed when it has ended.
	steps chan string
}

func newNode(t *testing.T) *node {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: daemons get mounts of their own")
	}
	dir := t.TempDir()
	n := &node{t: t, cfg: Config{RunDir: filepath.Join(dir, "run"), HostRoot: "/", DriverRoot: filepath.Join(dir, "driver")}}
	self, err := filepath.Abs(plain)
	if err != nil {
		t.Fatal(err)
	}
	for _, sub := range []string{"driver/lib64", "driver/bin", "run"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.put("lib64/libnvidia-ml.so.580.159.04", "")
	n.link("libnvidia-ml.so.580.159.04", "lib64/libnvidia-ml.so.1")
	n.link(self, "bin/"+program)
	if n.Client, err = mps.Dial(n.cfg.runDir().Socket()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.cleanUp)
	return n
}

func (n *node) cleanUp() {
	n.kill()
	places, _ := filepath.Glob(n.cfg.runDir().Daemon("*"))
	for _, at := range places {
		if err := errors.Join(killUsers(context.Background(), place(at).pipe()), place(at).unmountShm()); err != nil {
			n.t.Error(err)
		}
	}
}

// put makes a file in the driver root.
func (n *node) put(name, text string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.cfg.DriverRoot, name), []byte(text), 0o755); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) link(target, name string) {
	n.t.Helper()
	if err := os.Symlink(target, filepath.Join(n.cfg.DriverRoot, name)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) drop(name string) {
	n.t.Helper()
	if err := os.Remove(filepath.Join(n.cfg.DriverRoot, name)); err != nil {
		n.t.Fatal(err)
	}
}

// start starts a supervisor, which kills itself after a step, if one is named
// ("name#2": when it comes to it for the second time), and waits until it serves
// or has ended.
func (n *node) start(failpoint string) {
	n.t.Helper()
	text, err := json.Marshal(n.cfg)
	if err != nil {
		n.t.Fatal(err)
	}
	if failpoint != "" && !strings.Contains(failpoint, "#") {
		failpoint += "#1"
	}
	n.running = exec.Command("/proc/self/exe", "supervise", string(text))
	n.running.Env = append(os.Environ(), "TEST_FAILPOINT="+failpoint)
	stdin, err := n.running.StdinPipe() // it begins when this is closed
	if err != nil {
		n.t.Fatal(err)
	}
	defer stdin.Close()
	n.running.WaitDelay = time.Second
	stderr, err := n.running.StderrPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	stdout, err := n.running.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := n.running.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.join()
	n.steps = make(chan string, 1000)
	go func(steps chan<- string) {
		defer close(steps)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			steps <- lines.Text()
		}
	}(n.steps)
	serving := make(chan struct{})
	_ = stdin.Close()
	go func() {
		said := false
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			n.t.Log(lines.Text())
			if !said && strings.Contains(lines.Text(), `"Serving"`) {
				said = true
				close(serving)
			}
		}
		if !said {
			close(serving)
		}
	}()
	<-serving
}

// join puts the supervisor into its cgroups.
func (n *node) join() {
	n.t.Helper()
	for _, dir := range n.cgroups {
		if err := writeControl(filepath.Join(dir, "cgroup.procs"), itoa(n.running.Process.Pid)); err != nil {
			n.t.Fatal(err)
		}
	}
}

// kill ends the supervisor as a crash does.
func (n *node) kill() {
	if n.running != nil {
		_ = n.running.Process.Kill()
		_ = n.running.Wait()
		n.running = nil
	}
}

// crashed waits until the supervisor has killed itself.
func (n *node) crashed() {
	_ = n.running.Wait()
	n.running = nil
}

func (n *node) ensure(d mps.Daemon) mps.State {
	n.t.Helper()
	state, err := n.Ensure(n.t.Context(), d)
	if err != nil {
		n.t.Fatal(err)
	}
	return state
}

func (n *node) list() []mps.State {
	n.t.Helper()
	report, err := n.List(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	return report.Daemons
}

// serving waits until all daemons have a server.
func (n *node) serving() []mps.State {
	n.t.Helper()
	return n.until(func(all []mps.State) bool {
		return len(all) > 0 && !slices.ContainsFunc(all, func(s mps.State) bool { return s.Phase != mps.Running || s.ServerPID == 0 })
	})
}

func (n *node) at(name string) place { return n.cfg.place(name) }

// ask gives the daemon commands.
func (n *node) ask(name string, commands ...string) string {
	n.t.Helper()
	d := driver{host: hostOf(n.cfg), cfg: &n.cfg}
	out, err := d.command(n.t.Context(), n.at(name), commands...)
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

// controls lists the control daemons of a name that run.
func (n *node) controls(name string) []int {
	pids := slices.DeleteFunc(pidsOf(users(n.at(name).pipe())), func(pid int) bool {
		cmdline, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "cmdline"))
		return !strings.Contains(string(cmdline), program+"\x00serve\x00") // not who gives it commands
	})
	// A child that a daemon has forked looks like it until it executes its own program.
	return slices.DeleteFunc(slices.Clone(pids), func(pid int) bool {
		status, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "status"))
		return slices.ContainsFunc(pids, func(parent int) bool { return strings.Contains(string(status), "\nPPid:\t"+itoa(parent)+"\n") })
	})
}

func pidsOf(all []process) []int {
	var pids []int
	for _, p := range all {
		pids = append(pids, p.pid)
	}
	return pids
}

// until watches until the daemons are as they should be.
func (n *node) until(ok func([]mps.State) bool) []mps.State {
	n.t.Helper()
	ctx, cancel := context.WithTimeoutCause(n.t.Context(), time.Minute, errTimeout)
	defer cancel()
	var last []mps.State
	_ = n.Watch(ctx, func(r mps.Report) {
		if last = r.Daemons; ok(last) {
			cancel()
		}
	})
	if !ok(last) {
		n.t.Fatalf("%v; last seen: %+v", context.Cause(ctx), last)
	}
	return last
}

// gone fails unless nothing is left of a daemon.
func (n *node) gone(name string) {
	n.t.Helper()
	if pids := users(n.at(name).pipe()); len(pids) > 0 {
		n.t.Errorf("processes are left: %v", pids)
	}
	left, _ := filepath.Glob(string(n.at(name)) + "*")
	if len(left) > 0 {
		n.t.Errorf("files are left: %v", left)
	}
}

func one(name string) mps.Daemon {
	return mps.Daemon{Name: name, Devices: []gpu.UUID{"GPU-28933e90-dc02-c686-9dc4-c13a6a380b41"}, ThreadPercentage: 25, MemoryMiB: []int64{3072}}
}

func hostOf(cfg Config) driverroot.Host { return driverroot.NewHost(cfg.HostRoot) }
