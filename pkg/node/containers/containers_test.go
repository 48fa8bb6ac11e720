package containers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

const (
	claimUID = "0b6f8f0e-3d2a-4f5d-8a77-b7e1a7c60b11"
	podUID   = "3c0f6d1e-8a10-4135-bada-13f71feaef21"
	// holdFor is the time for which a wait that must not end is observed.
	holdFor = 50 * time.Millisecond
)

// start returns Containers for a host at the directory root.
func start(t *testing.T, dir, root string) *Containers {
	t.Helper()
	c, err := New(dir, driverroot.NewHost(root))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	for !isReading(c.events) { // it polls until then, which sees mounts only
		runtime.Gosched()
	}
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return c
}

func isReading(e *events) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.reading
}

func newRoot(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	mkdir(t, filepath.Join(root, "proc"))
	return root
}

func mkdir(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	mkdir(t, filepath.Dir(path))
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// process adds a process to the host's /proc that has a claim's mark mounted.
func process(t *testing.T, root string, pid int, namespace, mountinfo, cgroup string) string {
	t.Helper()
	dir := filepath.Join(root, "proc", fmt.Sprint(pid))
	mkdir(t, filepath.Join(dir, "ns"))
	if err := os.Symlink(namespace, filepath.Join(dir, "ns/mnt")); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "mountinfo"), mountinfo)
	write(t, filepath.Join(dir, "cgroup"), cgroup)
	write(t, filepath.Join(dir, "comm"), "trainer\n")
	return dir
}

func mark(t *testing.T, c *Containers) string {
	t.Helper()
	path, _, err := c.Mark(claimUID)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// hold keeps a file's directory entry in use, as a container's mount of it does.
func hold(t *testing.T, path string) (end func()) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return func() { f.Close() }
}

// holds fails the test unless AwaitEnd is still waiting after a while.
func holds(t *testing.T, c *Containers, pods ...kubeletplugin.NamespacedObject) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), holdFor)
	defer cancel()
	err := c.AwaitEnd(ctx, claimUID, pods)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want the deadline", err)
	}
	return err
}

func ends(t *testing.T, c *Containers, pods ...kubeletplugin.NamespacedObject) {
	t.Helper()
	if err := c.AwaitEnd(t.Context(), claimUID, pods); err != nil {
		t.Fatal(err)
	}
}

func pod() kubeletplugin.NamespacedObject {
	return kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: "default", Name: "worker"}, UID: podUID}
}

func TestEndedWithoutContainers(t *testing.T) {
	c := start(t, t.TempDir(), newRoot(t))
	path := mark(t, c)
	ends(t, c)
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the mark is still there: %v", err)
	}
	ends(t, c) // idempotent
}

func TestEndedWaitsForAllThatHoldTheMark(t *testing.T) {
	c := start(t, t.TempDir(), newRoot(t))
	path := mark(t, c)
	first, second := hold(t, path), hold(t, path)
	holds(t, c)
	first()
	holds(t, c)
	// The claim is prepared again, with another mark and another container.
	third := hold(t, mark(t, c))
	second()
	holds(t, c)
	third()
	ends(t, c)
}

func TestEndedWaitsForMountNamespace(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	c := start(t, t.TempDir(), "/")
	path := mark(t, c)
	end := mountElsewhere(t, path, MountDir+"/"+claimUID)
	if err := holds(t, c); !strings.Contains(err.Error(), "(sleep)") {
		t.Errorf("error %q doesn't name the process", err)
	}
	// As after a restart of the plugin.
	again := start(t, filepath.Dir(path), "/")
	if err := again.Recover(); err != nil {
		t.Fatal(err)
	}
	mark(t, again)
	holds(t, again)
	end()
	ends(t, c)
	ends(t, again)
}

