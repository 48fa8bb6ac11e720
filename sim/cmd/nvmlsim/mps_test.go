package main_test

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestMPSSession repeats a session with the real daemon.
func TestMPSSession(t *testing.T) {
	n := newMPSNode(t, "2xh200")
	if out, code := n.control(nil, "get_server_list\n"); code != 1 || out != "Cannot find MPS control daemon process\n" {
		t.Errorf("without a daemon: %d, %q", code, out)
	}
	n.daemon(t, "CUDA_VISIBLE_DEVICES=0")
	if out, code := n.control(nil, "", "-d"); code != 1 || out != "An instance of this daemon is already running\n" {
		t.Errorf("second daemon: %d, %q", code, out)
	}
	for _, c := range []struct{ command, want string }{
		{"get_default_active_thread_percentage", "100.0\n"},
		{"get_default_device_pinned_mem_limit 0", ""},
		{"set_default_active_thread_percentage 25", "25.0\n"},
		{"set_default_device_pinned_mem_limit 0 3G", ""},
		{"get_default_device_pinned_mem_limit 0", "3G\n"},
		{"set_default_device_pinned_mem_limit 1 3G", ""},
		{"bogus", "Unknown command \"bogus\"\n"},
		{"get_server_list", ""},
		{"", ""},
	} {
		if got := n.command(t, c.command); got != c.want {
			t.Errorf("%s: %q, want %q", c.command, got, c.want)
		}
	}
	n.command(t, "start_server -uid 0")
	server := n.server(t)
	if s := n.command(t, fmt.Sprint("get_server_status ", server)); s != "ACTIVE\n" && s != "INITIALIZING\n" {
		t.Errorf("status %q", s)
	}
	n.hold(t)
	n.hold(t)
	pids := strings.Fields(n.command(t, fmt.Sprint("get_client_list ", server)))
	if len(pids) != 2 {
		t.Fatalf("clients %v", pids)
	}
	bus := strings.TrimSpace(smi(t, n.root, "-i", "0", "--query-gpu=pci.bus_id", "--format=csv,noheader"))[9:]
	if diff := cmp.Diff(fmt.Sprintf("[0] %s, NVIDIA H200\n%s.1\n%s.1\n", bus, pids[0], pids[1]), n.command(t, "get_device_client_list")); diff != "" {
		t.Errorf("get_device_client_list (-want +got):\n%s", diff)
	}
	uuid := strings.TrimSpace(smi(t, n.root, "-i", "0", "--query-gpu=uuid", "--format=csv,noheader"))
	ps := strings.Split(n.command(t, "ps"), "\n")
	if len(ps) != 4 || ps[0] != "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        " ||
		!strings.HasPrefix(ps[1], fmt.Sprintf("%-10s%-10d%-15d%-26s", pids[0], 1, server, uuid[:22])) {
		t.Errorf("ps: %q", ps)
	}
	apps := smi(t, n.root, "--query-compute-apps=pid,process_name,used_gpu_memory", "--format=csv")
	want := fmt.Sprintf("pid, process_name, used_gpu_memory [MiB]\n%d, nvidia-cuda-mps-server, 66 MiB\n%s, ", server, pids[0])
	if !strings.HasPrefix(apps, want) || strings.Count(apps, "145 MiB") != 2 {
		t.Errorf("nvidia-smi:\n%s", apps)
	}
}

// TestMPSFiles checks the files in the pipe directory while a daemon runs and
// after its end.
func TestMPSFiles(t *testing.T) {
	n := newMPSNode(t, "h200")
	list := func() map[string]string {
		modes := map[string]string{}
		entries, err := os.ReadDir(n.pipe)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			fi, err := e.Info()
			if err != nil {
				t.Fatal(err)
			}
			modes[e.Name()] = fi.Mode().String()
		}
		return modes
	}
	n.daemon(t)
	left := map[string]string{"control": "Srw-rw-rw-", "control_lock": "-rw-rw-rw-", "control_privileged": "Srwxr-xr-x"}
	all := map[string]string{"log": "prwxrwxrwx", "nvidia-cuda-mps-control.pid": "-rw-rw-rw-"}
	maps.Copy(all, left)
	if diff := cmp.Diff(all, list()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	pid, err := os.ReadFile(filepath.Join(n.pipe, "nvidia-cuda-mps-control.pid"))
	if err != nil {
		t.Fatal(err)
	}
	if args, err := os.ReadFile("/proc/" + string(pid) + "/cmdline"); err != nil || string(args) != "nvidia-cuda-mps-control\x00-d\x00-M\x00" {
		t.Errorf("daemon %q is %q, %v", pid, args, err)
	}
	n.command(t, "quit")
	if diff := cmp.Diff(left, list()); diff != "" {
		t.Errorf("after quit (-want +got):\n%s", diff)
	}
	if out, code := n.control(nil, "get_server_list\n"); code != 1 {
		t.Errorf("after quit: %d, %q", code, out)
	}
	n.daemon(t) // replaces the files of the old one
}

