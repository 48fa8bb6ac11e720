package main_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A fault of one client affects all clients; the server continues, and the
// kernel log names the process.
func TestMPSFault(t *testing.T) {
	n := newMPSNode(t, "h200")
	n.daemon(t)
	bystander := n.hold(t)
	server := n.server(t)
	if got := n.cuda(t, nil, "--fault"); !strings.HasSuffix(got, "cuda fault: "+illegal+"\n") {
		t.Errorf("the faulty one: %s", got)
	}
	if got := bystander.end(t); got != illegal {
		t.Errorf("the bystander: %q", got)
	}
	log, err := os.ReadFile(filepath.Join(n.root, "dev/kmsg"))
	if err != nil || !regexp.MustCompile(`^6,0,\d+,-;NVRM: Xid \(PCI:[0-9a-f:]+\): 31, pid=\d+, name=nvmlsim, .*MMU Fault: .*\n$`).Match(log) {
		t.Errorf("kernel log: %v\n%s", err, log)
	}
	if got := n.cuda(t, nil, "--alloc", "10"); !strings.Contains(got, "alloc 10 MiB: no error") || n.server(t) != server {
		t.Errorf("the newcomer at server %d: %s", n.server(t), got)
	}
}

func TestMPSServerKilled(t *testing.T) {
	n := newMPSNode(t, "h200")
	n.daemon(t)
	n.command(t, "set_default_active_thread_percentage 25")
	client := n.hold(t)
	server := n.server(t)
	kill(t, server)
	if got := client.end(t); got != rpcFailed {
		t.Errorf("the client: %q", got)
	}
	if got := n.cuda(t, nil); !strings.Contains(got, "SMs 32 ") || n.server(t) == server {
		t.Errorf("the next: %s", got)
	}
}

// Server and clients die with the control daemon, and its remaining files don't
// affect the next one.
func TestMPSControlKilled(t *testing.T) {
	n := newMPSNode(t, "h200")
	n.daemon(t)
	client := n.hold(t)
	pid, err := os.ReadFile(filepath.Join(n.pipe, "nvidia-cuda-mps-control.pid"))
	if err != nil {
		t.Fatal(err)
	}
	control, err := strconv.Atoi(string(pid))
	if err != nil {
		t.Fatal(err)
	}
	kill(t, control)
	if got := client.end(t); got != rpcFailed {
		t.Errorf("the client: %q", got)
	}
	if out, code := n.control(nil, "get_server_list\n"); code != 1 || !strings.HasPrefix(out, "Cannot find") {
		t.Errorf("%d, %q", code, out)
	}
	if got := n.cuda(t, nil); !strings.Contains(got, "SMs 132 free 142629 ") {
		t.Errorf("without MPS: %s", got)
	}
	if apps := smi(t, n.root, "--query-compute-apps=pid", "--format=csv,noheader"); apps != "" {
		t.Errorf("still on the GPU: %s", apps)
	}
	n.daemon(t)
	if got := n.cuda(t, nil); !strings.Contains(got, "context no error") || n.server(t) == 0 {
		t.Errorf("at the next: %s", got)
	}
}

func TestMPSKillCommand(t *testing.T) {
	n := newMPSNode(t, "h200")
	for what, left := range map[string]int{"server": 0, "control": 1} {
		n.daemon(t)
		client := n.hold(t)
		nvmlsim(t, "mps", "kill", what, "--root", n.root)
		if got := client.end(t); got != rpcFailed {
			t.Errorf("kill %s: the client ended with %q", what, got)
		}
		if out, code := n.control(nil, "quit\n"); code != left {
			t.Errorf("kill %s: %d, %s", what, code, out)
		}
	}
}

