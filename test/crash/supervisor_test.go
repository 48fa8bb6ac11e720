//go:build integration

package crash_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/mps"
)

// supervisor is one process of the MPS supervisor.
type supervisor struct {
	cmd   *exec.Cmd
	steps string        // file with the steps it has come to
	done  chan struct{} // closed when it is dead
}

// asHost runs a program with the fake host's file system as its root, including
// the kernel's file systems.
const asHost = `set -e
host=$1; shift
mkdir -p $host/proc $host/dev
mount --rbind /proc $host/proc
mount --rbind /dev $host/dev
exec "$@"`

// layRun creates the supervisor's directory on the fake host, and links the
// same path here to it.
func (n *node) layRun() error {
	onHost := filepath.Join(n.host.Host, n.run)
	return errors.Join(os.MkdirAll(onHost, 0o755), os.Symlink(onHost, n.run))
}

// supervise starts a supervisor, as its DaemonSet does, and waits until it
// answers.
func (n *node) supervise(t *testing.T) *supervisor {
	t.Helper()
	s := n.startSupervisor(t, "")
	client := n.client(t)
	err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		select {
		case <-s.done:
			return false, fmt.Errorf("it ended with %v", s.cmd.ProcessState)
		default:
		}
		_, err := client.List(ctx)
		return err == nil, nil
	})
	if err != nil {
		t.Fatalf("start the supervisor: %v", err)
	}
	return s
}

// startSupervisor starts one that dies after the step, or never if it is empty.
func (n *node) startSupervisor(t *testing.T, step string) *supervisor {
	t.Helper()
	out, err := os.CreateTemp(t.TempDir(), "supervisor")
	if err != nil {
		t.Fatal(err)
	}
	s := &supervisor{steps: out.Name() + ".steps", done: make(chan struct{})}
	s.cmd = exec.Command("unshare", "--mount", "sh", "-c", asHost, "sh", n.host.Host,
		shared.supervisor, "--run-dir", n.run, "--host-root", n.host.Host, "--driver-root", n.host.Root, "-v", "4")
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // it must not outlive a killed test
	s.cmd.Env = append(os.Environ(), failpoint.Variable+"="+step, failpoint.RecordVariable+"="+s.steps)
	s.cmd.Stdout, s.cmd.Stderr = out, out
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(s.done)
		_ = s.cmd.Wait()
	}()
	t.Cleanup(func() {
		s.kill()
		n.killDaemons(t)
		if data, _ := os.ReadFile(out.Name()); t.Failed() {
			t.Logf("the supervisor that dies after %q:\n%s", step, data)
		}
		out.Close()
	})
	return s
}

// ran returns the steps that the supervisor has come to.
func (s *supervisor) ran(t *testing.T) []string {
	t.Helper()
	return readSteps(t, s.steps)
}

func (s *supervisor) waitDead(t *testing.T) {
	t.Helper()
	select {
	case <-s.done:
	case <-time.After(patience):
		t.Fatal("the supervisor did not come to the step")
	}
}

func (s *supervisor) lives() bool {
	select {
	case <-s.done:
		return false
	default:
		return true
	}
}

func (s *supervisor) kill() {
	_ = s.cmd.Process.Kill()
	<-s.done
}

func (n *node) socket() string { return filepath.Join(n.run, "supervisor.sock") }

func (n *node) client(t *testing.T) *mps.Client {
	t.Helper()
	c, err := mps.Dial(n.socket())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// daemons are the directories of MPS daemons on the node.
func (n *node) daemons(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(n.run, "d"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// process is a process of MPS: "control" or "server", and its number.
type process struct {
	kind string
	pid  int
}

// forgetRun empties the supervisor's directory, which is in memory.
func (n *node) forgetRun(t *testing.T) {
	t.Helper()
	entries, err := os.ReadDir(n.run)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(n.run, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
}

// processes are those of MPS on the node, of the daemons of these names, or of all.
func (n *node) processes(t *testing.T, of ...string) []process {
	t.Helper()
	var list []process
	programs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range programs {
		line, _ := os.ReadFile(path) // gone meanwhile, or dead: empty
		program, _, _ := bytes.Cut(line, []byte{0})
		kind, ok := strings.CutPrefix(filepath.Base(string(program)), "nvidia-cuda-mps-")
		if isCommand := kind == "control" && !bytes.Contains(line, []byte("\x00-")); !ok || isCommand {
			continue // not of MPS, or the supervisor asks a daemon something
		}
		env, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "environ"))
		dir, ok := pipeDirectory(env)
		name, isOurs := strings.CutPrefix(dir, filepath.Join(n.run, "d")+"/")
		name, _, _ = strings.Cut(name, "/")
		if !ok || !isOurs || (len(of) > 0 && !slices.Contains(of, name)) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, process{kind, pid})
	}
	return list
}

func pipeDirectory(environ []byte) (string, bool) {
	for variable := range bytes.SplitSeq(environ, []byte{0}) {
		if dir, ok := bytes.CutPrefix(variable, []byte("CUDA_MPS_PIPE_DIRECTORY=")); ok {
			return string(dir), true
		}
	}
	return "", false
}

// killDaemons kills all processes of MPS on the node, or those of these daemons.
func (n *node) killDaemons(t *testing.T, of ...string) {
	t.Helper()
	for _, p := range n.processes(t, of...) {
		if p, err := os.FindProcess(p.pid); err == nil {
			_ = p.Kill()
		}
	}
}

// controls are the control daemons, by name, that a claim's shares are clients
// of.
func (n *node) controls(t *testing.T, c *resourceapi.ResourceClaim) map[string]int {
	t.Helper()
	controls := map[string]int{}
	for _, r := range c.Status.Allocation.Devices.Results {
		i := strings.LastIndex(r.Device, "-mps")
		if i < 0 {
			continue
		}
		for _, p := range n.processes(t, r.Device[:i]) {
			if p.kind == "control" {
				controls[r.Device[:i]] = p.pid
			}
		}
	}
	return controls
}

// checkUnshared wants nothing left that lets claims share a GPU.
func (n *node) checkUnshared(t *testing.T) {
	t.Helper()
	if names, processes := n.daemons(t), n.processes(t); len(names)+len(processes) > 0 {
		t.Errorf("MPS daemons are left: %v, %v", names, processes)
	}
	for i, g := range n.hardware.State().GPUs {
		if g.ComputeMode != 0 || g.TimeSlice != 0 {
			t.Errorf("GPU %d has compute mode %d and time slice %d", i, g.ComputeMode, g.TimeSlice)
		}
	}
}

// consume makes the result say how much it takes of a device that is given
// several times.
func consume(r *resourceapi.DeviceRequestAllocationResult) {
	if !strings.HasSuffix(r.Device, "-mps") {
		return
	}
	r.ShareID = new(uuid.NewUUID())
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{
		"memory": resource.MustParse("4Gi"), "threadPercentage": resource.MustParse("50"),
	}
}

// configured is a claim's configuration of all its requests.
func configured(parameters string) []resourceapi.DeviceAllocationConfiguration {
	return []resourceapi.DeviceAllocationConfiguration{{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
		}},
	}}
}
