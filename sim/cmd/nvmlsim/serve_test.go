package main_test

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// machines creates a directory of machine files, like a mounted ConfigMap.
func machines(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestServeInstallsUntilItIsStopped(t *testing.T) {
	dir := machines(t, map[string]string{"_default": "8xh100-80gb", "node-b": "2xl4"})
	for node, want := range map[string]int{"node-a": 8, "node-b": 2} {
		t.Run(node, func(t *testing.T) {
			root := filepath.Join(t.TempDir(), "driver")
			c := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), "serve", "--root", root, "--machine", dir, "--node-name", node)
			c.Stderr = os.Stderr
			out, err := c.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(out).ReadString('\n')
			if err != nil || !strings.Contains(line, "installed under "+root) {
				t.Fatalf("printed %q, error %v", line, err)
			}
			if got := strings.Count(smi(t, root, "-L"), "GPU-"); got != want {
				t.Errorf("%d GPUs, want %d", got, want)
			}
			if err := c.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := c.Wait(); err != nil {
				t.Errorf("after SIGTERM: %v", err)
			}
			if _, err := os.Stat(root); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is still there: %v", root, err)
			}
		})
	}
}

// Pods that use a machine's MIG instances may run longer than the simulator's
// pod: the next pod of the simulator must still have the instances.
func TestServeLeavesMachineInUse(t *testing.T) {
	root := filepath.Join(t.TempDir(), "driver")
	serve := func(whileItRuns func()) (printed string) {
		t.Helper()
		c := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), "serve", "--root", root, "--machine", "1xh100-80gb", "--node-name", "node-a")
		c.Stderr = os.Stderr
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewReader(out)
		if _, err := lines.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		whileItRuns()
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		last, err := io.ReadAll(lines)
		if err := errors.Join(err, c.Wait()); err != nil {
			t.Fatal(err)
		}
		return string(last)
	}
	var program *running
	last := serve(func() {
		c := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), "cuda", "--hold", "forever", "--root", root)
		c.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY=/nowhere")
		program = startHolding(t, c)
	})
	if !strings.Contains(last, "or running CUDA programs") {
		t.Errorf("with a CUDA program serve ends with %q", last)
	}
	last = serve(func() {
		if err := program.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if got := program.end(t); got != "no error" {
			t.Errorf("the program has not lived until now: %q", got)
		}
		smi(t, root, "-mig", "1")
		smi(t, root, "mig", "-cgi", "3g.40gb", "-C")
	})
	if !strings.Contains(last, "has MIG instances") {
		t.Errorf("with a MIG instance serve ends with %q", last)
	}
	serve(func() {
		if listed := smi(t, root, "-L"); !strings.Contains(listed, "MIG 3g.40gb") {
			t.Errorf("the MIG instance is gone:\n%s", listed)
		}
		smi(t, root, "mig", "-dci")
		smi(t, root, "mig", "-dgi")
	})
	if _, err := os.Stat(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is still there without MIG instances: %v", root, err)
	}
}

func TestServeRefusesNodeWithoutMachine(t *testing.T) {
	dir := machines(t, map[string]string{"node-b": "2xl4"})
	root := filepath.Join(t.TempDir(), "driver")
	out, err := exec.Command(filepath.Join(binaries.dir, "nvmlsim"), "serve", "--root", root, "--machine", dir, "--node-name", "node-a").CombinedOutput()
	if err == nil || !strings.Contains(string(out), `no machine for node "node-a": neither a file of that name nor _default`) {
		t.Errorf("error %v: %s", err, out)
	}
	if _, err := os.Stat(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is there: %v", root, err)
	}
}
