package supervisor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
)

func itoa(n int) string { return strconv.Itoa(n) }

func TestEnsureAndStop(t *testing.T) {
	n := newNode(t)
	n.start("")
	first := n.ensure(one("gpu-980fb007"))
	want := mps.State{Daemon: one("gpu-980fb007"), PID: first.PID, PipeDir: n.at("gpu-980fb007").clients(), Phase: mps.Running}
	first.ServerPID = 0 // it may be known already
	if diff := cmp.Diff(want, first, anyRevision); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if again := n.ensure(one("gpu-980fb007")); again.PID != first.PID {
		t.Errorf("a second call started another: %d, then %d", first.PID, again.PID)
	}
	listed := n.serving()
	want.ServerPID = listed[0].ServerPID
	if diff := cmp.Diff([]mps.State{want}, listed, anyRevision); diff != "" {
		t.Errorf("listed (-want +got):\n%s", diff)
	}
	if got := n.ask("gpu-980fb007", "get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0"); got != "25.0\n3G\n" {
		t.Errorf("limits: %q", got)
	}
	if servers := parseServers(n.ask("gpu-980fb007", "get_server_list")); !slices.Equal(servers, []int{want.ServerPID}) {
		t.Errorf("servers %v run, known is %d", servers, want.ServerPID)
	}
	environ, err := os.ReadFile("/proc/" + itoa(first.PID) + "/environ")
	if err != nil || !strings.Contains(string(environ), "CUDA_VISIBLE_DEVICES=GPU-28933e90-dc02-c686-9dc4-c13a6a380b41\x00") {
		t.Errorf("environment of the daemon: %q, %v", environ, err)
	}
	if log, _ := os.ReadFile(n.at("gpu-980fb007").log() + "/control.log"); !strings.Contains(string(log), "-d -M") {
		t.Errorf("started as %q, this driver knows -M", log)
	}
	for range 2 {
		if _, err := n.Stop(t.Context(), "gpu-980fb007"); err != nil {
			t.Fatal(err)
		}
		n.gone("gpu-980fb007")
	}
	if left := n.list(); len(left) > 0 {
		t.Errorf("still listed: %+v", left)
	}
}

