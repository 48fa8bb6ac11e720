//go:build agreement

package agreement

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/stack"
)

var (
	seed  = flag.Uint64("seed", rand.Uint64(), "seed of the claims and of the pods that end; printed")
	count = flag.Int("pods", 300, "pods to judge")
	name  = flag.String("cluster", "agreement", "name of the cluster")
)

// batch is after how many pods some of them are deleted.
const batch = 25

// TestAgreement: of every pod `kubectl gpu fits` says before whether it will be placed,
// on which nodes, and which devices it gets there; `kubectl gpu why` says that it waits;
// and after the end of the claims that it names, the scheduler places the pod. Then pods of
// shapes that random claims don't have.
func TestAgreement(t *testing.T) {
	c := begin(t)
	for i := range *count {
		if i > 0 && i%batch == 0 {
			c.change(t)
			t.Logf("progress: %d pods: %s", i, c.tally)
		}
		c.play(t, fmt.Sprintf("pod-%03d", i))
	}
	fmt.Printf("agreement: seed %d: %s\n", *seed, c.tally)
	if c.wrong > 0 || c.pods != *count {
		t.Errorf("%d disagreements over %d pods", c.wrong, c.pods)
	}
	if c.placed < c.pods/4 || c.causes[fit.InUse] < c.pods/20 {
		t.Error("so few pods were placed, or waited for others, that agreement says little")
	}
	c.shapes(t)
}

// tally counts what happened.
type tally struct {
	pods, placed, wrong int
	// causes of the pods that wait.
	causes map[fit.Cause]int
	// released counts pods that were placed after the end of the claims that `why` named.
	released int
}

func (c tally) String() string {
	var causes []string
	waiting := 0
	for _, cause := range slices.Sorted(maps.Keys(c.causes)) {
		causes = append(causes, fmt.Sprintf("%s %d", cause, c.causes[cause]))
		waiting += c.causes[cause]
	}
	return fmt.Sprintf("%d pods: %d placed, on the nodes and with the devices that fits had said; %d left pending (%s); "+
		"%d of these placed after the end of the claims that why had named; %d disagreements",
		c.pods, c.placed, waiting, strings.Join(causes, ", "), c.released, c.wrong)
}

// play judges a pod, lets the scheduler decide, and compares.
func (c *check) play(t *testing.T, name string) {
	t.Helper()
	p := c.newPod(name)
	said := c.fits(t, p)
	c.create(t, p)
	placed := c.decision(t, p, said.Count > 0)
	c.pods++
	switch {
	case placed == "" && said.Count == 0:
		c.waits(t, p)
		return
	case placed == "":
		c.disagree(t, p, "fits says that it fits on %s, and the scheduler leaves it pending: %s", names(said), c.message(t, p))
	case said.Count == 0:
		c.disagree(t, p, "fits says %q, and the scheduler places it on %s with %v", said.Reason.Text, placed, c.devices(t, p))
	default:
		i := slices.IndexFunc(said.Nodes, func(r fit.Room) bool { return r.Node == placed })
		if i < 0 {
			c.disagree(t, p, "fits says %s, and the scheduler chooses %s", names(said), placed)
		} else if got := c.devices(t, p); !slices.Equal(got, said.Nodes[i].Devices) {
			c.disagree(t, p, "fits says that it gets %v on %s, and it gets %v", said.Nodes[i].Devices, placed, got)
		}
	}
	if placed == "" {
		c.delete(t, p.Name)
		return
	}
	c.placed++
	c.running = append(c.running, p.Name)
}

func names(a fit.Answer) string {
	var out []string
	for _, r := range a.Nodes {
		out = append(out, r.Node)
	}
	return strings.Join(out, ", ")
}

// waits compares the reason for which a pod waits, and sometimes ends the claims that it
// names. The pod doesn't stay.
func (c *check) waits(t *testing.T, p *corev1.Pod) {
	t.Helper()
	defer c.delete(t, p.Name)
	var why struct {
		Waits  bool
		Text   string
		Reason *fit.Reason
	}
	c.ask(t, &why, "why", p.Name, "-o", "json")
	if !why.Waits {
		c.disagree(t, p, "why says %q, and the scheduler leaves it pending: %s", why.Text, c.message(t, p))
		return
	}
	cause := fit.NoNode
	if why.Reason != nil {
		cause = why.Reason.Cause
	}
	c.causes[cause]++
	if cause != fit.InUse || !c.random.one(2) {
		return
	}
	var holders []string
	for _, claim := range why.Reason.Release {
		pod, _, _ := strings.Cut(claim.Name, "."+claimSuffix)
		holders = append(holders, pod)
	}
	slices.Sort(holders)
	for _, pod := range slices.Compact(holders) {
		c.delete(t, pod)
	}
	switch placed := c.decision(t, p, true); placed {
	case why.Reason.Node:
		c.released++
	default:
		c.disagree(t, p, "why says that it fits on %s after the end of %v, and it is on %q: %s", why.Reason.Node, why.Reason.Release, placed, c.message(t, p))
	}
}

// change ends some of the pods, and taints other devices than before. Most pods stay, so
// that the GPUs fill.
func (c *check) change(t *testing.T) {
	t.Helper()
	for _, name := range slices.Clone(c.running) {
		if c.random.one(3) {
			c.delete(t, name)
		}
	}
	c.taint(t)
}

