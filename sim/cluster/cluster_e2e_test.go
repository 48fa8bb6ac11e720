//go:build e2e

package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/sim/cluster"
)

// These tests run real clusters: as root, go test -tags e2e ./sim/cluster/.

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// up brings a cluster up and, when the test ends, takes it down and checks
// that nothing is left.
func up(t *testing.T, options cluster.Options) *cluster.Cluster {
	t.Helper()
	options.Log = t.Output()
	cleanUp(t, options.Name)
	begin := time.Now()
	c, err := cluster.Up(testContext(t), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("up took %s", time.Since(begin))
	return c
}

func cleanUp(t *testing.T, name string) {
	t.Helper()
	t.Cleanup(func() {
		begin := time.Now()
		if err := cluster.Down(context.Background(), name, t.Output()); err != nil {
			t.Error(err)
		}
		t.Logf("down took %s", time.Since(begin))
		wantNothingLeft(t, name)
	})
}

// leftovers lists what the host still has of a cluster.
func leftovers(t *testing.T, name string) []string {
	t.Helper()
	var left []string
	state := filepath.Join("/var/lib/localcluster", name)
	if _, err := os.Stat(state); !errors.Is(err, fs.ErrNotExist) {
		left = append(left, "file "+state)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), state) {
		left = append(left, "mounts of "+state)
	}
	groups, err := exec.Command("find", "/sys/fs/cgroup", "-path", "*/localcluster/"+name).Output()
	var failed *exec.ExitError // find fails when a cgroup of another cluster is removed meanwhile
	if err != nil && !errors.As(err, &failed) {
		t.Fatal(err)
	}
	for group := range strings.FieldsSeq(string(groups)) {
		left = append(left, "cgroup "+group)
	}
	return append(left, processesOf(t, name)...)
}

// processesOf finds processes by their pid 1's name and by their cgroup.
func processesOf(t *testing.T, name string) []string {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, dir := range dirs {
		command, err := os.ReadFile(dir + "/cmdline")
		if err != nil {
			continue // it ended meanwhile
		}
		group, err := os.ReadFile(dir + "/cgroup")
		if err != nil {
			continue
		}
		if strings.HasPrefix(string(command), "machine-init:"+name+"/") || strings.Contains(string(group), "/localcluster/"+name+"/") {
			found = append(found, fmt.Sprintf("process %s %q", dir, command))
		}
	}
	return found
}

func wantNothingLeft(t *testing.T, name string) {
	t.Helper()
	if left := leftovers(t, name); len(left) > 0 {
		t.Errorf("left of cluster %s:\n%s", name, strings.Join(left, "\n"))
	}
}

// hostLinks names the host's links that are in the cluster's network.
func hostLinks(t *testing.T, server string) []string {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	network, err := netip.MustParseAddr(u.Host).Prefix(24)
	if err != nil {
		t.Fatal(err)
	}
	list, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, address := range list {
		if a, ok := netip.AddrFromSlice(address.IP); ok && network.Contains(a.Unmap()) {
			names = append(names, address.Label)
		}
	}
	return names
}

func sleeper(name, node, image string) *corev1.Pod {
	grace := int64(1)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.PodSpec{
			NodeSelector:                  map[string]string{corev1.LabelHostname: node},
			TerminationGracePeriodSeconds: &grace,
			Containers: []corev1.Container{{
				Name: "main", Image: image,
				Command: []string{"sh", "-c", "echo hello from " + name + "; exec httpd -f -p 8080 -h /etc"},
			}},
		},
	}
}

