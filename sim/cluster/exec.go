package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Stdio has the streams of a command that runs in a machine; nil means none.
type Stdio struct {
	In       io.Reader
	Out, Err io.Writer
}

// Exec runs a command in a machine ("node-0", "control-plane") and returns its
// standard output. When it fails, the error includes its standard error.
func (c *Cluster) Exec(ctx context.Context, machine string, command ...string) ([]byte, error) {
	var out, stderr bytes.Buffer
	if err := c.Run(ctx, machine, Stdio{Out: &out, Err: &stderr}, command...); err != nil {
		return out.Bytes(), fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return out.Bytes(), nil
}

// Run runs a command inside a machine's namespaces, where the cluster's
// binaries come first in the search path. A command that fails gives an error
// that wraps *exec.ExitError.
func (c *Cluster) Run(ctx context.Context, machine string, stdio Stdio, command ...string) error {
	if len(command) == 0 {
		return errors.New("no command to run")
	}
	pid, err := c.machinePID(machine)
	if err != nil {
		return err
	}
	cmd, err := startIn(ctx, pid, stdio, command, "CONTAINERD_ADDRESS="+c.runtimeSocket())
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return fmt.Errorf("run %s in %s: %w", command[0], machine, err)
	}
	return nil
}

// startIn starts a command in the namespaces of process pid. A thread is
// sacrificed for it: its namespaces can't be changed back.
func startIn(ctx context.Context, pid int, stdio Stdio, command []string, env ...string) (*exec.Cmd, error) {
	type result struct {
		cmd *exec.Cmd
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		var r result
		if r.err = enterNamespaces(pid); r.err == nil {
			r.cmd, r.err = start(ctx, stdio, command, env)
		}
		done <- r
	}()
	r := <-done
	return r.cmd, r.err
}

func start(ctx context.Context, stdio Stdio, command, env []string) (*exec.Cmd, error) {
	path, err := lookPath(command[0])
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, command[1:]...)
	cmd.Args[0] = command[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Dir = stdio.In, stdio.Out, stdio.Err, "/"
	cmd.Env = slices.Concat(env, []string{
		"PATH=" + searchPath, "HOME=/root", "TERM=" + os.Getenv("TERM"),
		"CONTAINERD_NAMESPACE=k8s.io", "CRI_CONFIG_FILE=" + configDir + "/crictl.yaml",
	})
	return cmd, cmd.Start()
}

// lookPath finds a program in the file system that this thread sees.
func lookPath(name string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for dir := range strings.SplitSeq(searchPath, ":") {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s: %w", name, exec.ErrNotFound)
}

// enterNamespaces moves the calling thread into the namespaces of process pid;
// programs that it starts later run there.
func enterNamespaces(pid int) error {
	// A thread that shares its working directory can't change mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("leave the shared working directory: %w", err)
	}
	var namespaces []*os.File
	for _, name := range []string{"net", "uts", "pid", "mnt"} { // mnt last: /proc changes with it
		f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/ns/" + name)
		if errors.Is(err, fs.ErrNotExist) {
			return errors.New("the machine is not running")
		}
		if err != nil {
			return fmt.Errorf("open a namespace of process %d: %w", pid, err)
		}
		defer f.Close()
		namespaces = append(namespaces, f)
	}
	for _, f := range namespaces {
		if err := unix.Setns(int(f.Fd()), 0); err != nil {
			return fmt.Errorf("enter %s: %w", f.Name(), err)
		}
	}
	return nil
}

// Command is one of the cluster's programs (kubectl, helm), to be run on the host as
// the cluster's administrator. It collects no garbage until it uses 256 MiB, and runs on
// one processor: these programs run briefly and do little in parallel, so that garbage
// collection and more threads would only cost processor time.
func (c *Cluster) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.Binary(name), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.KubeconfigPath(), "GOGC=off", "GOMEMLIMIT=256MiB", "GOMAXPROCS=1")
	return cmd
}
