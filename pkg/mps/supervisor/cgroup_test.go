package supervisor

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

func TestParseGroups(t *testing.T) {
	const unified = "36 35 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
	id := strings.Repeat("0123456789abcdef", 4)
	for name, tc := range map[string]struct {
		membership, first, mounts string
		want                      []string
	}{
		"version 2, systemd": {
			membership: "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/cri-containerd-2.scope\n",
			mounts:     unified,
			want:       []string{"/sys/fs/cgroup"},
		},
		"version 2, systemd, CRI-O": {
			membership: "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/crio-" + id + ".scope\n",
			mounts:     unified,
			want:       []string{"/sys/fs/cgroup"},
		},
		"version 2, the kubelet's own": {
			membership: "0::/kubelet/kubepods/burstable/pod1/2\n",
			mounts:     unified,
			want:       []string{"/sys/fs/cgroup/kubelet"},
		},
		"the container's own mount shows only itself, or can't be written": {
			membership: "0::/node1/kubepods/pod1/2\n",
			mounts: "30 35 0:30 /node1 /host/sys/fs/cgroup rw - cgroup2 cgroup2 rw\n" +
				"36 35 0:30 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup2 rw\n" +
				"37 35 0:30 /node1/kubepods/pod1/2 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
			want: []string{"/host/sys/fs/cgroup"},
		},
		"version 1": {
			membership: "3:cpuset:/kubepods/pod1/2\n2:cpu,cpuacct:/kubepods/pod1/2\n1:name=systemd:/kubepods/pod1/2\n0::/system.slice/containerd.service\n",
			mounts: "31 30 0:26 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n" +
				"32 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" +
				"33 30 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n" +
				"34 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
			want: []string{"/sys/fs/cgroup/cpuset", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/systemd"},
		},
		"version 2, systemd below a --cgroup-root": {
			membership: "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod1.slice/cri-containerd-" + id + ".scope\n",
			mounts:     unified,
			want:       []string{"/sys/fs/cgroup/kubelet.slice"},
		},
		"version 2, guaranteed pods, which have no cgroup of their class": {
			membership: "0::/custom/kubepods/pod1/" + id + "\n",
			mounts:     unified,
			want:       []string{"/sys/fs/cgroup/custom"},
		},
		"no pod": {
			membership: "0::/user.slice\n",
			mounts:     unified,
		},
		"all of this machine is a container": {
			membership: "0::/docker/" + id + "/user\n",
			first:      "0::/docker/" + id + "/init\n",
			mounts:     unified,
		},
	} {
		t.Run(name, func(t *testing.T) {
			found, err := parseGroups(tc.membership, tc.first, tc.mounts)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, g := range found {
				got = append(got, g.parent)
				if g.cpuset != strings.HasSuffix(g.parent, "cpuset") {
					t.Errorf("%+v", g)
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	// Without the kubelet's cgroups for pods containers are where the runtime puts them.
	for _, membership := range []string{"0::/system.slice/cri-containerd-" + id + ".scope\n", "0::/system.slice/crio-" + id + ".scope\n", "3:cpuset:/k8s.io/" + id + "\n0::/\n"} {
		if found, err := parseGroups(membership, "0::/init.scope\n", unified); !errors.Is(err, errNoPod) {
			t.Errorf("in %q daemons would end with the container: got %v, %v", membership, found, err)
		}
	}
	if _, err := parseGroups("0::/kubepods/pod1/2\n", "0::/init.scope\n", "30 35 0:30 / /proc rw - proc proc rw\n"); err == nil {
		t.Error("a daemon would stay in its container's cgroup, and nobody is told")
	}
}

// podCgroup makes a cgroup as a pod has it, in every hierarchy that this
// process is in and may change, and returns its directories.
func podCgroup(t *testing.T) []string {
	t.Helper()
	membership, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	all, err := mountinfo.GetMountsFromReader(bytes.NewReader(text), cgroupMount)
	if err != nil {
		t.Fatal(err)
	}
	var dirs []string
	for line := range strings.Lines(string(membership)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		dir, ok := findCgroup(all, parts[1], parts[2])
		if !ok {
			continue
		}
		top := filepath.Join(dir, "tessera-test-"+itoa(os.Getpid()))
		t.Cleanup(func() { removeTree(t, top) })
		pod := top
		for _, element := range []string{"", "kubepods", "pod1", "container1"} {
			pod = filepath.Join(pod, element)
			if err := os.Mkdir(pod, 0o755); err != nil {
				t.Skipf("no cgroups here: %v", err)
			}
			if strings.Contains(parts[1], "cpuset") {
				if err := inheritCPUs(pod); err != nil {
					t.Fatal(err)
				}
			}
		}
		dirs = append(dirs, pod)
	}
	if len(dirs) == 0 {
		t.Skip("no cgroups here")
	}
	return dirs
}

// removeTree removes a cgroup and those below, the deepest first.
func removeTree(t *testing.T, dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			removeTree(t, filepath.Join(dir, e.Name()))
		}
	}
	if err := os.Remove(dir); err != nil {
		t.Error(err)
	}
}

// A supervisor in a pod's cgroup: its daemons are in others, which outlive the
// pod, and are removed with the daemon.
func TestDaemonLeavesThePodsCgroup(t *testing.T) {
	n := newNode(t)
	n.cgroups = podCgroup(t)
	n.start("")
	n.ensure(one("a"))
	state := n.serving()[0]
	var left []string
	for _, pod := range n.cgroups {
		procs, err := os.ReadFile(filepath.Join(pod, "cgroup.procs"))
		if err != nil {
			t.Fatal(err)
		}
		if got, want := strings.TrimSpace(string(procs)), itoa(n.running.Process.Pid); got != want {
			t.Errorf("in %s: %q, want only the supervisor, %s", pod, got, want)
		}
		own := filepath.Join(pod, "../../..", groupName, "a")
		procs, err = os.ReadFile(filepath.Join(own, "cgroup.procs"))
		if err != nil || !strings.Contains("\n"+string(procs), "\n"+itoa(state.PID)+"\n") {
			t.Errorf("in %s: %q, want the daemon, %d; %v", own, procs, state.PID, err)
		}
		left = append(left, own)
	}
	if _, err := n.Stop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	for _, dir := range left {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s is left", dir)
		}
	}
	n.kill()
}

// A cgroup is removed once its last process has left it, and not given up while
// there is one.
func TestCgroupThatEmptiesLate(t *testing.T) {
	dirs := podCgroup(t)
	process := exec.Command("sleep", "1000")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	end := sync.OnceFunc(func() {
		_ = process.Process.Kill()
		go func() { ended <- process.Wait() }()
	})
	defer func() { end(); <-ended }()
	for _, dir := range dirs {
		if err := writeControl(filepath.Join(dir, "cgroup.procs"), itoa(process.Process.Pid)); err != nil {
			t.Fatal(err)
		}
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := removeEmptied(over, dirs[0]); !errors.Is(err, unix.EBUSY) {
		t.Errorf("with a process in it: %v", err)
	}
	end()
	for _, dir := range dirs {
		if err := removeEmptied(t.Context(), dir); err != nil {
			t.Error(err)
		}
	}
}
