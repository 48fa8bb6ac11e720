package supervisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
)

const (
	// program controls MPS: with -d it becomes the daemon, otherwise it hands the
	// daemon commands.
	program = "nvidia-cuda-mps-control"
	// programPrefix starts the names of the daemon's and its server's programs.
	programPrefix = "nvidia-cuda-mps-"

	pipeVariable = "CUDA_MPS_PIPE_DIRECTORY"
	logVariable  = "CUDA_MPS_LOG_DIRECTORY"

	// commandTime is longer than a working daemon takes for a command; one about a
	// server waits until that has started.
	commandTime = 10 * time.Second
	// answerTime is the same for a command about nothing but the daemon.
	answerTime = 3 * time.Second
	// serverTime is the most that a server may take to start, or to be clean again
	// after a client's fault.
	serverTime = 20 * time.Second
	// firstServerPause is between two questions whether it has; it doubles.
	firstServerPause = 50 * time.Millisecond
)

// driver runs the programs of the host's NVIDIA driver.
type driver struct {
	host driverroot.Host
	cfg  *Config

	mu   sync.Mutex
	root driverroot.Root // as found last
	// abilities of the program that has this identity.
	abilities abilities
	of        string
}

// abilities are the options that a version of the program has.
type abilities struct {
	// multiUser: one daemon can serve several users (-M).
	multiUser bool
	// staticPartitions of multiprocessors (-S, from CUDA 13.1). Not used.
	staticPartitions bool
}

var optionPattern = regexp.MustCompile(`(?m)^\s+(-[A-Za-z])\b`)

// parseHelp reads the program's output for --help.
func parseHelp(help string) abilities {
	var a abilities
	for _, m := range optionPattern.FindAllStringSubmatch(help, -1) {
		switch m[1] {
		case "-M":
			a.multiUser = true
		case "-S":
			a.staticPartitions = true
		}
	}
	return a
}

// find returns the program as it is now: drivers appear and move while a node
// runs.
func (d *driver) find() (driverroot.Program, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.root.Library == "" || !d.exists(d.root.Library) {
		root, err := driverroot.Find(d.host, d.cfg.DriverRoot)
		if err != nil {
			return driverroot.Program{}, err
		}
		d.root = root
	}
	return d.root.Program(d.host, program)
}

func (d *driver) exists(hostPath string) bool {
	_, err := os.Stat(d.host.Path(hostPath))
	return err == nil
}

// able returns the program's abilities. It runs the program once.
func (d *driver) able(ctx context.Context, p driverroot.Program) (abilities, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	id := d.identity(p)
	if d.of == id {
		return d.abilities, nil
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	out, err := p.Command(ctx, d.host, "--help").CombinedOutput()
	if err != nil && len(out) == 0 {
		return abilities{}, fmt.Errorf("run %s --help: %w", p.Path, err)
	}
	d.abilities, d.of = parseHelp(string(out)), id
	klog.FromContext(ctx).Info("Found the MPS control program", "path", filepath.Join(p.Root, p.Path),
		"driverVersion", version(d.root.Library), "multiUser", d.abilities.multiUser, "staticPartitions", d.abilities.staticPartitions)
	return d.abilities, nil
}

// identity changes when the driver is replaced.
func (d *driver) identity(p driverroot.Program) string {
	id := d.root.Library + " " + p.Root + " " + p.Path
	if info, err := os.Stat(d.host.Path(d.root.Library)); err == nil {
		id += info.ModTime().String()
	}
	return id
}

// sharesMemory reports whether clients need the server's /dev/shm: since driver 580
// the shared memory has no name there.
func (d *driver) sharesMemory() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	major, _, _ := strings.Cut(version(d.root.Library), ".")
	number, err := strconv.Atoi(major)
	return err == nil && number < 580
}

// version of the driver, from the name of its library; "" where that doesn't
// tell.
func version(library string) string {
	_, v, _ := strings.Cut(library, "libnvidia-ml.so.")
	if !strings.Contains(v, ".") {
		return ""
	}
	return v
}

// environ is the environment of a daemon, and of whoever gives it commands.
func environ(p driverroot.Program, at place, devices []gpu.UUID) []string {
	names := make([]string, len(devices))
	for i, uuid := range devices {
		names[i] = string(uuid)
	}
	return append(slices.Clip(p.Env),
		"CUDA_VISIBLE_DEVICES="+strings.Join(names, ","), pipeVariable+"="+at.pipe(), logVariable+"="+at.log())
}

// start returns when the daemon takes commands, with its process id.
func (d *driver) start(ctx context.Context, want mps.Daemon, at place) (int, error) {
	p, err := d.find()
	if err != nil {
		return 0, err
	}
	able, err := d.able(ctx, p)
	if err != nil {
		return 0, err
	}
	args := []string{"-d"}
	if able.multiUser {
		args = append(args, "-M")
	}
	log, err := os.Create(at.startLog()) // not a pipe: the daemon would keep it open
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", program, err)
	}
	defer log.Close()
	l := launch{hostRoot: d.cfg.HostRoot, program: p, place: at, group: want.Name}
	cmd := l.command(ctx, environ(p, at, want.Devices), args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := l.start(cmd); err != nil {
		return 0, err
	}
	if err := cmd.Wait(); err != nil {
		return 0, fmt.Errorf("%w: %s refused to start for %v: %w", errNotStarted, program, want.Devices, withLog(err, at))
	}
	data, err := os.ReadFile(at.pidFile())
	if err != nil {
		return 0, fmt.Errorf("%w: %s started and left no pid file: %w", errNotStarted, program, withLog(err, at))
	}
	pid, err := parsePID(data)
	if err != nil {
		return 0, err
	}
	protect(pid) // its server starts later and inherits this
	return pid, nil
}