func TestEndedAfterRestart(t *testing.T) {
	root := newRoot(t)
	gone := process(t, root, 7, "mnt:[1]", "40 30 0:5 /marks/"+claimUID+"//deleted "+MountDir+"/"+claimUID+" ro - ext4 /dev/vda rw\n",
		"0::/kubepods.slice/kubepods-pod"+strings.ReplaceAll(podUID, "-", "_")+".slice/cri-containerd-1.scope\n")
	mkdir(t, filepath.Join(root, "var/log/pods/default_worker_"+podUID))
	c := start(t, t.TempDir(), root)
	if err := c.Recover(); err != nil {
		t.Fatal(err)
	}
	mark(t, c)
	if err := holds(t, c); !strings.Contains(err.Error(), "process 7 (trainer) of pod default/worker") {
		t.Errorf("error %q doesn't name the pod", err)
	}
	if err := os.RemoveAll(gone); err != nil {
		t.Fatal(err)
	}
	ends(t, c)
}

func TestEndedWhereTheMarkWasRemovedByHand(t *testing.T) {
	root := newRoot(t)
	gone := process(t, root, 7, "mnt:[1]", "40 30 0:5 /marks/"+claimUID+"//deleted "+MountDir+"/"+claimUID+" ro - ext4 /dev/vda rw\n", "")
	c := start(t, t.TempDir(), root)
	holds(t, c)
	if err := os.RemoveAll(gone); err != nil {
		t.Fatal(err)
	}
	ends(t, c)
}

func TestEndedWithoutInotify(t *testing.T) {
	root := newRoot(t)
	gone := process(t, root, 7, "mnt:[1]", "40 30 0:5 /marks/"+claimUID+"//deleted "+MountDir+"/"+claimUID+" ro - ext4 /dev/vda rw\n", "")
	c, err := New(t.TempDir(), driverroot.NewHost(root))
	if err != nil {
		t.Fatal(err)
	}
	c.events = &events{err: errors.New("too many open files")}
	mark(t, c)
	holds(t, c)
	if err := os.RemoveAll(gone); err != nil {
		t.Fatal(err)
	}
	ends(t, c)
}