// Through the socket for all users, the only one in containers, users and root
// may send queries and set the percentage of a running server.
func TestMPSPrivileges(t *testing.T) {
	n := newMPSNode(t, "h200")
	n.daemon(t)
	n.command(t, "set_default_active_thread_percentage 25", "start_server -uid 0")
	server := n.server(t)
	inside := *n
	inside.pipe = filepath.Join(filepath.Dir(n.pipe), "clients")
	inside.env = append(slices.Clone(n.env), "CUDA_MPS_PIPE_DIRECTORY="+inside.pipe)
	if err := os.Mkdir(inside.pipe, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(n.pipe, "control"), filepath.Join(inside.pipe, "control")); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"set_default_active_thread_percentage 100", "set_default_device_pinned_mem_limit 0 20G", "quit"} {
		if got := inside.command(t, command); !strings.Contains(got, "privilege") {
			t.Errorf("%s: %q", command, got)
		}
	}
	if got := inside.command(t, "get_default_active_thread_percentage"); got != "25.0\n" {
		t.Errorf("the default: %q", got)
	}
	if got := inside.command(t, fmt.Sprintf("set_active_thread_percentage %d 50", server)); got != "50.0\n" {
		t.Errorf("the server's: %q", got)
	}
	if got := inside.cuda(t, nil); !strings.Contains(got, "SMs 66") {
		t.Errorf("a client: %q", got)
	}
}

func TestMPSLimits(t *testing.T) {
	n := newMPSNode(t, "h200")
	n.daemon(t, "CUDA_VISIBLE_DEVICES=0")
	n.command(t, "set_default_active_thread_percentage 25", "set_default_device_pinned_mem_limit 0 3G")
	n.cuda(t, nil) // starts the server
	for name, c := range map[string]struct {
		env   []string
		alloc []string
		want  string
	}{
		"the daemon's": {nil, []string{"2048", "2G"}, "SMs 32 free 2927 total 143155 MiB\n2048: no error\n2048: out of memory\n"},
		"lower": {
			[]string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G"}, []string{"200", "2048"},
			"SMs 12 free 952 total 143155 MiB\n200: no error\n2048: out of memory\n",
		},
		"higher": {
			[]string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=90", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=9G"}, []string{"2048", "2048", "8000"},
			"SMs 32 free 2927 total 143155 MiB\n2048: no error\n2048: out of memory\n8000: out of memory\n",
		},
		"of another device": {[]string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=1=1G"}, []string{"8000"}, "SMs 32 free 142944 total 143155 MiB\n8000: no error\n"},
		"device named":      {[]string{"CUDA_VISIBLE_DEVICES=0"}, []string{"100"}, "SMs 32 free 2927 total 143155 MiB\n100: no error\n"},
		"outside MPS":       {[]string{"CUDA_MPS_PIPE_DIRECTORY=/nowhere"}, []string{"8000"}, "SMs 132 free 142563 total 143155 MiB\n8000: no error\n"},
		"no such device":    {[]string{"CUDA_VISIBLE_DEVICES=1"}, nil, "cuda context no CUDA-capable device is detected\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var args []string
			for _, a := range c.alloc {
				args = append(args, "--alloc", a)
			}
			got := strings.ReplaceAll(n.cuda(t, c.env, args...), "cuda context no error\n", "")
			got = strings.ReplaceAll(strings.ReplaceAll(got, "cuda alloc ", ""), " MiB: ", ": ")
			if got = strings.Replace(got, "cuda SMs", "SMs", 1); got != c.want {
				t.Errorf("got\n%swant\n%s", got, c.want)
			}
		})
	}
}

