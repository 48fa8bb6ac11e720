package main_test

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// mpsNode is a machine with directories for MPS.
type mpsNode struct {
	root, pipe, log string
	env             []string
}

func newMPSNode(t *testing.T, machine string) *mpsNode {
	t.Helper()
	dir, err := os.MkdirTemp("", "mps") //nolint:usetesting // the name of a socket can't be long
	if err != nil {
		t.Fatal(err)
	}
	n := &mpsNode{root: install(t, machine), pipe: filepath.Join(dir, "pipe"), log: filepath.Join(dir, "log")}
	n.env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+n.pipe, "CUDA_MPS_LOG_DIRECTORY="+n.log)
	t.Cleanup(func() {
		nvmlsim(t, "mps", "kill", "all", "--root", n.root)
		for code := 0; code == 0; {
			_, code = n.control(nil, "get_server_list\n") // until no daemon is left
		}
		if t.Failed() {
			for _, name := range []string{"control.log", "server.log"} {
				b, _ := os.ReadFile(filepath.Join(n.log, name))
				t.Logf("%s:\n%s", name, b)
			}
		}
		_ = os.RemoveAll(dir)
	})
	return n
}

// control runs nvidia-cuda-mps-control.
func (n *mpsNode) control(env []string, commands string, args ...string) (out string, code int) {
	c := exec.Command(filepath.Join(n.root, "usr/bin/nvidia-cuda-mps-control"), args...)
	c.Env, c.Stdin = append(slices.Clone(n.env), env...), strings.NewReader(commands)
	b, err := c.Output()
	if err != nil && c.ProcessState == nil {
		return err.Error(), -1
	}
	return string(b), c.ProcessState.ExitCode()
}

// daemon starts the control daemon.
func (n *mpsNode) daemon(t *testing.T, env ...string) {
	t.Helper()
	if out, code := n.control(env, "", "-d", "-M"); code != 0 || out != "" {
		t.Fatalf("nvidia-cuda-mps-control -d: exit code %d, %s", code, out)
	}
}

// command sends commands to the daemon.
func (n *mpsNode) command(t *testing.T, lines ...string) string {
	t.Helper()
	out, code := n.control(nil, strings.Join(lines, "\n")+"\n")
	if code != 0 {
		t.Fatalf("%q: exit code %d, %s", lines, code, out)
	}
	return out
}

// cuda runs the CUDA program and returns what it printed, without milliseconds.
func (n *mpsNode) cuda(t *testing.T, env []string, args ...string) string {
	t.Helper()
	c := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), append([]string{"cuda", "--root", n.root}, args...)...)
	c.Env = append(slices.Clone(n.env), env...)
	out, _ := c.Output() // the output shows the error
	return regexp.MustCompile(`(context .*) \d+ ms`).ReplaceAllString(string(out), "$1")
}

// running is a CUDA program in the background.
type running struct {
	cmd *exec.Cmd
	out *bufio.Reader
}

// hold starts a CUDA program and returns when it has its context.
func (n *mpsNode) hold(t *testing.T, args ...string) *running {
	t.Helper()
	c := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), append([]string{"cuda", "--hold", "forever", "--root", n.root}, args...)...)
	c.Env = n.env
	return startHolding(t, c)
}

func startHolding(t *testing.T, c *exec.Cmd) *running {
	t.Helper()
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	r := &running{c, bufio.NewReader(out)}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	for _, want := range []string{"context no error", "SMs"} {
		if line, err := r.out.ReadString('\n'); err != nil || !strings.Contains(line, want) {
			t.Fatalf("printed %q, %v, want %q", line, err, want)
		}
	}
	return r
}

// end returns how the program ended.
func (r *running) end(t *testing.T) string {
	t.Helper()
	b, err := io.ReadAll(r.out)
	if err != nil {
		t.Fatal(err)
	}
	_, how, _ := strings.Cut(strings.TrimSpace(string(b)), "s: ")
	return how
}

// server returns the PID of the only server.
func (n *mpsNode) server(t *testing.T) int {
	t.Helper()
	pid, err := strconv.Atoi(strings.TrimSpace(n.command(t, "get_server_list")))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

const (
	rpcFailed = "the remote procedural call between the MPS server and the MPS client failed"
	illegal   = "an illegal memory access was encountered"
	busy      = "cuda context all CUDA-capable devices are busy or unavailable\n"
)