// quit waits for the clients until its time limit.
func TestMPSQuit(t *testing.T) {
	n := newMPSNode(t, "h200")
	n.daemon(t)
	client := n.hold(t)
	done := make(chan string)
	go func() {
		out, code := n.control(nil, "quit\n")
		done <- fmt.Sprint(code, out)
	}()
	for !strings.Contains(n.cuda(t, nil), "MPS server is not ready") {
		select {
		case got := <-done:
			t.Fatalf("quit has not waited: %q", got)
		default:
		}
	}
	if out, code := n.control(nil, "quit -t 1\n"); code != 0 || out != "" {
		t.Errorf("quit -t: %d, %q", code, out)
	}
	if got := <-done; got != "0" {
		t.Errorf("quit: %q", got)
	}
	if got := client.end(t); got != rpcFailed {
		t.Errorf("the client: %q", got)
	}
}

// A reboot ends MPS and all processes that use GPUs.
func TestMPSReboot(t *testing.T) {
	n := newMPSNode(t, "h200")
	n.daemon(t)
	client := n.hold(t)
	n.env = append(n.env, "CUDA_MPS_PIPE_DIRECTORY=/nowhere")
	direct := n.hold(t)
	nvmlsim(t, "reboot", "--root", n.root)
	if got := client.end(t); got != rpcFailed {
		t.Errorf("the client: %q", got)
	}
	if got := direct.end(t); got != "unknown error" {
		t.Errorf("without MPS: %q", got)
	}
	if apps := smi(t, n.root, "--query-compute-apps=pid", "--format=csv,noheader"); apps != "" {
		t.Errorf("still on the GPU: %s", apps)
	}
}

func TestMPSFaults(t *testing.T) {
	n := newMPSNode(t, "h200")
	nvmlsim(t, "fault", "MPSControl", "--code", "999", "--count", "1", "--root", n.root)
	if out, code := n.control(nil, "", "-d", "-M"); code != 1 || out != "Failed to start: Unknown Error\n" {
		t.Errorf("start that fails: %d, %q", code, out)
	}
	n.daemon(t)
	nvmlsim(t, "fault", "MPSServer", "--code", "999", "--count", "1", "--root", n.root)
	if got := n.cuda(t, nil); got != "cuda context MPS client failed to connect to the MPS control daemon or the MPS server\n" {
		t.Errorf("no server: %s", got)
	}
	if got := n.cuda(t, nil); !strings.Contains(got, "context no error") {
		t.Errorf("the next server: %s", got)
	}
	nvmlsim(t, "fault", "MPSCommand", "--code", "10", "--count", "1", "--root", n.root)
	if got := n.command(t, "get_server_list"); got != "Timeout\n" {
		t.Errorf("command: %q", got)
	}
}

// A server of one GPU that never gets ready: its control daemon answers, its client
// waits, and servers of another GPU that start later serve theirs.
func TestMPSServerThatNeverAnswers(t *testing.T) {
	n := newMPSNode(t, "2xh200")
	nvmlsim(t, "fault", "MPSServer", "--gpu", "0", "--hang", "--root", n.root)
	n.daemon(t, "CUDA_VISIBLE_DEVICES=0")
	n.command(t, "start_server -uid 0")
	waiting := make(chan string)
	go func() { waiting <- n.cuda(t, nil) }()

	other := *n
	other.pipe = filepath.Join(filepath.Dir(n.pipe), "other")
	other.env = append(slices.Clone(n.env), "CUDA_MPS_PIPE_DIRECTORY="+other.pipe)
	other.daemon(t, "CUDA_VISIBLE_DEVICES=1")
	if got := other.cuda(t, nil); !strings.Contains(got, "context no error") {
		t.Errorf("on another GPU: %s", got)
	}
	status := fmt.Sprint("get_server_status ", n.server(t))
	if got := n.command(t, status); got != "INITIALIZING\n" {
		t.Errorf("status %q", got)
	}
	select {
	case got := <-waiting:
		t.Fatalf("the client has not waited: %s", got)
	default:
	}
	nvmlsim(t, "fault", "--clear", "--gpu", "0", "--root", n.root)
	if got := <-waiting; !strings.Contains(got, "context no error") {
		t.Errorf("the client in the end: %s", got)
	}
	if got := n.command(t, status); got != "ACTIVE\n" {
		t.Errorf("status %q in the end", got)
	}
}