func TestScan(t *testing.T) {
	root := newRoot(t)
	info := "40 30 0:5 /marks/a " + MountDir + "/a ro - ext4 /dev/vda rw\n41 30 0:5 /marks/b//deleted " + MountDir + "/b ro - ext4 /dev/vda rw\n42 30 0:5 /x /dev/x rw - ext4 x rw\n"
	process(t, root, 1, "mnt:[1]", "21 1 254:0 / / rw - ext4 /dev/vda rw\n", "")
	process(t, root, 8, "mnt:[2]", info, "")
	process(t, root, 9, "mnt:[2]", info, "") // the same namespace
	process(t, root, 10, "mnt:[3]", "", "")  // has ended meanwhile
	write(t, filepath.Join(root, "proc/meminfo"), "")
	got, err := start(t, t.TempDir(), root).scan()
	if err != nil {
		t.Fatal(err)
	}
	if want := []mount{{claimUID: "a", pid: 8}, {claimUID: "b", deleted: true, pid: 8}}; !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestPodsCgroups(t *testing.T) {
	underscored := strings.ReplaceAll(podUID, "-", "_")
	for name, tc := range map[string]struct{ dir, file, full, empty string }{
		"version 2, systemd":             {"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + underscored + ".slice", "cgroup.events", "populated 1\nfrozen 0\n", "populated 0\nfrozen 0\n"},
		"version 2, systemd, guaranteed": {"kubepods.slice/kubepods-pod" + underscored + ".slice", "cgroup.events", "populated 1\n", "populated 0\n"},
		"version 2, kubelet in a container": {
			"system.slice/docker-1.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod" + underscored + ".slice",
			"cgroup.events", "populated 1\n", "populated 0\n",
		},
		"version 2, cgroupfs":     {"kubepods/pod" + podUID, "cgroup.events", "populated 1\n", "populated 0\n"},
		"version 1, cgroupfs":     {"pids/kubepods/besteffort/pod" + podUID, "pids.current", "2\n", "0\n"},
		"version 1, nested":       {"pids/localcluster/bench/node-0/kubepods/burstable/pod" + podUID, "pids.current", "2\n", "0\n"},
		"version 1, systemd":      {"pids/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + underscored + ".slice", "pids.current", "12\n", "0\n"},
		"version 1, pod removed":  {"pids/kubepods/pod" + podUID, "pids.current", "1\n", ""},
		"version 2, pods removed": {"kubepods/burstable/pod" + podUID, "cgroup.events", "populated 1\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			root := newRoot(t)
			cgroups := filepath.Join(root, "sys/fs/cgroup")
			if !strings.HasPrefix(tc.dir, "pids/") {
				write(t, filepath.Join(cgroups, "cgroup.controllers"), "memory pids\n")
			}
			write(t, filepath.Join(cgroups, tc.dir, tc.file), tc.full)
			c := start(t, t.TempDir(), root)
			mark(t, c)
			if err := holds(t, c, pod()); !strings.Contains(err.Error(), "a process of pod default/worker") {
				t.Errorf("error %q doesn't name the pod", err)
			}
			ended := make(chan error, 1)
			go func() { ended <- c.AwaitEnd(t.Context(), claimUID, []kubeletplugin.NamespacedObject{pod()}) }()
			if tc.empty == "" {
				if err := os.RemoveAll(filepath.Join(cgroups, tc.dir)); err != nil {
					t.Fatal(err)
				}
			} else {
				write(t, filepath.Join(cgroups, tc.dir, tc.file), tc.empty)
			}
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestEndedWithoutCgroups(t *testing.T) {
	c := start(t, t.TempDir(), newRoot(t))
	mark(t, c)
	ends(t, c, pod())
}

func TestMarkRefusesOtherNames(t *testing.T) {
	c := start(t, t.TempDir(), newRoot(t))
	for _, uid := range []string{"", "..", "../x", "a/b"} {
		if _, _, err := c.Mark(uid); err == nil {
			t.Errorf("%q became a mark", uid)
		}
	}
}

// TestForgetDropsAllOfAClaim checks that no data about a claim stays after its wait
// was skipped: an unprepare stops waiting when the claim's GPUs are lost.
func TestForgetDropsAllOfAClaim(t *testing.T) {
	root := newRoot(t)
	c := start(t, t.TempDir(), root)
	defer hold(t, mark(t, c))()
	holds(t, c)
	process(t, root, 7, "mnt:[1]", "40 30 0:5 /marks/"+claimUID+"//deleted "+MountDir+"/"+claimUID+" ro - ext4 /dev/vda rw\n", "")
	if err := c.Recover(); err != nil {
		t.Fatal(err)
	}
	if d := c.deletedOf(claimUID); len(d.watches) != 1 || !d.unwatched {
		t.Fatalf("the claim's deleted marks are %+v, want one that is watched and some that aren't", d)
	}
	if err := c.Unmark(claimUID); err != nil {
		t.Fatal(err)
	}
	c.events.mu.Lock()
	defer c.events.mu.Unlock()
	if _, left := c.deleted.Load(claimUID); left || len(c.events.watches) > 0 {
		t.Errorf("the claim's deleted marks are left: %t, and %d watches", left, len(c.events.watches))
	}
}

// TestEndedAfterAMarkThatCouldNotBeDeleted checks that a second try, when the
// mark can be deleted, doesn't wait for leftovers of the first.
func TestEndedAfterAMarkThatCouldNotBeDeleted(t *testing.T) {
	dir := t.TempDir()
	c := start(t, dir, t.TempDir())
	obstacle := filepath.Join(dir, claimUID, "file")
	if err := os.MkdirAll(obstacle, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := c.AwaitEnd(t.Context(), claimUID, nil); err == nil {
		t.Fatal("no error for a mark that can't be deleted")
	}
	if err := os.Remove(obstacle); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := c.AwaitEnd(ctx, claimUID, nil); err != nil {
		t.Error(err)
	}
}
