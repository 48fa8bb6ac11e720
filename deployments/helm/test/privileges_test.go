package test

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// TestPrivileges lists what each container of the chart has beyond Kubernetes' Pod
// Security Standard "restricted", and beyond a read-only root file system and no token.
// The templates say of each why it stays.
func TestPrivileges(t *testing.T) {
	const (
		root       = "runs as root"
		privileged = "is privileged"
		token      = "has a token"
		pids       = "sees the host's processes"
	)
	// Kubernetes has no seccomp profile and no limit of capabilities for privileged ones.
	want := map[string][]string{
		"tessera-controller/controller": {token},
		"tessera-node/kubelet-plugin": {
			"host / at /host, read-only",
			"host /dev at /dev",
			"host /run/tessera at /run/tessera, read-only",
			"host /var/lib/kubelet/plugins/gpu.nvidia.com at /var/lib/kubelet/plugins/gpu.nvidia.com",
			"host /var/lib/kubelet/plugins_registry at /var/lib/kubelet/plugins_registry",
			"host /var/lib/tessera at /var/lib/tessera",
			"host /var/run/cdi at /var/run/cdi",
			token, privileged, root, pids,
		},
		"tessera-mps/mps-supervisor": {
			"host / at /host, read-only",
			"host /run/tessera at /host/run/tessera",
			"host /run/tessera at /run/tessera",
			"host /sys/fs/cgroup at /sys/fs/cgroup",
			privileged, root, pids,
		},
		"tessera-remove-node-labels/remove-node-labels": {token},
		"tessera-remove-node-taints/remove-node-taints": {token},
		"tessera-simulator/nvmlsim": {
			"capability MKNOD",
			"host /var/lib/tessera-simulator at /var/lib/tessera-simulator",
			root,
		},
	}
	got := map[string][]string{}
	for _, args := range [][]string{{"--set=controller.nodeLabels.enabled=true,packing.ranks=true"}, {"--values=testdata/simulator.values.yaml"}} {
		out, all, err := templateWithHooks(t, append(args, "--kube-version=1.37.1")...)
		if err != nil {
			t.Fatalf("helm template: %v\n%s", err, all)
		}
		for doc := range strings.SplitSeq(out, "\n---\n") {
			var object struct {
				Metadata struct{ Name string }
				Spec     struct{ Template corev1.PodTemplateSpec }
			}
			if err := yaml.Unmarshal([]byte(doc), &object); err != nil {
				t.Fatal(err)
			}
			for _, c := range object.Spec.Template.Spec.Containers {
				name := object.Metadata.Name + "/" + c.Name
				slices.Sort(want[name])
				if got[name] == nil { // as without the simulator
					got[name] = privileges(object.Spec.Template.Spec, c)
				}
			}
		}
	}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("give the reason in the template, and in docs/user/security.md (-want +got):\n%s", diff)
	}
}

// privileges lists those of one container, sorted.
func privileges(pod corev1.PodSpec, c corev1.Container) []string {
	var has []string
	add := func(is bool, format string, args ...any) {
		if is {
			has = append(has, fmt.Sprintf(format, args...))
		}
	}
	own, shared := ptr.Deref(c.SecurityContext, corev1.SecurityContext{}), ptr.Deref(pod.SecurityContext, corev1.PodSecurityContext{})
	add(pod.HostPID, "sees the host's processes")
	add(pod.HostNetwork, "is in the host's network")
	add(pod.HostIPC, "shares the host's memory")
	add(ptr.Deref(pod.AutomountServiceAccountToken, true), "has a token")
	add(!ptr.Deref(cmp.Or(own.RunAsNonRoot, shared.RunAsNonRoot), false), "runs as root")
	add(own.RunAsUser == nil && !ptr.Deref(shared.RunAsNonRoot, false), "may be root, but isn't: the image's user")
	add(!ptr.Deref(own.ReadOnlyRootFilesystem, false), "can write to its root file system")
	if ptr.Deref(own.Privileged, false) {
		has = append(has, "is privileged")
	} else {
		caps := ptr.Deref(own.Capabilities, corev1.Capabilities{})
		seccomp := ptr.Deref(cmp.Or(own.SeccompProfile, shared.SeccompProfile), corev1.SeccompProfile{})
		add(!slices.Contains(caps.Drop, "ALL"), "has all of the runtime's capabilities")
		for _, capability := range caps.Add {
			has = append(has, "capability "+string(capability))
		}
		add(ptr.Deref(own.AllowPrivilegeEscalation, true), "can get more privileges")
		add(seccomp.Type != corev1.SeccompProfileTypeRuntimeDefault, "may make any system call")
	}
	for _, m := range c.VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if host := pod.Volumes[i].HostPath; host != nil {
			readOnly := map[bool]string{true: ", read-only"}[m.ReadOnly]
			has = append(has, fmt.Sprintf("host %s at %s%s", host.Path, m.MountPath, readOnly))
		}
	}
	slices.Sort(has)
	return has
}
