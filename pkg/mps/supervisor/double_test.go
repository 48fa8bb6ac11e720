package supervisor

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/failpoint"
)

// The test's program is also the supervisor's, and a double of
// nvidia-cuda-mps-control and its server that prints what those of driver 580
// do.
func TestMain(m *testing.M) {
	name := filepath.Base(os.Args[0])
	switch {
	case name == program:
		os.Exit(control(os.Args[1:]))
	case name == "nvidia-cuda-mps-server":
		_, _ = io.Copy(io.Discard, os.Stdin) // ends with the control daemon
		os.Exit(0)
	case len(os.Args) == 3 && os.Args[1] == "supervise":
		fmt.Fprintln(os.Stderr, supervise(os.Args[2]))
		os.Exit(1)
	}
	os.Exit(run(m))
}

// plain is this program without the race detector, which takes a second to
// start: the supervisor starts it hundreds of times.
var plain = os.Args[0]

func run(m *testing.M) int {
	if raced {
		dir, err := os.MkdirTemp("", "plain")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		plain = filepath.Join(dir, "plain.test")
		if out, err := exec.Command("go", "test", "-c", "-o", plain, ".").CombinedOutput(); err != nil {
			panic(fmt.Sprintf("build: %v: %s", err, out))
		}
	}
	return m.Run()
}

// supervise runs a supervisor that kills itself after the step that
// TEST_FAILPOINT names, and prints the steps on its standard output.
func supervise(text string) error {
	var cfg Config
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // it may have to be put into a cgroup first
	name, times, _ := strings.Cut(os.Getenv("TEST_FAILPOINT"), "#")
	left, _ := strconv.Atoi(times)
	var mu sync.Mutex
	cfg.Steps = failpoint.Call(func(step string) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Println(step)
		if step == name {
			if left--; left == 0 {
				_ = unix.Kill(os.Getpid(), unix.SIGKILL)
				select {}
			}
		}
	})
	s, err := New(cfg)
	if err != nil {
		return err
	}
	s.attention = flowcontrol.NewBackOff(20*time.Millisecond, 20*time.Millisecond)
	return s.Run(klog.NewContext(signalled(), klog.Background()))
}

const help = `CUDA MPS Control for Linux/Unix/QNX.

nvidia-cuda-mps-control [options] [command]
OPTIONS:
  -h,--help                Print this message
  -d,--daemon              Setup the daemon in the background
  -M,--multiuser-server    Enable multi-user mode

COMMAND:
  start_server -uid <user id>
`

// control is the double. Files beside its directory cause faults: "refuse" has
// the error that it prints instead of starting, "slow" is a pipe that it reads
// before it starts, "clients" make it wait when it has to quit, "deaf" makes it
// ignore that, "distracted" only the first time, "serverless" keeps it from
// starting a server, "garbled" makes it print limits in a form that no driver has, "held"
// leaves the output of commands open for two seconds after them.
func control(args []string) int {
	switch {
	case len(args) == 0:
		return command(os.Getenv(pipeVariable))
	case args[0] == "--help":
		fmt.Print(help)
		return 0
	case args[0] == "-d":
		return daemonize(args)
	case args[0] == "serve":
		serveDouble(os.Getenv(pipeVariable))
	}
	return 1
}

func quirk(name string) string {
	return filepath.Join(filepath.Dir(filepath.Dir(os.Args[0])), name)
}

func daemonize(args []string) int {
	if text, err := os.ReadFile(quirk("refuse")); err == nil {
		fmt.Print(string(text))
		return 1
	}
	_, _ = os.ReadFile(quirk("slow"))
	if conn, err := net.Dial("unix", filepath.Join(os.Getenv(pipeVariable), "control")); err == nil {
		_ = conn.Close()
		fmt.Println("An instance of this daemon is already running")
		return 1
	}
	read, write, err := os.Pipe()
	if err != nil {
		return 1
	}
	child := exec.Command(os.Args[0], append([]string{"serve"}, args...)...)
	child.ExtraFiles = []*os.File{write}
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := child.Start(); err != nil {
		return 1
	}
	_ = write.Close()
	if ready, _ := io.ReadAll(read); len(ready) == 0 {
		return 1
	}
	return 0
}

// command hands the commands on the standard input to the daemon.
func command(pipe string) int {
	conn, err := net.Dial("unix", filepath.Join(pipe, "control"))
	if err != nil {
		fmt.Println("Cannot find MPS control daemon process")
		return 1
	}
	commands, _ := io.ReadAll(os.Stdin)
	_, _ = conn.Write(commands)
	_ = conn.(*net.UnixConn).CloseWrite()
	_, _ = io.Copy(os.Stdout, conn)
	if _, err := os.Stat(quirk("held")); err == nil {
		holder := exec.Command("sleep", "2")
		holder.Stdout = os.Stdout
		if err := holder.Start(); err != nil {
			return 1
		}
	}
	return 0
}

type double struct {
	pipe    string
	threads string
	memory  map[string]string

	mu     sync.Mutex
	server *exec.Cmd // nil where there is none
}

