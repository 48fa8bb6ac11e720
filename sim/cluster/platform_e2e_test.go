//go:build e2e

package cluster_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/sim/cluster"
)

// A cluster of a platform has what the platform's file says, also after a power cut.
func TestPlatform(t *testing.T) {
	c := up(t, cluster.Options{Name: "e2e-platform", Platform: "gke-cos"})
	node, plain := c.Nodes()[0], c.Nodes()[1]
	client, err := c.Client()
	if err != nil {
		t.Fatal(err)
	}
	t.Run("labels and taints", func(t *testing.T) {
		for name, want := range map[string]int{node: 1, plain: 0} {
			got, err := client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if _, labelled := got.Labels["cloud.google.com/gke-accelerator"]; labelled != (want == 1) || len(got.Spec.Taints) != want {
				t.Errorf("%s: labels %v, taints %v", name, got.Labels, got.Spec.Taints)
			}
		}
	})
	t.Run("pods that Kubernetes takes for critical", func(t *testing.T) {
		pod := sleeper("critical", plain, cluster.BusyboxImage)
		pod.Spec.PriorityClassName = "system-node-critical"
		if _, err := client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err == nil || !strings.Contains(err.Error(), "insufficient quota") {
			t.Errorf("in another namespace: %v", err)
		}
		pod.Namespace = metav1.NamespaceSystem
		if _, err := client.CoreV1().Pods(metav1.NamespaceSystem).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Errorf("in kube-system: %v", err)
		}
	})
	platformFiles(t, c, node, plain)
	if _, err := c.Exec(t.Context(), node, "touch", "/var/lib/durable"); err != nil {
		t.Fatal(err)
	}
	if err := c.PowerOff(testContext(t), node); err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.Up(testContext(t), cluster.Options{Name: "e2e-platform", Platform: "gke-cos", Log: t.Output()}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Exec(t.Context(), node, "test", "-e", "/var/lib/durable"); err != nil {
		t.Errorf("the disk did not outlive the power cut: %v", err)
	}
	platformFiles(t, c, node, plain)
	pod := sleeper("after-the-power-cut", node, cluster.BusyboxImage)
	pod.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	runPod(t, c, pod)
}

func platformFiles(t *testing.T, c *cluster.Cluster, node, plain string) {
	t.Helper()
	const driver = "/home/kubernetes/bin/nvidia"
	for what, tc := range map[string]struct {
		node, command string
		want          string // in the output; empty: the command fails
	}{
		"root":                  {node, "touch /usr/here", ""},
		"programs in /var":      {node, "cp /bin/true /var/lib/program && /var/lib/program", ""},
		"in kubelet's root":     {node, "cp /bin/true /var/lib/kubelet/program && /var/lib/kubelet/program && echo ran", "ran"},
		"/var of the plain one": {plain, "cp /bin/true /var/lib/program && /var/lib/program", ""},
		"GPUs":                  {node, driver + "/bin/nvidia-smi -L", "GPU 1: NVIDIA H100"},
		"library":               {node, "ls " + driver + "/lib64", "libnvidia-ml.so.1"},
		"device nodes":          {node, "ls /dev", "nvidiactl"},
		"GPUs of the plain one": {plain, "test -e /dev/nvidiactl || test -e " + driver, ""},
	} {
		out, err := c.Exec(t.Context(), tc.node, "sh", "-c", tc.command)
		if failed := err != nil; failed != (tc.want == "") || !strings.Contains(string(out), tc.want) {
			t.Errorf("%s: %s, %v", what, out, err)
		}
	}
}