// fits asks on which nodes of the pod its claims fit.
func (c *check) fits(t *testing.T, p *corev1.Pod) fit.Answer {
	t.Helper()
	file := filepath.Join(t.TempDir(), "claims.json")
	var text []byte
	for i := range c.claims[p.Name] {
		raw, err := json.Marshal(&c.claims[p.Name][i])
		if err != nil {
			t.Fatal(err)
		}
		text = append(append(text, raw...), "\n---\n"...)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	var said []struct{ Answer fit.Answer }
	c.ask(t, &said, "fits", "-f", file, "--limit", "1", "-o", "json")
	a := said[0].Answer
	if node := p.Spec.NodeSelector[corev1.LabelHostname]; node != "" {
		a.Nodes = slices.DeleteFunc(a.Nodes, func(r fit.Room) bool { return r.Node != node })
		a.Count = len(a.Nodes)
		if a.Count == 0 && a.Reason == nil {
			a.Reason = &fit.Reason{Text: "not on " + node}
		}
	}
	return a
}

// ask runs kubectl gpu and reads its JSON.
func (c *check) ask(t *testing.T, into any, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), c.program, append(args, "--kubeconfig", c.Cluster.KubeconfigPath())...)
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() != 1 {
		t.Fatalf("kubectl gpu %v: %v: %s", args, err, exit.Stderr)
	}
	if err := json.Unmarshal(out, into); err != nil {
		t.Fatalf("kubectl gpu %v: %v: %s", args, err, out)
	}
}

// patience is for how long the scheduler may say nothing of a pod, because it tries
// combinations of devices for ten seconds a node, or that a pod doesn't fit that does,
// because it hasn't seen the end of claims yet and tries again after ten seconds.
const patience = 2 * time.Minute

// decision returns the node on which the scheduler places the pod; empty if it leaves
// the pod pending.
func (c *check) decision(t *testing.T, p *corev1.Pod, expected bool) string {
	t.Helper()
	until := time.Now().Add(patience)
	for {
		now := c.get(t, p)
		if now.Spec.NodeName != "" {
			return now.Spec.NodeName
		}
		if condition(now) != nil && !expected {
			return ""
		}
		if time.Now().After(until) {
			if condition(now) == nil {
				t.Fatalf("the scheduler says nothing of pod %s", p.Name)
			}
			return ""
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// condition is the scheduler's verdict on a pod that it doesn't place.
func condition(p *corev1.Pod) *corev1.PodCondition {
	for i := range p.Status.Conditions {
		if c := &p.Status.Conditions[i]; c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return c
		}
	}
	return nil
}

func (c *check) message(t *testing.T, p *corev1.Pod) string {
	t.Helper()
	if v := condition(c.get(t, p)); v != nil {
		return v.Reason + ": " + v.Message
	}
	return ""
}

func (c *check) get(t *testing.T, p *corev1.Pod) *corev1.Pod {
	t.Helper()
	now, err := c.Kube().CoreV1().Pods(p.Namespace).Get(t.Context(), p.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return now
}

// devices are those that the pod's claims have, in the order of its requests.
func (c *check) devices(t *testing.T, p *corev1.Pod) []string {
	t.Helper()
	var out []string
	for _, claim := range c.claims[p.Name] {
		now, err := c.Kube().ResourceV1().ResourceClaims(p.Namespace).Get(t.Context(), claim.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if now.Status.Allocation != nil {
			for _, r := range now.Status.Allocation.Devices.Results {
				out = append(out, r.Device)
			}
		}
	}
	return out
}

// disagree records a difference, with everything that is needed to look into it.
func (c *check) disagree(t *testing.T, p *corev1.Pod, format string, a ...any) {
	t.Helper()
	c.wrong++
	var specs []resourceapi.ResourceClaimSpec
	for _, claim := range c.claims[p.Name] {
		specs = append(specs, claim.Spec)
	}
	raw, err := json.Marshal(specs)
	t.Errorf("pod %s, node selector %v: %s\nclaims: %s %v", p.Name, p.Spec.NodeSelector, fmt.Sprintf(format, a...), raw, err)
}

// begin brings up a cluster with Tessera, policies of every kind, and no kubelets.
func begin(t *testing.T) *check {
	t.Helper()
	c := &check{
		random: author{rand.New(rand.NewPCG(*seed, 0))}, tally: tally{causes: make(map[fit.Cause]int)},
		claims: make(map[string][]resourceapi.ResourceClaim), program: filepath.Join(t.TempDir(), "kubectl-gpu"),
	}
	t.Logf("seed %d", *seed)
	build := exec.CommandContext(t.Context(), "go", "build", "-o", c.program, "../../cmd/kubectl-gpu")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build kubectl-gpu: %v: %s", err, out)
	}
	s, err := stack.Up(t.Context(), stack.Options{
		DRA:  cluster.DRAAll, // for PodGroups
		Name: *name, Machines: []string{"8xh100-80gb", "2xa100-80gb,2xl40s,1xh200", "8xh100-80gb"},
		// Nodes without kubelets get taints, which would evict the controller.
		Values: []string{"controller.tolerations[0].operator=Exists"}, Out: os.Stderr,
	})
	if err != nil {
		t.Fatal(err)
	}
	c.Stack = s
	t.Cleanup(func() {
		if err := s.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	c.publish(t)
	return c
}