// pid of the server; 0 where there is none.
func (d *double) pid() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server == nil {
		return 0
	}
	return d.server.Process.Pid
}

func serveDouble(pipe string) {
	_ = os.Remove(filepath.Join(pipe, "control"))
	l, err := net.Listen("unix", filepath.Join(pipe, "control"))
	if err != nil {
		os.Exit(1) //nolint:revive // this is the main function of the double
	}
	_ = os.WriteFile(filepath.Join(pipe, privileged), nil, 0o755)
	_ = os.WriteFile(filepath.Join(pipe, program+".pid"), []byte(strconv.Itoa(os.Getpid())), 0o666)
	_ = os.WriteFile(filepath.Join(os.Getenv(logVariable), "control.log"), []byte(strings.Join(os.Args, " ")+"\n"), 0o644)
	ready := os.NewFile(3, "ready")
	_, _ = ready.WriteString("ok")
	_ = ready.Close()
	d := double{pipe: pipe, threads: "100.0", memory: map[string]string{}}
	for {
		conn, err := l.Accept()
		if err != nil {
			os.Exit(1) //nolint:revive // as above
		}
		lines := bufio.NewScanner(conn)
		for lines.Scan() {
			d.do(conn, strings.Fields(lines.Text()))
		}
		_ = conn.Close()
	}
}

// rounded says a limit in the largest unit, rounded down.
func rounded(limit string) string {
	mib, err := strconv.Atoi(strings.TrimSuffix(limit, "M"))
	if err != nil || mib < 1024 {
		return limit
	}
	return fmt.Sprintf("%dG", mib/1024)
}

func (d *double) do(w io.Writer, words []string) {
	switch words = append(words, "", "", "", ""); words[0] {
	case "set_default_active_thread_percentage":
		n, _ := strconv.ParseFloat(words[1], 64)
		d.threads = fmt.Sprintf("%.1f", n)
		if _, err := os.Stat(quirk("garbled")); err == nil {
			fmt.Fprintln(w, "one quarter")
			return
		}
		fmt.Fprintln(w, d.threads)
	case "get_default_active_thread_percentage":
		fmt.Fprintln(w, d.threads)
	case "set_default_device_pinned_mem_limit":
		if _, err := os.Stat(quirk("limitless")); err != nil {
			d.memory["default "+words[1]] = words[2]
		}
	case "get_default_device_pinned_mem_limit":
		if limit := d.memory["default "+words[1]]; limit != "" {
			fmt.Fprintln(w, rounded(limit))
		}
	case "set_active_thread_percentage":
		d.memory["threads of "+words[1]] = words[2]
		fmt.Fprintln(w, words[2]+".0")
	case "set_device_pinned_mem_limit":
		if _, err := os.Stat(quirk("limitless")); err != nil {
			d.memory[words[1]+" "+words[2]] = words[3]
		}
	case "get_active_thread_percentage":
		fmt.Fprintln(w, d.memory["threads of "+words[1]]+".0")
	case "get_device_pinned_mem_limit":
		if limit := d.memory[words[1]+" "+words[2]]; limit != "" {
			fmt.Fprintln(w, rounded(limit))
		}
	case "start_server":
		d.startServer()
	case "get_server_list":
		if pid := d.pid(); pid != 0 {
			fmt.Fprintln(w, pid)
		}
	case "get_server_status":
		if pid := d.pid(); strconv.Itoa(pid) == words[1] {
			fmt.Fprintln(w, "ACTIVE")
		} else {
			fmt.Fprintf(w, "Server %s not found\n", words[1])
		}
	case "quit":
		d.quit()
	default:
		fmt.Fprintf(w, "Unknown command %q\n", words[0])
	}
}

func (d *double) startServer() {
	if _, err := os.Stat(quirk("serverless")); err == nil || d.pid() != 0 {
		return
	}
	server := exec.Command("/proc/self/exe") // its environment has the pipe directory
	server.Args[0] = "nvidia-cuda-mps-server"
	_, _ = server.StdinPipe()
	_ = server.Start()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.server = server
	go func() {
		_ = server.Wait()
		d.mu.Lock()
		defer d.mu.Unlock()
		d.server = nil
	}()
}

func (d *double) quit() {
	if _, err := os.Stat(quirk("deaf")); err == nil {
		return
	}
	if os.Remove(quirk("distracted")) == nil {
		return
	}
	if _, err := os.Stat(quirk("clients")); err == nil {
		time.Sleep(time.Second) // -t 1
	}
	if pid := d.pid(); pid != 0 {
		_ = unix.Kill(pid, unix.SIGKILL)
		for d.pid() != 0 {
			time.Sleep(time.Millisecond)
		}
	}
	_ = os.Remove(filepath.Join(d.pipe, program+".pid"))
	_ = os.WriteFile(quirk("ended"), nil, 0o644)
	os.Exit(0) //nolint:revive // as above
}

var errTimeout = errors.New("waited for too long")
