package supervisor

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
)

func TestShorten(t *testing.T) {
	at := place(t.TempDir())
	if err := at.shorten(0); err != nil {
		t.Errorf("no logs: %v", err)
	}
	if err := os.Mkdir(at.log(), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, size := range map[string]int{"control.log": 100, "server.log": 101} {
		if err := os.WriteFile(filepath.Join(at.log(), name), make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := at.shorten(100); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int64{"control.log": 100, "server.log": 0} {
		if info, err := os.Stat(filepath.Join(at.log(), name)); err != nil || info.Size() != want {
			t.Errorf("%s: %v, %v, want %d bytes", name, info, err, want)
		}
	}
}

func TestParseHelp(t *testing.T) {
	for name, tc := range map[string]struct {
		help string
		want abilities
	}{
		"driver 580":    {help, abilities{multiUser: true}},
		"an older one":  {"OPTIONS:\n  -d                Setup the daemon in the background\n", abilities{}},
		"CUDA 13.1":     {"  -M,--multiuser-server    Enable\n  -S,--static-partitioning    Enable\n", abilities{multiUser: true, staticPartitions: true}},
		"in a sentence": {"  use it with -M or -S\n", abilities{}},
	} {
		if got := parseHelp(tc.help); got != tc.want {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
}

func TestCheckLimits(t *testing.T) {
	two := mps.Daemon{Devices: []gpu.UUID{"GPU-1", "GPU-2"}, ThreadPercentage: 25, MemoryMiB: []int64{3072, 100}}
	for name, tc := range map[string]struct {
		want mps.Daemon
		out  string
		ok   bool
	}{
		"as driver 580 says it":       {two, "25.0\n3G\n100M\n", true},
		"with more than asked for":    {two, "Setting it\n25.0\n3G\n100M\n513\n", true},
		"rounded down, by driver 580": {mps.Daemon{ThreadPercentage: 50, MemoryMiB: []int64{71513}}, "50.0\n69G\n", true},
		"rounded to another":          {mps.Daemon{ThreadPercentage: 50, MemoryMiB: []int64{71513}}, "50.0\n70G\n", false},
		"no limits":                   {mps.Daemon{}, "100.0\n", true},
		"other threads":               {two, "100.0\n3G\n100M\n", false},
		"other memory":                {two, "25.0\n3G\n3G\n", false},
		"a limit isn't there":         {two, "25.0\n3G\n", false},
		"the command isn't there":     {two, "Unknown command \"set_default_active_thread_percentage\"\n3G\n100M\n", false},
		"in kilobytes, with a letter": {two, "25.0\n3145728KB\n100MB\n", true},
	} {
		if err := checkLimits(tc.want, tc.out); (err == nil) != tc.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestParseServers(t *testing.T) {
	if diff := cmp.Diff([]int{519, 675}, parseServers("25.0\n3G\n519\n 675\n-1\n0\n99999999999999\n")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestStartOf reads the start of processes with odd names, and doesn't take an exit status
// for a process.
func TestStartOf(t *testing.T) {
	program := filepath.Join(t.TempDir(), "(a) Z (")
	sleep, err := os.ReadFile("/bin/sleep")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, sleep, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "1000")
	cmd.Args[0] = "sleep" // busybox selects the program by its first argument
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	start, ok := startOf(cmd.Process.Pid)
	if own, _ := startOf(os.Getpid()); !ok || start < own || own == 0 {
		t.Errorf("it was started at %d, this process at %d", start, own)
	}
	if err := kill(t.Context(), []process{{cmd.Process.Pid, start}}); err != nil {
		t.Fatal(err)
	}
	if _, ok := startOf(cmd.Process.Pid); ok {
		t.Error("an exit status is taken for a process")
	}
}

// Who has the pipe directory in the environment, and is no daemon, is left alone.
func TestUsersAreNotClients(t *testing.T) {
	at := place(t.TempDir())
	if err := os.MkdirAll(at.pipe(), 0o755); err != nil {
		t.Fatal(err)
	}
	sleeper := func(name string) *exec.Cmd {
		cmd := exec.Command("/bin/sleep", "1000")
		cmd.Args[0] = name
		cmd.Env = []string{pipeVariable + "=" + at.pipe()}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd
	}
	sleeper("python3")
	server := sleeper("/usr/bin/nvidia-cuda-mps-server")
	if got := pidsOf(users(at.pipe())); !slices.Equal(got, []int{server.Process.Pid}) {
		t.Errorf("got %v, want %d", got, server.Process.Pid)
	}
}

// A process that has got the id of one that has ended is not killed in its place.
func TestKillSparesAnotherProcessOfTheSameID(t *testing.T) {
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	start, ok := startOf(cmd.Process.Pid)
	if !ok {
		t.Fatal("the process isn't there")
	}
	if err := kill(t.Context(), []process{{cmd.Process.Pid, start - 1}}); err != nil {
		t.Error(err)
	}
	_, err = in.Write([]byte("x"))
	if n, readErr := out.Read(make([]byte, 1)); n != 1 {
		t.Fatalf("another process was killed: %v, %v", err, readErr)
	}
	if err := kill(t.Context(), []process{{cmd.Process.Pid, start}}); err != nil {
		t.Error(err)
	}
	if alive(cmd.Process.Pid, start) {
		t.Error("the process lives")
	}
}

// TestServerEndsAfterItsDaemon checks that, if the daemon is ending and doesn't listen any
// more, its server has the rest of the time to end.
func TestServerEndsAfterItsDaemon(t *testing.T) {
	begin := func(seconds string) (process, *exec.Cmd) {
		cmd := exec.Command("sleep", seconds)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		start, ok := startOf(cmd.Process.Pid)
		if !ok {
			t.Fatalf("process %d has no start", cmd.Process.Pid)
		}
		return process{cmd.Process.Pid, start}, cmd
	}
	daemon, cmd := begin("60")
	server, _ := begin("1") // longer than quitAgain
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	s := &Supervisor{driver: &driver{cfg: &Config{DriverRoot: t.TempDir()}}}
	if !s.quit(t.Context(), place(t.TempDir()), []process{daemon, server}) {
		t.Error("the server wasn't waited for")
	}
	left, cmd := begin("60")
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	if s.quit(t.Context(), place(t.TempDir()), []process{left}) {
		t.Error("a server without its daemon has ended by itself")
	}
}

// A link in a container to where the host has the daemon's directory makes no
// process there the daemon's.
func TestUsersAreNotInContainers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir, container := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(filepath.Join(container, filepath.Dir(dir)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, filepath.Join(container, dir)); err != nil {
		t.Fatal(err)
	}
	var own unix.Stat_t
	if err := unix.Stat(dir, &own); err != nil {
		t.Fatal(err)
	}
	thread, looked := make(chan int), make(chan struct{})
	var enter func()
	enter = func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() { // the others go by this one
			defer runtime.UnlockOSThread()
			go enter()
			<-looked
			return
		}
		err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Chroot(container)) // the thread ends with this
		if err != nil {
			t.Error(err)
		}
		thread <- unix.Gettid()
		<-looked
	}
	go enter()
	defer close(looked)
	if tid := <-thread; sees(tid, dir, own) {
		t.Error("the thread in the container passes for one that sees the directory")
	}
	if !sees(os.Getpid(), dir, own) {
		t.Error("this process doesn't see the directory")
	}
}

func FuzzParseGroups(f *testing.F) {
	f.Add("0::/kubepods/pod1\n", "36 35 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	f.Add("3:cpuset:/kubepods.slice\n", "36 35 0:30 /.. /sys rw - cgroup cgroup rw,cpuset\n")
	f.Fuzz(func(t *testing.T, membership, mountinfo string) {
		found, err := parseGroups(membership, "", mountinfo)
		if err != nil {
			return
		}
		for _, g := range found {
			if strings.Contains(g.parent, "kubepods") && !strings.Contains(mountinfo, "kubepods") {
				t.Errorf("%q is a pod's", g.parent)
			}
		}
	})
}

func FuzzAnswers(f *testing.F) {
	f.Add("25.0\n3G\n519\n")
	f.Fuzz(func(t *testing.T, out string) {
		_ = checkLimits(mps.Daemon{MemoryMiB: []int64{3072}}, out)
		parseHelp(out)
		for _, pid := range parseServers(out) {
			if pid <= 0 {
				t.Errorf("process %d", pid)
			}
		}
	})
}
