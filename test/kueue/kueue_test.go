//go:build kueue

package kueue

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/tessera-dra/tessera/deployments/container/image"
	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/stack"
)

var keep = flag.Bool("keep", false, "leave the cluster up")

// patience is how long the cluster may take to do something.
const patience = 3 * time.Minute

// check is a cluster with Kueue.
type check struct{ *stack.Stack }

// TestQuota admits jobs with whole GPUs, partitions and shares by the memory that they get,
// out of one quota, and lets one that it has no room for run when another has ended.
func TestQuota(t *testing.T) {
	c := up(t)
	c.apply(t, "testdata/queue.yaml")
	c.until(t, `^True$`, "get", "sharingpolicy", "quarters", "-o", `jsonpath={.status.conditions[?(@.type=="Applied")].status}`)
	c.until(t, `^True$`, "get", "clusterqueue", "team", "-o", `jsonpath={.status.conditions[?(@.type=="Active")].status}`)

	// 120 GiB are room for a whole GPU and, in the rest, for partitions and shares.
	c.job(t, "whole", "whole", 1)
	c.job(t, "partitions", "partition", 2)
	c.job(t, "share", "share", 1)
	c.charged(t, "whole", "81559Mi")
	c.charged(t, "partitions", "19968Mi") // two of 9984Mi
	c.charged(t, "share", c.memoryOfShare(t))
	for _, name := range []string{"whole", "partitions", "share"} {
		c.until(t, `^(Running ?)+$`, "get", "pods", "-l", "job-name="+name, "-o", "jsonpath={.items[*].status.phase}")
	}

	// There are seven more GPUs, but no more quota.
	c.job(t, "second", "whole", 1)
	c.until(t, `insufficient unused quota for gpu\.memory in flavor gpus`, "get", "workloads", "-o", "jsonpath={.items[*].status.conditions[*].message}")
	c.until(t, `^true$`, "get", "job", "second", "-o", "jsonpath={.spec.suspend}")
	c.until(t, `^$`, "get", "pods", "-l", "job-name=second", "-o", "name")
	c.kubectl(t, "delete", "job", "whole", "--wait=true")
	c.charged(t, "second", "81559Mi")
	c.until(t, `^Running$`, "get", "pods", "-l", "job-name=second", "-o", "jsonpath={.items[*].status.phase}")
}

// up brings a cluster up, with the chart of Kueue's own module and the program built from it.
func up(t *testing.T) *check {
	t.Helper()
	s, err := stack.Up(t.Context(), stack.Options{Name: "kueue", Machines: []string{"8xh100-80gb"}, Out: os.Stderr, Values: []string{"crds.keep=false"}})
	if s != nil && !*keep {
		t.Cleanup(func() {
			if err := s.Down(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	c := &check{Stack: s}
	c.loadImage(t)
	helm := c.Command(t.Context(), "helm", "upgrade", "--install", "kueue", filepath.Join(moduleDir(t), "charts/kueue"),
		"--namespace", "kueue-system", "--create-namespace", "--values", "testdata/values.yaml", "--wait", "--timeout", "5m",
		"--set", "controllerManager.manager.image.repository="+repository, "--set", "controllerManager.manager.image.tag="+tag,
		"--set", "controllerManager.manager.image.pullPolicy=Never")
	if out, err := helm.CombinedOutput(); err != nil {
		log, _ := c.Kubectl(context.WithoutCancel(t.Context()), "logs", "-n", "kueue-system", "deployment/kueue-controller-manager", "--tail=50")
		t.Fatalf("install Kueue: %v: %s\n%s", err, out, log)
	}
	return c
}

// The image that Kueue runs from.
const repository, tag = "localhost/tessera/kueue", "local"

// loadImage puts Kueue's program where its chart wants it, and loads the image.
func (c *check) loadImage(t *testing.T) {
	t.Helper()
	program, err := cluster.Tool(t.Context(), "kueue", os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "kueue.tar")
	entries := []image.Entry{{Path: "/manager", Source: program}, {Path: "/tmp", Mode: os.ModeDir | os.ModeSticky | 0o777}}
	if _, err := image.Write(archive, repository+":"+tag, entries, v1.Config{User: "65532:65532"}); err != nil {
		t.Fatal(err)
	}
	if err := c.Cluster.LoadImage(t.Context(), archive); err != nil {
		t.Fatal(err)
	}
}

// moduleDir is where Kueue's module is, with its chart.
func moduleDir(t *testing.T) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kueue")
	cmd.Dir, cmd.Env = filepath.Join("../..", cluster.KueueModule), append(os.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// job makes a job in the queue whose pods have a claim each of a template.
func (c *check) job(t *testing.T, name, template string, count int) {
	t.Helper()
	text, err := os.ReadFile("testdata/job.yaml")
	if err != nil {
		t.Fatal(err)
	}
	job := strings.NewReplacer("NAME", name, "TEMPLATE", template, "COUNT", strconv.Itoa(count)).Replace(string(text))
	if err := c.Apply(t.Context(), "default", []byte(job)); err != nil {
		t.Fatal(err)
	}
}

// memoryOfShare is the limit of memory that the published shares say they have.
func (c *check) memoryOfShare(t *testing.T) string {
	t.Helper()
	all := strings.Fields(c.kubectl(t, "get", "resourceslices", "-o", `jsonpath={.items[*].spec.devices[?(@.attributes.type.string=="mps")].capacity.memory.value}`))
	if len(all) != 8 {
		t.Fatalf("the memory of the shares of two GPUs is %v", all)
	}
	return all[0]
}

// charged waits until a job is admitted and charged for so much memory.
func (c *check) charged(t *testing.T, name, memory string) {
	t.Helper()
	path := `jsonpath={range .items[?(@.metadata.ownerReferences[0].name=="` + name + `")]}{.status.admission.podSetAssignments[0].resourceUsage.gpu\.memory}{end}`
	c.until(t, "^"+memory+"$", "get", "workloads", "-o", path)
}

func (c *check) apply(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Apply(t.Context(), "default", text); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

func (c *check) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// until repeats kubectl until it prints what matches.
func (c *check) until(t *testing.T, pattern string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	want := regexp.MustCompile(pattern)
	for {
		out, err := c.Kubectl(ctx, args...)
		if err == nil && want.MatchString(strings.TrimSpace(out)) {
			return
		}
		select {
		case <-ctx.Done():
			all, _ := c.Kubectl(context.WithoutCancel(ctx), "get", "workloads,jobs,pods,clusterqueues", "-o", "wide")
			t.Fatalf("kubectl %s: after %s: %s, want %s\n%s", strings.Join(args, " "), patience, out, pattern, all)
		case <-time.After(500 * time.Millisecond):
		}
	}
}