// Defaults apply to servers that start later; a running one has separate
// commands.
func TestMPSLimitsOfARunningServer(t *testing.T) {
	n := newMPSNode(t, "h200")
	n.daemon(t)
	n.command(t, "start_server -uid 0")
	n.command(t, "set_default_active_thread_percentage 50", "set_default_device_pinned_mem_limit 0 9G")
	if got := n.cuda(t, nil); !strings.Contains(got, "SMs 132 free 142575 ") {
		t.Errorf("defaults after the start: %s", got)
	}
	server := n.server(t)
	if got := n.command(t, fmt.Sprintf("set_active_thread_percentage %d 25", server), fmt.Sprintf("set_device_pinned_mem_limit %d 0 3G", server),
		fmt.Sprintf("get_active_thread_percentage %d", server), fmt.Sprintf("get_device_pinned_mem_limit %d 0", server)); got != "25.0\n25.0\n3G\n" {
		t.Errorf("limits of the server: %q", got)
	}
	if got := n.cuda(t, nil); !strings.Contains(got, "SMs 32 free 2927 ") {
		t.Errorf("with the server's own: %s", got)
	}
	if got := n.command(t, "set_active_thread_percentage 1 25"); got != "Server 1 not found\n" {
		t.Errorf("another server: %q", got)
	}
	kill(t, server)
	if got := n.cuda(t, nil); !strings.Contains(got, "SMs 66 free 8945 ") {
		t.Errorf("the next server has not the defaults: %s", got)
	}
}

func TestMPSDevices(t *testing.T) {
	n := newMPSNode(t, "3xh200")
	smi(t, n.root, "-i", "2", "-mig", "1")
	smi(t, n.root, "mig", "-i", "2", "-cgi", "3g.71gb,3g.71gb", "-C")
	uuids := regexp.MustCompile(`UUID: ([^)]*)`).FindAllStringSubmatch(smi(t, n.root, "-L"), -1)
	second, mig := uuids[1][1], uuids[4][1]
	for name, c := range map[string]struct {
		visible string
		limits  []string
		args    []string
		want    string
	}{
		"UUID":           {second, nil, nil, "SMs 132 free 142575 "},
		"index":          {"1", nil, nil, "SMs 132 free 142575 "},
		"MIG device":     {mig, []string{"set_default_active_thread_percentage 50", "set_default_device_pinned_mem_limit 0 10G"}, nil, "SMs 30 free 10102 total 71424 "},
		"second of two":  {"0," + second, []string{"set_default_device_pinned_mem_limit 0 1G", "set_default_device_pinned_mem_limit 1 2G"}, []string{"--device", "1"}, "SMs 132 free 1534 "},
		"limit by UUID":  {second, []string{"set_default_device_pinned_mem_limit " + second + " 1G"}, nil, "SMs 132 free 142575 "},
		"no such device": {"7", nil, nil, "context MPS client failed to connect to the MPS control daemon or the MPS server"},
	} {
		t.Run(name, func(t *testing.T) {
			n.daemon(t, "CUDA_VISIBLE_DEVICES="+c.visible)
			defer n.command(t, "quit")
			n.command(t, c.limits...)
			if got := n.cuda(t, nil, c.args...); !strings.Contains(got, c.want) {
				t.Errorf("want %q in:\n%s", c.want, got)
			}
		})
	}
	n.daemon(t, "CUDA_VISIBLE_DEVICES="+mig)
	n.hold(t)
	if out, err := exec.Command(filepath.Join(n.root, "usr/bin/nvidia-smi"), "mig", "-dci", "-i", "2").CombinedOutput(); err == nil || !strings.Contains(string(out), "In use by another client") {
		t.Errorf("destroyed under an MPS server: %v, %s", err, out)
	}
}

