//go:build versions

package upgrade

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/stack"
)

var (
	from = flag.String("from", "", "the commit that is upgraded from; default: "+first+", and each tag")
	only = flag.String("orders", "1,2,3,4,5", "the orders of the parts to try, by their numbers")
	keep = flag.Bool("keep", false, "leave the cluster up")
)

const (
	// first is the first commit whose supervisor can end the MPS daemons of this one: it
	// unmounts their /dev/shm.
	first = "c44f8ab"
	node  = "node-0"
	// repository of the images; their tags are those of the charts.
	repository = "localhost/tessera"
	next       = "next"
)

// upgrade is a cluster between two versions.
type upgrade struct {
	*stack.Stack
	// charts and manifests of the versions, by their tags.
	charts    map[string]string
	manifests map[string]map[part][]object
	before    string // the tag of the earlier version
	// keepsSupervisor is set if the earlier version's supervisor can't end this version's MPS
	// daemons. On the way back this version's supervisor stays then until no daemon is left, as
	// docs/user/operate.md says.
	keepsSupervisor bool
	held            string // see heldNow
	pods            *comings
}

// TestVersions upgrades from an earlier commit to this one and back: by Helm, and part by
// part with each of them first and last.
func TestVersions(t *testing.T) {
	froms := []string{*from}
	if *from == "" {
		froms = append([]string{first}, strings.Fields(git(t, "tag", "--list", "v*"))...)
	}
	for _, from := range froms {
		t.Run(from, func(t *testing.T) {
			u := up(t, from)
			u.apply(t, "testdata/claims.yaml")
			u.apply(t, "testdata/policies.yaml")
			u.ranks(t)
			u.hold(t)
			u.pods = u.come(t)
			defer u.pods.abort()
			u.pods.runAfter(t, time.Time{})
			began := time.Now()
			u.byHelm(t)
			for _, order := range chosen(t) {
				u.move(t, order, next)
				u.move(t, order, u.before)
			}
			if err := u.pods.end(); err != nil {
				t.Error(err)
			}
			t.Logf("from %s to this version and back in %s: %s", from, since(began), u.pods.report(began))
			u.leave(t)
		})
	}
}

// chosen returns the orders of -orders.
func chosen(t *testing.T) (all [][]part) {
	t.Helper()
	for number := range strings.SplitSeq(*only, ",") {
		i, err := strconv.Atoi(number)
		if err != nil || i < 1 || i > len(orders()) {
			t.Fatalf("-orders: %q isn't a number from 1 to %d", number, len(orders()))
		}
		all = append(all, orders()[i-1])
	}
	return all
}

// git runs git in this checkout.
func git(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("git %s: %v", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out))
}

// up brings a cluster up with the earlier version, and the images of both on its node.
func up(t *testing.T, from string) *upgrade {
	t.Helper()
	work := t.TempDir()
	source := filepath.Join(work, "source")
	git(t, "worktree", "add", "--detach", source, from)
	t.Cleanup(func() {
		if out, err := exec.Command("git", "worktree", "remove", "--force", source).CombinedOutput(); err != nil {
			t.Errorf("git worktree remove: %v: %s", err, out)
		}
	})
	here := git(t, "rev-parse", "--show-toplevel")
	u := &upgrade{before: from, manifests: map[string]map[part][]object{}, charts: map[string]string{
		from: copyChart(t, source, filepath.Join(work, "before")), next: copyChart(t, here, filepath.Join(work, next)),
	}}
	images := []string{build(t, source, work, from), build(t, here, work, next)}
	began := time.Now()
	c, err := cluster.Up(t.Context(), cluster.Options{Name: "upgrades", Nodes: 1, Log: os.Stderr})
	if c != nil && !*keep {
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if err := c.Down(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	u.keepsSupervisor = git(t, "rev-list", "--max-count=1", first, "^"+from) != ""
	if err := c.LoadImage(t.Context(), images[1]); err != nil {
		t.Fatal(err)
	}
	u.simulate(t, c, filepath.Join(here, chartDir))
	u.Stack, err = stack.Up(t.Context(), stack.Options{
		Name: "upgrades", Machines: []string{machine}, Image: images[0], Chart: u.charts[from], Values: []string{"image.tag=" + from}, Out: os.Stderr,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(u.Explain(context.Background()))
		}
	})
	u.manifests[from] = u.manifest(t)
	t.Logf("a cluster with %s came up in %s", from, since(began))
	return u
}

const (
	chartDir = "deployments/helm/tessera"
	machine  = "8xh100-80gb"
)

// copyChart copies a version's chart, without the simulator: the hardware and its driver
// stay as they are.
func copyChart(t *testing.T, source, to string) string {
	t.Helper()
	if err := os.CopyFS(to, os.DirFS(filepath.Join(source, chartDir))); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(to, "templates/simulator")); err != nil {
		t.Fatal(err)
	}
	return to
}

