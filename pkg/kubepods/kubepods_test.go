package kubepods_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/kubepods"
)

const podUID = "3c0f6d1e-8a10-4135-bada-13f71feaef21"

// TestNames takes a pod's cgroup apart, as each cgroup driver and a --cgroup-root name it,
// and puts it together again.
func TestNames(t *testing.T) {
	const underscored = "3c0f6d1e_8a10_4135_bada_13f71feaef21"
	for name, tc := range map[string]struct{ top, pod string }{
		"cgroupfs":                {"/kubepods", "/burstable/pod" + podUID},
		"cgroupfs, guaranteed":    {"/kubepods", "/pod" + podUID},
		"cgroupfs, --cgroup-root": {"/custom/kubepods", "/besteffort/pod" + podUID},
		"systemd":                 {"/kubepods.slice", "/kubepods-burstable.slice/kubepods-burstable-pod" + underscored + ".slice"},
		"systemd, guaranteed":     {"/kubepods.slice", "/kubepods-pod" + underscored + ".slice"},
		"systemd, --cgroup-root": {
			"/kubelet.slice/kubelet-kubepods.slice", "/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod" + underscored + ".slice",
		},
	} {
		t.Run(name, func(t *testing.T) {
			container := tc.top + tc.pod + "/cri-containerd-0a1b.scope"
			// CRI-O's names, with a cgroup for the container's monitor.
			for _, name := range []string{"cri-containerd-0a1b.scope", "0a1b", "crio-0a1b.scope", "crio-0a1b", "crio-conmon-0a1b"} {
				path := tc.top + tc.pod + "/" + name
				if above, ok := kubepods.Above(path); !ok || above != filepath.Dir(tc.top) {
					t.Errorf("above %s is %q, %t", path, above, ok)
				}
				if got := kubepods.PodUID([]byte("0::" + path + "\n")); got != podUID {
					t.Errorf("%s is pod %q", path, got)
				}
			}
			if dirs := kubepods.Dirs(tc.top, podUID); !slices.Contains(dirs, tc.top+tc.pod) {
				t.Errorf("the pod's cgroup is none of %q", dirs)
			}
			for i, element := range strings.Split(container, "/") {
				if got, want := kubepods.IsTop(element), i == strings.Count(tc.top, "/"); got != want {
					t.Errorf("%s contains all pods: %t", element, got)
				}
			}
		})
	}
	for _, other := range []string{"/system.slice/nvidia-persistenced.service", "/user.slice", "/"} {
		if above, ok := kubepods.Above(other); ok || kubepods.PodUID([]byte("0::"+other+"\n")) != "" {
			t.Errorf("%s is taken for a pod's, below %s", other, above)
		}
	}
	// A runtime without the kubelet's systemd driver.
	if above, ok := kubepods.Above("/system.slice/containerd.service/kubepods-pod" + underscored + ".slice:cri-containerd:0a1b"); !ok || above != "/system.slice/containerd.service" {
		t.Errorf("above a container of a runtime with cgroupfs is %q, %t", above, ok)
	}
}