// In exclusive mode one process has the GPU: an MPS server for all its clients.
func TestComputeModes(t *testing.T) {
	n := newMPSNode(t, "h200")
	direct := []string{"CUDA_MPS_PIPE_DIRECTORY=/nowhere"}
	smi(t, n.root, "-c", "EXCLUSIVE_PROCESS")
	if got := n.cuda(t, direct); !strings.Contains(got, "context no error") {
		t.Errorf("alone: %s", got)
	}
	n.daemon(t)
	n.command(t, "start_server -uid 0")
	n.hold(t)
	if got := n.cuda(t, nil); !strings.Contains(got, "context no error") {
		t.Errorf("by MPS: %s", got)
	}
	if got := n.cuda(t, direct); got != busy {
		t.Errorf("beside MPS: %s", got)
	}
	nvmlsim(t, "mps", "kill", "control", "--root", n.root)
	smi(t, n.root, "-c", "2")
	if got := n.cuda(t, direct); got != busy {
		t.Errorf("prohibited: %s", got)
	}
	smi(t, n.root, "compute-policy", "--set-timeslice", "3")
	nvmlsim(t, "reboot", "--root", n.root)
	if got := smi(t, n.root, "--query-gpu=compute_mode", "--format=csv,noheader") + smi(t, n.root, "compute-policy", "-l"); !strings.HasPrefix(got, "Default\n") || !strings.Contains(got, "Timeslice       Default") {
		t.Errorf("after a reboot:\n%s", got)
	}
}