// build builds a version's image by its own code.
func build(t *testing.T, source, work, tag string) (archive string) {
	t.Helper()
	began := time.Now()
	archive = filepath.Join(work, tag+".tar")
	cmd := exec.CommandContext(t.Context(), "go", "run", "./deployments/container/build", "-output", archive, "-image", repository+":"+tag)
	cmd.Dir = source
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the image of %s: %v: %s", tag, err, out)
	}
	t.Logf("the image of %s was built in %s", tag, since(began))
	return archive
}

// simulate installs the simulator of this version's chart.
func (u *upgrade) simulate(t *testing.T, c *cluster.Cluster, chart string) {
	t.Helper()
	out, err := c.Command(t.Context(), "helm", "template", "tessera", chart, "--namespace", stack.Namespace,
		"--set", "image.repository="+repository, "--set", "image.tag="+next, "--set", "simulator.enabled=true", "--set-literal", "simulator.machine="+machine).Output()
	if err != nil {
		t.Fatalf("render the simulator: %v", err)
	}
	var simulator bytes.Buffer
	for document := range strings.SplitSeq(string(out), "\n---\n") {
		if strings.Contains(document, "/templates/simulator/") {
			simulator.WriteString("---\n" + document + "\n")
		}
	}
	if out, err := c.Command(t.Context(), "kubectl", "create", "namespace", stack.Namespace).CombinedOutput(); err != nil {
		t.Fatalf("create the namespace: %v: %s", err, out)
	}
	cmd := c.Command(t.Context(), "kubectl", "apply", "-f", "-")
	cmd.Stdin = &simulator
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("install the simulator: %v: %s", err, out)
	}
}

// manifest returns the objects of the installed release.
func (u *upgrade) manifest(t *testing.T) map[part][]object {
	t.Helper()
	out, err := u.Command(t.Context(), "helm", "get", "manifest", "tessera", "--namespace", stack.Namespace).Output()
	if err != nil {
		t.Fatalf("helm get manifest: %v", err)
	}
	all, err := split(string(out))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range parts() {
		if len(all[p]) == 0 && p != chart {
			t.Fatalf("the release has no %s", p)
		}
	}
	return all
}

// byHelm upgrades as an admin does, and rolls back.
func (u *upgrade) byHelm(t *testing.T) {
	t.Helper()
	began := time.Now()
	u.helm(t, "upgrade", "tessera", u.charts[next], "--reset-then-reuse-values", "--set", "image.tag="+next)
	u.renewSupervisor(t, next)
	u.check(t, "helm upgrade", began)
	u.manifests[next] = u.manifest(t)
	began = time.Now()
	u.helm(t, "rollback", "tessera", "1", "--force-conflicts") // a chart that had DeviceClasses takes them back
	u.renewSupervisor(t, u.before)
	u.check(t, "helm rollback", began)
}

