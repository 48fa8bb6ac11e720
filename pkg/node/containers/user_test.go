package containers

import (
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestUserOf reads files as Linux shows them of a container with claims (containerd 2,
// cgroup v2): the marks, and the file of the termination message.
func TestUserOf(t *testing.T) {
	const (
		cgroup = "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod3c0f6d1e_8a10_4135_bada_13f71feaef21.slice/cri-containerd-0a1b.scope\n"
		mark   = "901 880 8:1 /var/lib/tessera/marks/" + claimUID + " /dev/tessera/" + claimUID + " ro,nosuid - ext4 /dev/sda1 rw\n"
		log    = "902 880 8:1 /var/lib/kubelet/pods/" + podUID + "/containers/main/8f1c22ab /dev/termination-log rw,relatime - ext4 /dev/sda1 rw\n"
		// Another pod's file, which the container mounts as a hostPath.
		others = "903 880 8:1 /var/lib/kubelet/pods/1d0f6d1e-8a10-4135-bada-13f71feaef21/containers/other/1f /host rw,relatime - ext4 /dev/sda1 rw\n"
	)
	for name, test := range map[string]struct {
		cgroup, mountinfo string
		want              User
		none              bool
	}{
		"a container with a claim": {cgroup: cgroup, mountinfo: mark + log + others, want: User{PodUID: podUID, Container: "main", Claims: []string{claimUID}}},
		"no termination message":   {cgroup: cgroup, mountinfo: mark + others, want: User{PodUID: podUID, Claims: []string{claimUID}}},
		"a mount namespace of its own, kubelet on a disk of its own": {
			cgroup: cgroup, mountinfo: "902 880 8:1 /pods/" + podUID + "/containers/side-car/b /dev/termination-log rw - xfs /dev/sdb rw\n",
			want: User{PodUID: podUID, Container: "side-car"},
		},
		"a process of the host": {cgroup: "0::/system.slice/nvidia-persistenced.service\n", mountinfo: mark, none: true},
		"ended":                 {none: true},
	} {
		t.Run(name, func(t *testing.T) {
			root := newRoot(t)
			if test.cgroup != "" {
				write(t, filepath.Join(root, "proc/4711/cgroup"), test.cgroup)
				write(t, filepath.Join(root, "proc/4711/mountinfo"), test.mountinfo)
			}
			got, ok := start(t, t.TempDir(), root).UserOf(4711)
			if diff := cmp.Diff(test.want, got); diff != "" || ok == test.none {
				t.Errorf("found %t (-want +got):\n%s", ok, diff)
			}
		})
	}
}