// runPod creates a pod and returns it once it runs.
func runPod(t *testing.T, c *cluster.Cluster, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	client, err := c.Client()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Pods(pod.Namespace).Create(testContext(t), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return waitPod(t, c, pod.Name, func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
}

func waitPod(t *testing.T, c *cluster.Cluster, name string, done func(*corev1.Pod) bool) *corev1.Pod {
	t.Helper()
	client, err := c.Client()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(testContext(t), time.Minute)
	defer cancel()
	for {
		pod, err := client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})
		if err == nil && done(pod) {
			return pod
		}
		select {
		case <-ctx.Done():
			t.Fatalf("pod %s of cluster %s: %v, last seen: %+v", name, c.Name(), err, pod.Status)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func kubectl(t *testing.T, c *cluster.Cluster, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(testContext(t), c.Binary("kubectl"), append([]string{"--kubeconfig", c.KubeconfigPath()}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s%s", strings.Join(args, " "), err, out, stderr.String())
	}
	return string(out)
}

func TestClustersSideBySide(t *testing.T) {
	a := up(t, cluster.Options{Name: "e2e-a", Nodes: 2})
	b := up(t, cluster.Options{Name: "e2e-b"})
	pods := map[string]*corev1.Pod{}
	for _, node := range a.Nodes() {
		pods[node] = runPod(t, a, sleeper("on-"+node, node, cluster.BusyboxImage))
	}
	runPod(t, b, sleeper("on-node-0", "node-0", cluster.GlibcImage))

	t.Run("logs", func(t *testing.T) {
		if got := kubectl(t, a, "logs", "on-node-1"); got != "hello from on-node-1\n" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("pods reach each other across nodes", func(t *testing.T) {
		got := kubectl(t, a, "exec", "on-node-0", "--", "wget", "-q", "-O-", "http://"+pods["node-1"].Status.PodIP+":8080/group")
		if !strings.Contains(got, "root:x:0:") {
			t.Errorf("got %q", got)
		}
	})
	t.Run("pods reach the API server by its cluster IP", func(t *testing.T) {
		kubectl(t, a, "exec", "on-node-0", "--", "sh", "-c", "nc -w 5 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT </dev/null")
	})
	t.Run("C library", func(t *testing.T) {
		kubectl(t, b, "exec", "on-node-0", "--", "/sbin/ldconfig")
		got := kubectl(t, b, "exec", "on-node-0", "--", "/sbin/ldconfig", "-p")
		if !strings.Contains(got, "libstdc++.so.6") {
			t.Errorf("libraries: %s", got)
		}
	})
	t.Run("files of one node are its own", func(t *testing.T) {
		if _, err := a.Exec(t.Context(), "node-0", "mkdir", "-p", "/etc/cdi/here", "/opt/here"); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(a.NodeDir("node-0") + "/etc/cdi/here"); err != nil {
			t.Error(err)
		}
		for _, dir := range []string{a.NodeDir("node-1") + "/etc/cdi/here", b.NodeDir("node-0") + "/etc/cdi/here", "/opt/here", "/etc/cdi/here"} {
			if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: %v, want it not to exist", dir, err)
			}
		}
	})
	t.Run("restart of the kubelet keeps pods", func(t *testing.T) { restartKubelet(t, a, pods["node-0"]) })
	t.Run("power cut of a node", func(t *testing.T) { powerCut(t, a) })
	t.Run("up again changes nothing", func(t *testing.T) {
		if _, err := cluster.Up(testContext(t), cluster.Options{Name: "e2e-a", Nodes: 2}); err != nil {
			t.Error(err)
		}
		waitPod(t, a, "on-node-0", func(p *corev1.Pod) bool { return p.Status.ContainerStatuses[0].RestartCount == 0 })
	})
	t.Run("up with other options is refused", func(t *testing.T) {
		_, err := cluster.Up(testContext(t), cluster.Options{Name: "e2e-a", Nodes: 3})
		if err == nil || !strings.Contains(err.Error(), "other options") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("writes are in the audit log", func(t *testing.T) {
		log, err := os.ReadFile(a.AuditLog())
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(log), `"name":"on-node-0"`) {
			t.Error("the creation of a pod is not in the audit log")
		}
	})
	t.Run("down of one leaves the other", func(t *testing.T) {
		links := hostLinks(t, b.Server())
		if len(links) != 1 {
			t.Fatalf("cluster e2e-b has host links %v, want one", links)
		}
		if err := b.Down(testContext(t)); err != nil {
			t.Fatal(err)
		}
		wantNothingLeft(t, "e2e-b")
		if links := hostLinks(t, b.Server()); len(links) > 0 {
			t.Errorf("links %v are left", links)
		}
		kubectl(t, a, "exec", "on-node-0", "--", "true")
	})
}

func restartKubelet(t *testing.T, c *cluster.Cluster, pod *corev1.Pod) {
	t.Helper()
	before := pod.Status.ContainerStatuses[0].ContainerID
	if err := c.Restart(testContext(t), "node-0", "kubelet"); err != nil {
		t.Fatal(err)
	}
	runPod(t, c, sleeper("after-restart", "node-0", cluster.BusyboxImage))
	if err := c.Kill("node-0", "kubelet"); err != nil {
		t.Fatal(err)
	}
	runPod(t, c, sleeper("after-kill", "node-0", cluster.BusyboxImage))
	after := waitPod(t, c, pod.Name, func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
	if got := after.Status.ContainerStatuses[0].ContainerID; got != before {
		t.Errorf("the container was replaced: %s, before %s", got, before)
	}
}

func powerCut(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	if _, err := c.Exec(t.Context(), "node-1", "touch", "/run/volatile", "/var/lib/tessera/durable"); err != nil {
		t.Fatal(err)
	}
	if err := c.PowerOff(testContext(t), "node-1"); err != nil {
		t.Fatal(err)
	}
	if err := c.PowerOn(testContext(t)); err != nil {
		t.Fatal(err)
	}
	waitPod(t, c, "on-node-1", func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount == 1 && p.Status.ContainerStatuses[0].State.Running != nil
	})
	if _, err := os.Stat(c.NodeDir("node-1") + "/run/volatile"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("/run outlived the power cut: %v", err)
	}
	if _, err := os.Stat(c.NodeDir("node-1") + "/var/lib/tessera/durable"); err != nil {
		t.Errorf("the disk did not outlive the power cut: %v", err)
	}
}

// killSupervisors sends SIGKILL to pid 1 of machines whose name starts so.
func killSupervisors(t *testing.T, prefix string) {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	for _, dir := range dirs {
		command, err := os.ReadFile(dir + "/cmdline")
		if err != nil || !strings.HasPrefix(string(command), "machine-init:"+prefix) {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(filepath.Base(dir), "%d", &pid); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		killed++
	}
	if killed == 0 {
		t.Fatalf("no supervisor %s* found", prefix)
	}
}

func TestUpRepairsAfterKill(t *testing.T) {
	options := cluster.Options{Name: "e2e-kill"}
	c := up(t, options)
	runPod(t, c, sleeper("survivor", "node-0", cluster.BusyboxImage))
	killSupervisors(t, "e2e-kill/control-plane")
	if _, err := cluster.Up(testContext(t), options); err != nil {
		t.Fatal(err)
	}
	kubectl(t, c, "exec", "survivor", "--", "true")
	killSupervisors(t, "e2e-kill/")
	if err := c.Down(testContext(t)); err != nil {
		t.Fatal(err)
	}
	wantNothingLeft(t, "e2e-kill")
}

func TestDownAfterFailedUp(t *testing.T) {
	t.Run("a component that can't start", func(t *testing.T) {
		cleanUp(t, "e2e-bad")
		_, err := cluster.Up(testContext(t), cluster.Options{Name: "e2e-bad", FeatureGates: map[string]bool{"NoSuchGate": true}})
		if err == nil || !strings.Contains(err.Error(), "NoSuchGate") {
			t.Errorf("got %v, want an error with the end of the log", err)
		}
	})
	t.Run("interrupted while starting", func(t *testing.T) {
		cleanUp(t, "e2e-bad")
		ctx, cancel := context.WithTimeout(testContext(t), time.Second)
		defer cancel()
		if _, err := cluster.Up(ctx, cluster.Options{Name: "e2e-bad"}); err == nil {
			t.Error("no error")
		}
	})
	t.Run("nothing to build from", func(t *testing.T) {
		_, err := cluster.Up(testContext(t), cluster.Options{Name: "e2e-bad", BinDir: t.TempDir()})
		if err == nil || !strings.Contains(err.Error(), "no directory of built binaries") {
			t.Errorf("got %v", err)
		}
		wantNothingLeft(t, "e2e-bad")
	})
	t.Run("half-written state", func(t *testing.T) {
		cleanUp(t, "e2e-bad")
		if err := os.MkdirAll("/var/lib/localcluster/e2e-bad/machines/node-0", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile("/var/lib/localcluster/e2e-bad/cluster.json", []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	})
}