// helm waits as docs say: the default way waits for the supervisor too, whose pod an admin
// deletes.
func (u *upgrade) helm(t *testing.T, args ...string) {
	t.Helper()
	args = append(args, "--namespace", stack.Namespace, "--wait=legacy", "--timeout", "3m")
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	if out, err := u.Command(ctx, "helm", args...).CombinedOutput(); err != nil {
		t.Fatalf("helm %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// move replaces the parts by those of a version, one after the other.
func (u *upgrade) move(t *testing.T, order []part, to string) {
	t.Helper()
	for i, p := range order {
		began := time.Now()
		u.replace(t, p, to)
		u.check(t, fmt.Sprintf("%s to %s, %d. of %v", p, to, i+1, order), began)
	}
}

// replace replaces a part's objects by those of a version, as Helm does: those that this
// version hasn't go last.
func (u *upgrade) replace(t *testing.T, p part, to string) {
	t.Helper()
	other := next
	if to == next {
		other = u.before
	}
	before, after := u.manifests[other][p], u.manifests[to][p]
	var text strings.Builder
	for _, o := range after {
		text.WriteString("---\n" + o.text + "\n")
	}
	if len(after) > 0 {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		cmd := u.Command(ctx, "kubectl", "apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", "-")
		cmd.Stdin = strings.NewReader(text.String())
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("replace the %s: %v: %s", p, err, out)
		}
	}
	if ids := removed(before, after); len(ids) > 0 {
		u.kubectl(t, append([]string{"delete", "-n", stack.Namespace, "--ignore-not-found"}, ids...)...)
	}
	switch p {
	case controller:
		u.kubectl(t, "rollout", "status", "-n", stack.Namespace, "deployment/tessera-controller")
	case plugin:
		u.kubectl(t, "rollout", "status", "-n", stack.Namespace, "daemonset/tessera-node")
	case supervisor:
		u.renewSupervisor(t, to)
	case crds, chart:
	}
}

// renewSupervisor replaces the supervisor's pod by one of a version, unless that has to wait
// until no MPS daemon is left.
func (u *upgrade) renewSupervisor(t *testing.T, to string) {
	t.Helper()
	if to == u.before && u.keepsSupervisor {
		return
	}
	u.deleteSupervisor(t)
}

// deleteSupervisor deletes the supervisor's pod, and waits until the next one is ready.
func (u *upgrade) deleteSupervisor(t *testing.T) {
	t.Helper()
	u.kubectl(t, "delete", "pods", "-n", stack.Namespace, "-l", "app.kubernetes.io/component=mps", "--wait=true")
	u.until(t, "^1 1$", "get", "daemonset", "-n", stack.Namespace, "tessera-mps", "-o", "jsonpath={.status.updatedNumberScheduled} {.status.numberReady}")
}

// check checks what must hold after each step: pods with claims of all kinds start, the
// pods and daemons that ran before run on, and the plugin can read its journal.
func (u *upgrade) check(t *testing.T, step string, began time.Time) {
	t.Helper()
	took := since(began)
	u.pods.runAfter(t, time.Now())
	t.Logf("%s took %s, and %s until pods of all kinds had run: %s", step, took, since(began), u.pods.report(began))
	if now := u.heldNow(t); now != u.held {
		t.Fatalf("%s: the pods that are held were\n%sand are\n%s", step, u.held, now)
	}
	const unreadable = "find /var/lib/tessera /run/tessera -name '*.corrupt' 2>/dev/null; true" // files come and go
	if out := u.exec(t, "sh", "-c", unreadable); len(out) > 0 {
		t.Fatalf("%s: files that couldn't be read: %s", step, out)
	}
	u.until(t, "", "exec", "-n", stack.Namespace, "daemonset/tessera-node", "--", "kubelet-plugin", "doctor")
}

// leave ends the pods that are held; nothing of any version may be left over.
func (u *upgrade) leave(t *testing.T) {
	t.Helper()
	began := time.Now()
	u.kubectl(t, "delete", "pods", "--all", "-n", namespace, "--wait=true")
	if u.keepsSupervisor {
		u.deleteSupervisor(t)
	}
	u.until(t, "", "exec", "-n", stack.Namespace, "daemonset/tessera-node", "--", "kubelet-plugin", "doctor", "--strict")
	if all := u.daemons(t); len(all) > 0 {
		t.Errorf("MPS daemons are left: %v", all)
	}
	if out := u.exec(t, "find", "/var/lib/tessera", "-name", "*.json", "!", "-path", "*/health/*", "!", "-path", "*/seen/*"); len(out) > 0 {
		t.Errorf("journal records are left: %s", out)
	}
	t.Logf("the last pods' end took %s", since(began))
}

// processOf reads the process out of the record of an MPS daemon.
func processOf(record []byte) string {
	var r struct {
		Body struct {
			PID   int
			Start uint64
		}
	}
	if err := json.Unmarshal(record, &r); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("process %d, started at %d", r.Body.PID, r.Body.Start)
}

func (u *upgrade) apply(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := u.Apply(t.Context(), namespace, text); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}