// A supervisor that runs the driver's programs in the driver's root finds no
// /proc, no /dev/null and no libraries there.
func TestMPSChrooted(t *testing.T) {
	n := newMPSNode(t, "h200")
	for _, name := range []string{"pipe", "log"} {
		if err := os.Mkdir(filepath.Join(n.root, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	run := func(commands string, args ...string) string {
		// Use a pipe, because exec opens the null device outside of the chroot.
		c := exec.Command("/usr/bin/nvidia-cuda-mps-control", args...)
		c.SysProcAttr = &syscall.SysProcAttr{Chroot: n.root}
		c.Dir = "/"
		c.Env = []string{"PATH=/usr/bin", "CUDA_VISIBLE_DEVICES=0", "CUDA_MPS_PIPE_DIRECTORY=/pipe", "CUDA_MPS_LOG_DIRECTORY=/log"}
		c.Stdin = strings.NewReader(commands)
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("%v %q: %v, %s", args, commands, err, out)
		}
		return string(out)
	}
	run("", "-d", "-M")
	if out := run("set_default_active_thread_percentage 50\nstart_server -uid 0\nget_server_list\n"); !regexp.MustCompile(`^50\.0\n\d+\n$`).MatchString(out) {
		t.Errorf("%q", out)
	}
	n.env = append(n.env, "CUDA_MPS_PIPE_DIRECTORY="+filepath.Join(n.root, "pipe"))
	if got := n.cuda(t, nil); !strings.Contains(got, "SMs 66 free 142818 ") {
		t.Errorf("%s", got)
	}
	run("quit\n")
}

// A container has the driver's files and its GPU's device nodes, read-only, and
// the pipe directory. If a program bypasses the pipe directory, only the compute
// mode limits it.
func TestMPSClientInContainer(t *testing.T) {
	n := newMPSNode(t, "2xh200")
	n.daemon(t, "CUDA_VISIBLE_DEVICES=1")
	n.command(t, "set_default_active_thread_percentage 25", "set_default_device_pinned_mem_limit 0 3G")
	inside := func(node string) func(args ...string) *exec.Cmd {
		dir := container(t, n.root, "nvidiactl", node)
		mountFirmware(t, n.root, dir)
		firmware := filepath.Join(dir, "lib/firmware/nvidia/580.159.04/gsp_nvmlsim.bin")
		if err := syscall.Mount("", firmware, "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_RDONLY, ""); err != nil {
			t.Fatal(err)
		}
		program, err := os.ReadFile(filepath.Join(binaries.dir, "nvmlsim"))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "usr/bin/nvmlsim"), program, 0o755); err != nil {
			t.Fatal(err)
		}
		pipe := filepath.Join(dir, "tmp/nvidia-mps")
		if err := os.MkdirAll(pipe, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mount(n.pipe, pipe, "", syscall.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = syscall.Unmount(pipe, 0) })
		for _, name := range []string{"nvidiactl", node} { // not what the umask made of them
			if err := os.Chmod(filepath.Join(dir, "dev", name), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		return func(args ...string) *exec.Cmd {
			c := exec.Command("/usr/bin/nvmlsim", append([]string{"cuda"}, args...)...)
			c.SysProcAttr = &syscall.SysProcAttr{Chroot: dir, Cloneflags: syscall.CLONE_NEWPID, Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			c.Dir, c.Env = "/", []string{"PATH=/usr/bin", "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"}
			return c
		}
	}
	cuda := inside("nvidia1")
	holder := startHolding(t, cuda("--hold", "forever"))
	clients := n.command(t, fmt.Sprint("get_client_list ", n.server(t)))
	if clients != fmt.Sprintln(holder.cmd.Process.Pid) {
		t.Errorf("clients %q, want %d", clients, holder.cmd.Process.Pid)
	}
	out, err := cuda("--alloc", "2048", "--alloc", "2048").CombinedOutput()
	if want := "SMs 32 free 2927 total 143155 MiB\ncuda alloc 2048 MiB: no error\ncuda alloc 2048 MiB: out of memory\n"; err != nil || !strings.HasSuffix(string(out), want) {
		t.Errorf("%v, %s", err, out)
	}
	out, _ = inside("nvidia0")().CombinedOutput()
	if !strings.HasPrefix(string(out), "cuda context no CUDA-capable device is detected") {
		t.Errorf("with another GPU's device node: %s", out)
	}
	free := cuda()
	free.Env = append(free.Env, "CUDA_MPS_PIPE_DIRECTORY=/nowhere")
	if out, err := free.CombinedOutput(); err != nil || !strings.Contains(string(out), "SMs 132 free 142") {
		t.Errorf("without MPS: %v, %s", err, out)
	}
	smi(t, n.root, "-c", "3")
	free = cuda()
	free.Env = append(free.Env, "CUDA_MPS_PIPE_DIRECTORY=/nowhere")
	if out, err := free.CombinedOutput(); err == nil || !strings.Contains(string(out), "busy or unavailable") {
		t.Errorf("without MPS in exclusive mode: %v, %s", err, out)
	}
}

func TestComputePolicy(t *testing.T) {
	n := newMPSNode(t, "2xh200")
	smi(t, n.root, "-i", "1", "-mig", "1")
	run := func(args ...string) string {
		c := exec.Command(filepath.Join(n.root, "usr/bin/nvidia-smi"), args...)
		out, _ := c.Output()
		return fmt.Sprintf("%src=%d", out, c.ProcessState.ExitCode())
	}
	list := func(value string) string {
		return "+-------------------------------------+\n| GPU compute policies:               |\n| GPU     Name           Value        |\n" +
			"|=====================================|\n|   0   Timeslice       " + value + "|\n+-------------------------------------+\nrc=0"
	}
	for _, c := range []struct {
		args string
		want string
	}{
		{"compute-policy -i 0 --list", list("Default       ")},
		{"compute-policy -i 0 --set-timeslice 3", "Successfully set timeslice policy with value Long for GPU 0\nrc=0"},
		{"compute-policy -i 0 --list", list("Long          ")},
		{"compute-policy -i 0 --set-timeslice=0", "Successfully set timeslice policy with value Default for GPU 0\nrc=0"},
		{"compute-policy -i 0 --set-timeslice 9", "Failed to set timeslice policy with value Unknown for GPU 0 : Invalid Argument\nFailed to set timeslice for requested devices : Invalid Argument\nrc=2"},
		{"compute-policy -i 0 --set-timeslice x", "Failed to set timeslice policy with value Unknown for GPU 0 : Invalid Argument\nFailed to set timeslice for requested devices : Invalid Argument\nrc=2"},
		{"compute-policy -i 1 --set-timeslice 1", "Failed to set timeslice policy with value Short for GPU 1 : Not Supported\nFailed to set timeslice for requested devices : Not Supported\nrc=3"},
		{"compute-policy -i 9 --list", "No devices were found\nrc=6"},
		{"-i 1 -c 3", "Unable to set the compute mode for GPU " + strings.TrimSpace(smi(t, n.root, "-i", "1", "--query-gpu=pci.bus_id", "--format=csv,noheader")) + ": Not Supported\nrc=3"},
	} {
		if got := run(strings.Fields(c.args)...); got != c.want {
			t.Errorf("nvidia-smi %s:\n%s\nwant\n%s", c.args, got, c.want)
		}
	}
}
