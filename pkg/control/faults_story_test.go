//go:build integration && faults

package control_test

import (
	"fmt"
	"maps"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// The leader is stopped for longer than its Lease lasts, as in a virtual machine that is
// paused. It wakes with an old cache and with everything that has happened since in its
// connections.
func TestPausedLeader(t *testing.T) {
	replacedLeader(t, func(leader *process, _ *detour) { send(t, leader, syscall.SIGSTOP) },
		func(leader *process, _ *detour) { send(t, leader, syscall.SIGCONT) })
}

// The leader can't reach the API server any more, but its connections stay open. The
// requests that it has sent arrive later.
func TestPartitionedLeader(t *testing.T) {
	replacedLeader(t, func(_ *process, way *detour) { way.sever() }, func(_ *process, way *detour) { way.mend() })
}

func send(t *testing.T, p *process, signal syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
}

// replacedLeader takes the leader away, has the next one change everything several times,
// and brings the first back: that one writes nothing, and ends.
func replacedLeader(t *testing.T, takeAway, bringBack func(*process, *detour)) {
	t.Helper()
	way := newDetour(t)
	leader := launch(t, way.kubeconfig)
	var nodes []*node
	for range 12 {
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
	all := func(want map[string]int) {
		t.Helper()
		for _, n := range nodes {
			n.waitForDevices(t, want)
		}
	}
	all(map[string]int{"gpu": 2})
	applied(t, p, v1alpha1.ReasonApplied)
	next := launch(t, kubeconfig)
	eventually(t, "the next controller waits", func() bool { return strings.Contains(next.log.String(), "Attempting to acquire leader lease") })

	begun := time.Now()
	takeAway(leader, way)
	// The first leader must not act upon these conditions when it is back.
	for _, n := range nodes {
		n.facts.GPUs[1].Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "fell off the bus"}}
		n.report(t)
	}
	eventually(t, "the next controller leads", func() bool { return strings.Contains(next.log.String(), "Successfully acquired lease") })
	t.Logf("the next controller leads after %s", time.Since(begun).Round(time.Millisecond))
	lost := map[string]string{"gpu-00000001": "gpu.nvidia.com/unhealthy=Lost:NoSchedule"}
	for _, n := range nodes {
		n.waitForTaints(t, lost)
	}
	for _, replicas := range []int32{2, 3, 4} {
		change(t, p, func() { p.Spec.Plan = v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: replicas}} })
		all(map[string]int{"gpu": 2, "timeslice": 2 * int(replicas)})
	}
	applied(t, p, v1alpha1.ReasonWithheld) // because of the lost GPUs
	before := state(t, nodes, p)
	way.written()

	begun = time.Now()
	bringBack(leader, way)
	eventually(t, "the first leader ends", func() bool {
		select {
		case <-leader.ended:
			return true
		default:
			return false
		}
	})
	t.Logf("the first leader has ended %s after it is back: %v", time.Since(begun).Round(time.Millisecond), leader.err)
	newPublishedNode(t, 1) // by the next controller
	if got := way.written(); len(got) > 0 {
		t.Errorf("the first leader has written %d times: %s", len(got), strings.Join(got, ", "))
	}
	if diff := cmp.Diff(before, state(t, nodes, p)); diff != "" {
		t.Errorf("written since the first leader is back (-before +after):\n%s", diff)
	}
}

// state returns the versions of everything that controllers write of nodes, and a policy's.
func state(t *testing.T, nodes []*node, p *v1alpha1.SharingPolicy) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, n := range nodes {
		maps.Copy(out, versions(n.pool(t), n.inventory(t)))
	}
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
		t.Fatal(err)
	}
	out[string(p.UID)] = fmt.Sprint(p.Name, " ", p.ResourceVersion)
	return out
}
