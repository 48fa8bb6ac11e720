//go:build prometheus

package monitoring

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const example = "../../demo/autoscaling/"

// TestScaling runs demo/autoscaling with the real HorizontalPodAutoscaler controller and
// the real prometheus-adapter. The load is that of a service: its work is divided
// among its replicas.
func TestScaling(t *testing.T) {
	c := up(t, "prometheus-scaling", "2xl40s")
	c.startAdapter(t)
	c.apply(t, "../../demo/mps/equal-shares/policy.yaml")
	c.kubectl(t, "wait", "--for=condition=Applied", "sharingpolicy/quarters", "--timeout=60s")
	c.apply(t, example+"deployment.yaml")
	c.apply(t, example+"hpa.yaml")
	s := service{check: c, replicas: map[string]int{}}
	s.serve(t, "one replica, little load", 10, func(pods []string, metric string) bool { return len(pods) == 1 && metric == "100m" })
	// The pods have shares of a quarter: one GPU has room for four of them, and half a
	// GPU each has room for the load.
	s.serve(t, "replicas on both GPUs", 80, func(pods []string, _ string) bool { return len(pods) > 4 })
	gpus := c.has(t, "shares of both GPUs", `count by (type) (group by (type, parent_uuid) (tessera_allocation_info{pod=~"inference-.*"})) == 2`)
	if len(gpus) != 1 || gpus[0].Metric["type"] != "mps" {
		t.Errorf("the replicas have %v, want MPS shares of two GPUs", gpus)
	}
	s.serve(t, "one replica again", 10, func(pods []string, _ string) bool { return len(pods) == 1 })
}

// startAdapter starts prometheus-adapter with the rules of the example, and registers
// its API.
func (c *check) startAdapter(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile(example + "adapter/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var values struct {
		Rules struct {
			Default bool
			Custom  []any
		}
	}
	if err := yaml.UnmarshalStrict(text, &values); err != nil {
		t.Fatal(err)
	}
	config, err := yaml.Marshal(map[string]any{"rules": values.Rules.Custom})
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(freeAddress(t))
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := os.ReadFile("testdata/adapter.yaml")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	objects := filepath.Join(dir, "objects.yaml")
	write(t, objects, strings.NewReplacer("HOST", c.Cluster.HostAddress(), "PORT", port).Replace(string(manifest)))
	c.kubectl(t, "apply", "-f", objects)
	write(t, filepath.Join(dir, "config.yaml"), string(config))
	kubeconfig := c.adapterKubeconfig(t, dir)
	start(t, "prometheus-adapter",
		"--config="+filepath.Join(dir, "config.yaml"), "--prometheus-url="+c.url, "--metrics-relist-interval=10s",
		"--bind-address="+c.Cluster.HostAddress(), "--secure-port="+port, "--cert-dir="+dir,
		"--lister-kubeconfig="+kubeconfig, "--authentication-kubeconfig="+kubeconfig, "--authorization-kubeconfig="+kubeconfig)
	c.until(t, "True", "get", "apiservice", "v1beta1.custom.metrics.k8s.io", "-o", `jsonpath={.status.conditions[?(@.type=="Available")].status}`)
}

// adapterKubeconfig is that of the adapter's ServiceAccount.
func (c *check) adapterKubeconfig(t *testing.T, dir string) string {
	t.Helper()
	file := filepath.Join(dir, "kubeconfig")
	admin, err := os.ReadFile(c.Cluster.KubeconfigPath())
	if err != nil {
		t.Fatal(err)
	}
	write(t, file, string(admin))
	token := strings.TrimSpace(c.kubectl(t, "create", "token", "prometheus-adapter", "--namespace", "monitoring", "--duration", "1h"))
	c.kubectl(t, "config", "--kubeconfig", file, "set-credentials", "adapter", "--token", token)
	c.kubectl(t, "config", "--kubeconfig", file, "set-context", "--current", "--user", "adapter")
	return file
}

// service divides load among the replicas of the example.
type service struct {
	*check
	replicas map[string]int // the load of each pod
}

// serve keeps the pods at a load, in percent of a GPU, until pods and the autoscaler's
// metric are as wanted.
func (s *service) serve(t *testing.T, name string, load int, done func(pods []string, metric string) bool) {
	t.Helper()
	await(t, name, func(ctx context.Context) error {
		pods, err := s.pods(ctx)
		if err != nil {
			return err
		}
		for _, pod := range pods {
			if err := s.set(ctx, pod, load/len(pods)); err != nil {
				return err
			}
		}
		hpa, err := s.Kube().AutoscalingV2().HorizontalPodAutoscalers("default").Get(ctx, "inference", metav1.GetOptions{})
		if err != nil {
			return err
		}
		metric := "none"
		if m := hpa.Status.CurrentMetrics; len(m) == 1 && m[0].Pods != nil {
			metric = m[0].Pods.Current.AverageValue.String()
		}
		if !done(pods, metric) {
			return fmt.Errorf("%d pods, metric %s, %+v", len(pods), metric, hpa.Status.Conditions)
		}
		t.Logf("%s: %d pods, metric %s", name, len(pods), metric)
		return nil
	})
}

// pods are the replicas that run.
func (s *service) pods(ctx context.Context) (names []string, err error) {
	list, err := s.Kube().CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "app=inference", FieldSelector: "status.phase=Running"})
	if err != nil {
		return nil, err
	}
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			names = append(names, p.Name)
		}
	}
	return names, nil
}

func (s *service) set(ctx context.Context, pod string, load int) error {
	if now, found := s.replicas[pod]; found && now == load {
		return nil
	}
	if _, err := s.Kubectl(ctx, "exec", pod, "--", "sh", "-c", fmt.Sprintf("echo %d >/tmp/load", load)); err != nil {
		return err
	}
	s.replicas[pod] = load
	return nil
}
