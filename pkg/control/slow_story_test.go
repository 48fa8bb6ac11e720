//go:build integration && faults

package control_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Each sync of etcd's files takes half a second, and so each write of the API server: the
// controller that leads goes on to lead, and everything is written once.
func TestSlowEtcd(t *testing.T) {
	slow := slowServer(t)
	leader := launch(t, kubeconfig)
	eventually(t, "it leads", func() bool { return strings.Contains(leader.log.String(), "Successfully acquired lease") })
	next := launch(t, kubeconfig)
	var nodes []*node
	for range 4 {
		n := newMIGNode(t, 2)
		n.report(t)
		n.startPlugin(t)
		nodes = append(nodes, n)
	}
	p := newPolicy(t, v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}})
	p.Spec.NodeSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "node", Operator: metav1.LabelSelectorOpExists}}}
	if err := api.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		n.waitForDevices(t, map[string]int{"gpu": 2})
	}
	applied(t, p, v1alpha1.ReasonApplied)
	before := nodes[1].pool(t)[0].Spec.Pool.Generation

	slow(500 * time.Millisecond)
	begun := time.Now()
	change(t, p, func() { p.Spec.Plan = v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 2}} })
	for _, n := range nodes {
		n.waitForDevices(t, map[string]int{"gpu": 2, "timeslice": 4})
	}
	applied(t, p, v1alpha1.ReasonApplied)
	n := nodes[0]
	n.facts.GPUs[1].Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "fell off the bus"}}
	n.report(t)
	n.waitForTaints(t, map[string]string{"gpu-00000001": "gpu.nvidia.com/unhealthy=Lost:NoSchedule"})
	n.wipe(t)
	n.waitForPool(t, 2)
	t.Logf("all of it took %s", time.Since(begun).Round(time.Millisecond))
	slow(0)
	if got := nodes[1].pool(t)[0].Spec.Pool.Generation; got != before+1 {
		t.Errorf("the pool of a node was written %d times for one change of its policy", got-before)
	}
	if strings.Contains(next.log.String(), "Successfully acquired lease") {
		t.Error("the other controller leads")
	}
	after := state(t, nodes, p)
	newPublishedNode(t, 1)
	if diff := cmp.Diff(after, state(t, nodes, p)); diff != "" {
		t.Errorf("written when all was written (-before +after):\n%s", diff)
	}
}

// slowServer runs the rest of the story with another API server, whose etcd's disk can be
// made slow.
func slowServer(t *testing.T) (slow func(time.Duration)) {
	t.Helper()
	dir := t.TempDir()
	program, file := filepath.Join(dir, "slowsync"), filepath.Join(dir, "delay")
	if out, err := exec.Command("go", "build", "-o", program, "../../sim/cmd/slowsync").CombinedOutput(); err != nil {
		t.Fatalf("build slowsync: %v\n%s", err, out)
	}
	script := fmt.Sprintf("#!/bin/sh\nexec %q %q %q \"$@\" --unsafe-no-fsync=false\n", program, file, filepath.Join(binaries, "etcd"))
	if err := os.WriteFile(filepath.Join(dir, "etcd"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"kube-apiserver", "kubectl"} {
		if err := os.Symlink(filepath.Join(binaries, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	anotherServer(t, dir)
	return func(d time.Duration) {
		if err := os.WriteFile(file, []byte(d.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
