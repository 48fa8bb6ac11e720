package main_test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// user returns the CUDA program as a process of a user.
func (n *mpsNode) user(t *testing.T, uid uint32, args ...string) *exec.Cmd {
	t.Helper()
	for _, path := range []string{binaries.dir, n.root, filepath.Dir(n.pipe)} {
		for dir := path; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	c := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), append([]string{"cuda", "--root", n.root}, args...)...)
	c.Env = n.env
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	return c
}

// serverUser returns the user of the only server.
func (n *mpsNode) serverUser(t *testing.T) uint32 {
	t.Helper()
	info, err := os.Stat(fmt.Sprintf("/proc/%d", n.server(t)))
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Uid
}

// waiting starts the CUDA program as a user's process, and returns when it waits for the
// server of another user.
func (n *mpsNode) waiting(t *testing.T, uid uint32, out io.Writer) *exec.Cmd {
	t.Helper()
	c := n.user(t, uid)
	c.Stdout = out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("NEW CLIENT %d from user %d: Server is not ready", c.Process.Pid, uid)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if log, _ := os.ReadFile(filepath.Join(n.log, "control.log")); strings.Contains(string(log), text) {
			return c
		}
		if time.Now().After(deadline) {
			t.Fatalf("the daemon's log lacks %q", text)
		}
	}
}

// TestMPSUsers checks, as on an H100 with driver 580.159.04, that a daemon with -M
// serves all users by root's server, and that another daemon's server is a process of
// its client's user, whose last client others wait for.
func TestMPSUsers(t *testing.T) {
	n := newMPSNode(t, "h200")
	t.Run("multi-user", func(t *testing.T) {
		n.daemon(t)
		defer n.command(t, "quit -t 1")
		startHolding(t, n.user(t, 1001, "--hold", "forever"))
		if out, err := n.user(t, 1002).Output(); err != nil || !strings.Contains(string(out), "context no error") {
			t.Errorf("beside another user: %v, %s", err, out)
		}
		if uid := n.serverUser(t); uid != 0 {
			t.Errorf("the server belongs to user %d", uid)
		}
	})
	t.Run("one user at a time", func(t *testing.T) {
		if out, code := n.control(nil, "", "-d"); code != 0 {
			t.Fatalf("exit code %d, %s", code, out)
		}
		defer n.command(t, "quit -t 1")
		n.command(t, "start_server -uid 0")
		first := startHolding(t, n.user(t, 1001, "--hold", "forever"))
		if uid := n.serverUser(t); uid != 1001 {
			t.Errorf("the server belongs to user %d, not the client's", uid)
		}
		if out, err := n.user(t, 1001).Output(); err != nil {
			t.Errorf("beside the same user: %v, %s", err, out)
		}
		impatient := n.waiting(t, 1002, io.Discard)
		if err := impatient.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := impatient.Wait(); err == nil {
			t.Error("a program that was ended while it waited had a context")
		}
		var out strings.Builder
		second := n.waiting(t, 1002, &out)
		if uid := n.serverUser(t); uid != 1001 {
			t.Errorf("the server belongs to user %d while 1001 has a client", uid)
		}
		kill(t, first.cmd.Process.Pid)
		if err := second.Wait(); err != nil || !strings.Contains(out.String(), "context no error") {
			t.Errorf("after the other user: %v, %s", err, out.String())
		}
	})
}