// Root in a container must not be able to change or end the daemon. A daemon that
// comes after another is behind the same directory.
func TestClientsSeeNoPrivilegedSocket(t *testing.T) {
	n := newNode(t)
	n.start("")
	first := n.ensure(one("a"))
	sees := func() {
		t.Helper()
		for name, want := range map[string]bool{"control": true, privileged: false} {
			inside, pipeErr := os.Stat(filepath.Join(n.at("a").pipe(), name))
			if pipeErr != nil {
				t.Fatalf("the daemon has no %s: %v", name, pipeErr)
			}
			seen, err := os.Stat(filepath.Join(first.PipeDir, name))
			if got := err == nil && os.SameFile(inside, seen); got != want {
				t.Errorf("clients see %s of this daemon: %t, want %t", name, got, want)
			}
		}
	}
	sees()
	if err := unix.Kill(first.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.until(func(all []mps.State) bool { return all[0].Phase == mps.Running && all[0].Restarts == 1 })
	sees()
	if err := os.RemoveAll(first.PipeDir + "/control"); err != nil {
		t.Fatal(err)
	}
	n.kill()
	n.start("")
	n.serving()
	sees()
}

// The daemon has a /dev/shm of its own; that of other processes doesn't change.
func TestPrivateMemory(t *testing.T) {
	n := newNode(t)
	n.start("")
	state := n.ensure(one("a"))
	inside := filepath.Join("/proc", itoa(state.PID), "root/dev/shm/mark")
	if err := os.WriteFile(inside, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(n.at("a").shm() + "/mark"); err != nil {
		t.Errorf("the daemon's /dev/shm is not its directory: %v", err)
	}
	if listed := n.list(); listed[0].ShmDir != n.at("a").shm() {
		t.Errorf("the daemon uses its shared memory, clients aren't told: %+v", listed)
	}
}

// Files that clients write to the daemon's /dev/shm don't fill the host's /run.
// The file system stays when the daemon or the supervisor is restarted, and is
// removed with the daemon.
// TestLinksOfClientsAreNotFollowed has a client leave links in the /dev/shm that it
// shares with the daemon. Neither the next daemon's start nor the end removes what they
// lead to.
func TestLinksOfClientsAreNotFollowed(t *testing.T) {
	n := newNode(t)
	n.start("")
	first := n.ensure(one("a"))
	host := t.TempDir()
	kept := filepath.Join(host, "kept")
	if err := os.WriteFile(kept, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	links := func() {
		t.Helper()
		shm := n.at("a").shm()
		deep := filepath.Join(shm, "a", "b")
		if err := errors.Join(os.MkdirAll(deep, 0o777), os.Symlink(host, filepath.Join(shm, "directory")),
			os.Symlink(kept, filepath.Join(deep, "file")), os.Symlink(host, filepath.Join(deep, "directory"))); err != nil {
			t.Fatal(err)
		}
	}
	links()
	if err := unix.Kill(first.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.until(func(all []mps.State) bool { return all[0].Phase == mps.Running && all[0].Restarts == 1 })
	links()
	if _, err := n.Stop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(string(n.at("a"))); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the daemon's directory is still there: %v", err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("a file of the host was removed: %v", err)
	}
}

func TestSharedMemoryIsBounded(t *testing.T) {
	n := newNode(t)
	n.start("")
	first := n.ensure(one("a"))
	shm := n.at("a").shm()
	var run, own, again unix.Statfs_t
	var before, after unix.Stat_t
	if err := errors.Join(unix.Statfs(n.cfg.RunDir, &run), unix.Statfs(shm, &own), unix.Stat(shm, &before)); err != nil {
		t.Fatal(err)
	}
	if own.Type != unix.TMPFS_MAGIC || own.Blocks*uint64(own.Bsize) != shmSize || own.Files != shmInodes || before.Mode&0o7777 != 0o1777 {
		t.Errorf("its /dev/shm: type %x, %d bytes, %d inodes, mode %o", own.Type, own.Blocks*uint64(own.Bsize), own.Files, before.Mode&0o7777)
	}
	if err := os.WriteFile(filepath.Join(shm, "left"), make([]byte, 1<<20), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(first.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.until(func(all []mps.State) bool { return all[0].Phase == mps.Running && all[0].Restarts == 1 })
	n.kill()
	n.start("")
	if err := errors.Join(unix.Stat(shm, &after), unix.Statfs(shm, &again)); err != nil {
		t.Fatal(err)
	}
	if after.Dev != before.Dev || again.Bfree != own.Bfree {
		t.Errorf("containers have another file system than the daemon (%d, %d), or what the first daemon's clients left is still there", before.Dev, after.Dev)
	}
	if _, err := n.Stop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	n.gone("a")
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), shm) {
		t.Errorf("still mounted: %v\n%s", err, mounts)
	}
}

func TestOldDriverNeedsSharedMemory(t *testing.T) {
	n := newNode(t)
	n.drop("lib64/libnvidia-ml.so.1")
	n.put("lib64/libnvidia-ml.so.570.1", "")
	n.link("libnvidia-ml.so.570.1", "lib64/libnvidia-ml.so.1")
	n.start("")
	if state := n.ensure(one("a")); state.ShmDir != n.at("a").shm() {
		t.Errorf("%+v", state)
	}
}

func TestLimitsOfARunningDaemonChange(t *testing.T) {
	n := newNode(t)
	n.start("")
	d := one("claim-1")
	d.Devices = append(d.Devices, "GPU-2")
	d.MemoryMiB = []int64{1024, 2048}
	before := n.ensure(d)
	d.ThreadPercentage, d.MemoryMiB = 50, []int64{4096}
	after := n.ensure(d)
	if after.PID != before.PID {
		t.Error("the daemon was restarted")
	}
	server := strings.TrimSpace(n.ask("claim-1", "get_server_list"))
	got := n.ask("claim-1", "get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0",
		"get_default_device_pinned_mem_limit 1", "get_active_thread_percentage "+server,
		"get_device_pinned_mem_limit "+server+" 0", "get_device_pinned_mem_limit "+server+" 1")
	want := "50.0\n4G\n16384G\n50.0\n4G\n16384G\n"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("limits (-want +got):\n%s", diff)
	}
	if again := n.ensure(d); again.PID != before.PID {
		t.Error("the daemon was restarted")
	}
	n.put("limitless", "")
	d.MemoryMiB[0] = 512
	if _, err := n.Ensure(t.Context(), d); err == nil || !strings.Contains(err.Error(), "didn't take the limits") {
		t.Errorf("a daemon that keeps the old limits: %v", err)
	}
}

func TestOtherDevicesNeedAnotherDaemon(t *testing.T) {
	n := newNode(t)
	n.start("")
	d := one("claim-1")
	before := n.ensure(d)
	d.Devices = []gpu.UUID{"GPU-2"}
	after := n.ensure(d)
	if after.PID == before.PID || after.Restarts != 0 {
		t.Errorf("%+v, then %+v", before, after)
	}
	if controls := n.controls("claim-1"); !slices.Equal(controls, []int{after.PID}) {
		t.Errorf("daemons %v", controls)
	}
}

func TestDaemonDies(t *testing.T) {
	n := newNode(t)
	n.start("")
	before := n.ensure(one("a"))
	server := parseServers(n.ask("a", "get_server_list"))[0]
	if err := unix.Kill(before.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	after := n.until(func(states []mps.State) bool {
		return len(states) == 1 && states[0].Phase == mps.Running && states[0].PID != before.PID
	})[0]
	if after.Restarts != 1 {
		t.Errorf("restarts: %+v", after)
	}
	if got := n.ask("a", "get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0"); got != "25.0\n3G\n" {
		t.Errorf("limits of the new one: %q", got)
	}
	if _, ok := startOf(server); ok && slices.Contains(pidsOf(users(n.at("a").pipe())), server) {
		t.Errorf("the old server %d is still there", server)
	}
}

// One that can't be started again is on the list with the reason, and is tried
// again; who asks for it gets it at once when it can be.
func TestDaemonDiesForAWhile(t *testing.T) {
	n := newNode(t)
	n.start("")
	before := n.ensure(one("a"))
	n.put("refuse", "no MPS today\n")
	if err := unix.Kill(before.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	failed := n.until(func(states []mps.State) bool { return len(states) == 1 && states[0].Phase == mps.Failed })[0]
	if !strings.Contains(failed.Message, "no MPS today") || failed.PID != 0 {
		t.Errorf("%+v", failed)
	}
	n.drop("refuse")
	if after := n.ensure(one("a")); after.Phase != mps.Running || after.Restarts == 0 {
		t.Errorf("%+v", after)
	}
	if controls := n.controls("a"); len(controls) != 1 {
		t.Errorf("daemons %v", controls)
	}
}

func TestRefusalReachesTheCaller(t *testing.T) {
	for name, tc := range map[string]struct {
		damage func(*node)
		want   string
		// fails: the daemon does, and its devices may be the cause.
		fails bool
	}{
		"it says why":      {func(n *node) { n.put("refuse", "An instance of this daemon is already running\n") }, "already running", true},
		"no program":       {func(n *node) { n.drop("bin/" + program) }, "this driver installation has no nvidia-cuda-mps-control", false},
		"no driver":        {func(n *node) { n.drop("lib64/libnvidia-ml.so.1") }, "no NVIDIA driver at the --driver-root", false},
		"limits not taken": {func(n *node) { n.put("limitless", "") }, "didn't take the limits", false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			tc.damage(n)
			n.start("")
			_, err := n.Ensure(t.Context(), one("a"))
			if err == nil || !strings.Contains(err.Error(), tc.want) || errors.Is(err, mps.ErrUnavailable) || errors.Is(err, mps.ErrDaemonFails) != tc.fails {
				t.Errorf("got %v, want one with %q; the daemon fails: %v", err, tc.want, tc.fails)
			}
			if left := n.list(); len(left) > 0 {
				t.Errorf("listed: %+v", left)
			}
			n.gone("a")
		})
	}
}

// TestProgramThatDoesNotRun checks that a program that can't be run to ask a daemon is no failure
// of the daemon, whose GPU would be taken for the cause.
func TestProgramThatDoesNotRun(t *testing.T) {
	n := newNode(t)
	n.start("")
	d := one("a")
	n.ensure(d)
	n.drop("bin/" + program)
	n.put("bin/"+program, "#!/nowhere/interpreter\n") // as while the driver is replaced
	d.ThreadPercentage = 50
	_, err := n.Ensure(t.Context(), d)
	if err == nil || !strings.Contains(err.Error(), "no such file") || errors.Is(err, mps.ErrUnavailable) || errors.Is(err, mps.ErrDaemonFails) {
		t.Errorf("got %v, want an error of starting the program, and none of the daemon", err)
	}
}

func TestBadRequests(t *testing.T) {
	n := newNode(t)
	n.start("")
	if _, err := n.Ensure(t.Context(), mps.Daemon{Name: "..", Devices: []gpu.UUID{"GPU-1"}}); err == nil {
		t.Error("a daemon named .. was started")
	}
	if _, err := n.Stop(t.Context(), ".."); err == nil {
		t.Error("a daemon named .. was stopped")
	}
}

// A daemon that takes long to start doesn't delay others, and continues to
// start for a caller that asks again after a timeout.
func TestDaemonsDoNotWaitForEachOther(t *testing.T) {
	n := newNode(t)
	n.start("")
	n.ensure(one("quick")) // so that --help was asked
	slow := filepath.Join(n.cfg.DriverRoot, "slow")
	if err := unix.Mkfifo(slow, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, giveUp := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if _, err := n.Ensure(ctx, one("slow")); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
	n.until(func(states []mps.State) bool {
		return len(states) == 2 && states[1].Phase == mps.Starting
	})
	n.ensure(one("quick"))
	if _, err := n.Stop(t.Context(), "quick"); err != nil {
		t.Fatal(err)
	}
	giveUp()
	waiting.Wait()
	f, err := os.OpenFile(slow, os.O_WRONLY, 0) // waits for who reads
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(slow); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if state := n.ensure(one("slow")); state.Phase != mps.Running || len(n.controls("slow")) != 1 {
		t.Errorf("%+v, daemons %v", state, n.controls("slow"))
	}
}

// A server that dies is followed by another before a client asks for it.
func TestServerDies(t *testing.T) {
	n := newNode(t)
	n.start("")
	n.ensure(one("a"))
	before := n.serving()[0]
	if err := unix.Kill(before.ServerPID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	after := n.until(func(all []mps.State) bool { return all[0].ServerPID != 0 && all[0].ServerPID != before.ServerPID })[0]
	if after.PID != before.PID || after.Restarts != 0 {
		t.Errorf("%+v, before %+v", after, before)
	}
}

// TestOutputClosedLate checks that a command succeeds if its output is still open after it
// exits. A process that the supervisor is forking can keep it open.
func TestOutputClosedLate(t *testing.T) {
	n := newNode(t)
	n.put("held", "")
	n.start("")
	if s := n.ensure(one("a")); s.Phase != mps.Running || s.Trouble != "" {
		t.Errorf("%+v", s)
	}
}

// A daemon without a server is in trouble, is started again after a while, and is
// well as soon as it has one.
func TestNoServer(t *testing.T) {
	n := newNode(t)
	n.put("serverless", "")
	n.start("")
	before := n.ensure(one("a"))
	if before.ServerPID != 0 || before.Phase != mps.Running {
		t.Errorf("%+v", before)
	}
	n.until(func(all []mps.State) bool { return strings.Contains(all[0].Trouble, "has no MPS server") })
	n.until(func(all []mps.State) bool {
		return all[0].Phase == mps.Running && all[0].Restarts > 0 && all[0].Trouble != ""
	})
	n.drop("serverless")
	if after := n.serving()[0]; after.Trouble != "" {
		t.Errorf("%+v", after)
	}
}