// errNotStarted says that the daemon's program was run, and there is no daemon.
var errNotStarted = errors.New("no daemon")

// protect has the process not be first in line when the node runs out of memory: all
// clients depend on the daemon and its server.
func protect(pid int) { _ = writeControl(fmt.Sprintf("/proc/%d/oom_score_adj", pid), "-900") }

// withLog adds the end of the daemon's log to an error.
func withLog(err error, at place) error {
	for _, path := range []string{at.startLog(), at.log() + "/control.log"} {
		if text := tail(path); text != "" {
			return fmt.Errorf("%w: %s", err, text)
		}
	}
	return fmt.Errorf("%w, and its log is empty: are the devices there, and does nvidia-smi see them?", err)
}

// tail returns the last lines of a log as one. The log may be of any size: each
// client makes it longer.
func tail(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	const most = 500
	if info, err := f.Stat(); err == nil {
		_, _ = f.Seek(max(0, info.Size()-most), io.SeekStart)
	}
	data, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.ToValidUTF8(strings.Join(lines[max(0, len(lines)-3):], "; "), "")
}

// errNoDaemon says that nothing answers at the pipe directory: the program was run to ask.
var errNoDaemon = errors.New("the MPS control daemon does not answer")

// command gives a daemon some commands in one session and returns what it
// printed.
func (d *driver) command(ctx context.Context, at place, commands ...string) (string, error) {
	p, err := d.find()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	env := environ(p, at, nil)
	cmd := p.Command(ctx, d.host)
	cmd.Env = env
	start := (*exec.Cmd).Start
	if p.Root != "/" { // the daemon's directory is seen there by the launched only
		l := launch{hostRoot: d.cfg.HostRoot, program: p, place: at}
		cmd, start = l.command(ctx, env), l.start
	}
	var out bytes.Buffer
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, time.Second
	if err := start(cmd); err != nil { // says nothing of the daemon
		return "", fmt.Errorf("run a program to ask the MPS control daemon: %w", err)
	}
	if err := driverroot.IgnoreWaitDelay(cmd.Wait()); err != nil {
		return "", fmt.Errorf("%w (%w: %s)", errNoDaemon, err, strings.TrimSpace(out.String()))
	}
	return out.String(), nil
}

// serve returns the process id of the daemon's server when it accepts clients, and
// starts a server if there is none.
func (d *driver) serve(ctx context.Context, at place) (int, error) {
	out, err := d.command(ctx, at, "get_server_list")
	if err == nil && len(parseServers(out)) == 0 {
		out, err = d.command(ctx, at, "start_server -uid 0", "get_server_list")
	}
	if err != nil {
		return 0, err
	}
	servers := parseServers(out)
	if len(servers) == 0 {
		return 0, withServerLog(errNoServer, at)
	}
	return servers[0], d.awaitServer(ctx, at, servers[0])
}

// awaitServer returns nil when the server takes clients.
func (d *driver) awaitServer(ctx context.Context, at place, pid int) error {
	ctx, cancel := context.WithTimeout(ctx, serverTime)
	defer cancel()
	pauses := flowcontrol.NewBackOff(firstServerPause, serverTime)
	for {
		out, err := d.command(ctx, at, fmt.Sprintf("get_server_status %d", pid))
		if err != nil {
			return err
		}
		_, lives := startOf(pid)
		switch {
		case !lives:
			return withServerLog(errServerEnded, at)
		case !strings.Contains(out, "INITIALIZING") && !strings.Contains(out, "FAULT"):
			return nil // ACTIVE, or a driver that has no such command
		}
		pauses.Next(string(at), time.Now())
		select {
		case <-time.After(pauses.Get(string(at))):
		case <-ctx.Done():
			return withServerLog(fmt.Errorf("the MPS server %d takes no clients yet, it is %s", pid, strings.TrimSpace(out)), at)
		}
	}
}

var (
	errNoServer    = errors.New("the control daemon has no MPS server and starts none")
	errServerEnded = errors.New("the MPS server ended as soon as it had started: another process may have the GPU")
)

// withServerLog appends the last lines of the server's log to the error.
func withServerLog(err error, at place) error {
	if text := tail(at.log() + "/server.log"); text != "" {
		return fmt.Errorf("%w; %s/server.log ends with: %s", err, at.log(), text)
	}
	return err
}

// ofServer are the commands that set the limits of a server that runs, and ask
// for them again.
func ofServer(want mps.Daemon, pid int) []string {
	commands := []string{fmt.Sprintf("set_active_thread_percentage %d %d", pid, want.Threads()), fmt.Sprintf("get_active_thread_percentage %d", pid)}
	for i, limit := range memory(want) {
		commands = append(commands, fmt.Sprintf("set_device_pinned_mem_limit %d %d %dM", pid, i, limit),
			fmt.Sprintf("get_device_pinned_mem_limit %d %d", pid, i))
	}
	return commands
}

// parseServers finds the process ids that get_server_list prints among other
// answers.
func parseServers(out string) []int {
	var pids []int
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		if pid, err := parsePID([]byte(line)); err == nil && serverPattern.MatchString(line) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// quit asks the daemon to end when its clients have, or soon without them. It
// returns false if no daemon listens.
func (d *driver) quit(ctx context.Context, at place) (listens bool) {
	ctx, cancel := context.WithTimeout(ctx, answerQuitTime)
	defer cancel()
	_, err := d.command(ctx, at, "quit -t 1")
	return err == nil || ctx.Err() != nil
}
