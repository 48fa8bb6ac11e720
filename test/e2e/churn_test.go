//go:build e2e

package e2e

import (
	"context"
	"flag"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/test/stack"
)

var cycles = flag.Int("cycles", 10, "how often the churn test creates and deletes eight pods")

const (
	churnStory = "churn"
	churnNode  = "node-0"
	churnNS    = "churn"
)

// churn creates and deletes eight pods, every other one with a whole GPU, the
// others with a MIG partition, again and again, and then looks for leftovers:
// claims and partitions in the journal and in the hardware, CDI specs, slices,
// goroutines and memory of the plugin.
func churn(t *testing.T, s *stack.Stack) {
	ctx := t.Context()
	create(t, s)
	// The first cycles fill caches and pools that later ones reuse.
	for i := range 3 {
		cycle(ctx, t, s, i)
	}
	before := readFootprint(ctx, t, s)
	for i := range *cycles {
		cycle(ctx, t, s, 3+i)
	}
	after := readFootprint(ctx, t, s)
	t.Logf("before %+v, after %d cycles %+v", before, *cycles, after)
	if after.records != 0 || after.specs != 0 || after.instances != 0 {
		t.Errorf("%d records in the journal, %d CDI specs and %d MIG devices are left", after.records, after.specs, after.instances)
	}
	if err := healthy(ctx, s); err != nil {
		t.Error(err)
	}
	if after.slices != before.slices {
		t.Errorf("slices changed:\n%s\nto:\n%s", before.slices, after.slices)
	}
	if after.goroutines > before.goroutines+10 {
		t.Errorf("goroutines grew from %d to %d", before.goroutines, after.goroutines)
	}
	// A leak of one kilobyte a claim would be 800 KiB in a hundred cycles; the
	// Go heap itself breathes by more, so only growth beyond a tenth counts.
	if after.heap > before.heap*11/10+1<<20 {
		t.Errorf("the plugin's live heap grew from %d to %d bytes", before.heap, after.heap)
	}
}

func create(t *testing.T, s *stack.Stack) {
	t.Helper()
	ctx := t.Context()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: churnNS}}
	if _, err := s.Kube().CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := s.Kubectl(context.WithoutCancel(ctx), "delete", "namespace", churnNS, "--wait=true", "--timeout=120s"); err != nil {
			t.Error(err)
		}
	})
	if err := s.Apply(ctx, churnNS, []byte(churnTemplates)); err != nil {
		t.Fatal(err)
	}
}

const churnTemplates = `apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: whole}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly: {deviceClassName: gpu.nvidia.com}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: partition}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: mig.nvidia.com
          selectors:
          - cel: {expression: 'device.attributes["gpu.nvidia.com"].profile == "1g.10gb"'}
`

// cycle creates eight pods, waits until all run, deletes them and waits until
// they are gone.
func cycle(ctx context.Context, t *testing.T, s *stack.Stack, n int) {
	t.Helper()
	pods := s.Kube().CoreV1().Pods(churnNS)
	for i := range 8 {
		template := "whole"
		if i%2 == 1 {
			template = "partition"
		}
		p := stack.Pod(fmt.Sprintf("churn-%d-%d", n, i), template)
		p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: churnNode}
		if _, err := pods.Create(ctx, p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	waitPods(ctx, t, s, "run", func(list []corev1.Pod) bool {
		for _, p := range list {
			if p.Status.Phase != corev1.PodRunning {
				return false
			}
		}
		return len(list) == 8
	})
	if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	waitPods(ctx, t, s, "go", func(list []corev1.Pod) bool { return len(list) == 0 })
}

func waitPods(ctx context.Context, t *testing.T, s *stack.Stack, what string, done func([]corev1.Pod) bool) {
	t.Helper()
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, 2*time.Minute, true, func(ctx context.Context) (bool, error) {
		list, err := s.Kube().CoreV1().Pods(churnNS).List(ctx, metav1.ListOptions{})
		return err == nil && done(list.Items), nil
	})
	if err != nil {
		t.Fatalf("wait for eight pods to %s: %v", what, err)
	}
}

// footprint has the resources that the node's plugin uses.
type footprint struct {
	records, specs, instances int
	slices                    string
	goroutines, heap          int
}

func readFootprint(ctx context.Context, t *testing.T, s *stack.Stack) footprint {
	t.Helper()
	var f footprint
	// The kubelet unprepares just after the last pod is gone; MIG mode is
	// switched off some seconds after the last partition is.
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		f.records = lines(ctx, t, s, `find /var/lib/tessera -name "*.json" ! -path "*/health/*" ! -path "*/seen/*"`)
		f.specs = lines(ctx, t, s, `find /var/run/cdi -name "*claim_*"`)
		f.instances = lines(ctx, t, s, s.SMI+` -L | grep MIG || true`)
		return f.records+f.specs+f.instances == 0, nil
	})
	if err != nil {
		t.Logf("journal and CDI directory are not empty: %v", err)
	}
	if f.slices, err = s.Kubectl(ctx, "get", "resourceslices", "-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.resourceVersion}{"\n"}{end}`); err != nil {
		t.Fatal(err)
	}
	metrics, err := pluginMetrics(ctx, s, churnNode)
	if err != nil {
		t.Fatal(err)
	}
	f.goroutines, f.heap = metric(t, metrics, "go_goroutines"), metric(t, metrics, "go_memstats_next_gc_bytes")
	return f
}

func lines(ctx context.Context, t *testing.T, s *stack.Stack, script string) int {
	t.Helper()
	out, err := s.Cluster.Exec(ctx, churnNode, "sh", "-c", script)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(out), "\n")
}

func metric(t *testing.T, metrics, name string) int {
	t.Helper()
	m := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindStringSubmatch(metrics)
	if m == nil {
		t.Fatalf("the plugin has no metric %s", name)
	}
	v, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return int(v)
}
