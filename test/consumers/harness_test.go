//go:build consumers

package main

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
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

// Images of the systems' programs are called after the programs, with this before and tag.
const (
	repositories = "localhost/tessera/"
	tag          = "local"
)

// check is a cluster with Tessera and a system.
type check struct {
	*stack.Stack
	system system
}

// up brings a cluster up with nodes of these machines.
func up(t *testing.T, name string, machines ...string) *check {
	t.Helper()
	sys, err := find(name)
	if err != nil {
		t.Fatal(err)
	}
	s, err := stack.Up(t.Context(), stack.Options{Name: "consumers-" + name, Kubernetes: sys.kubernetes, Machines: machines, Out: os.Stderr, Values: []string{"crds.keep=false"}})
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
	return &check{s, sys}
}

// load builds a program of the system's module, and loads an image with it at that path, called
// after the program.
func (c *check) load(t *testing.T, program, path string) {
	t.Helper()
	source, err := cluster.Tool(t.Context(), program, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), program+".tar")
	entries := []image.Entry{{Path: path, Source: source}, {Path: "/tmp", Mode: os.ModeDir | os.ModeSticky | 0o777}}
	if _, err := image.Write(archive, repositories+program+":"+tag, entries, v1.Config{User: "65532:65532", Entrypoint: []string{path}}); err != nil {
		t.Fatal(err)
	}
	if err := c.Cluster.LoadImage(t.Context(), archive); err != nil {
		t.Fatal(err)
	}
}

// module is a path in the system's module.
func (c *check) module(t *testing.T, path string) string {
	t.Helper()
	dir, err := cluster.ModuleDir(t.Context(), c.system.name, c.system.module)
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, path)
}

// helm installs a chart of the system's module in a namespace.
func (c *check) helm(t *testing.T, chart, namespace string, args ...string) {
	t.Helper()
	all := []string{"upgrade", "--install", c.system.name, c.module(t, chart), "--namespace", namespace, "--create-namespace", "--wait", "--timeout", "5m"}
	c.must(t, namespace, c.Command(t.Context(), "helm", append(all, args...)...))
}

// must runs an installation, and shows a namespace's pods and logs if it fails.
func (c *check) must(t *testing.T, namespace string, install *exec.Cmd) {
	t.Helper()
	if out, err := install.CombinedOutput(); err != nil {
		c.show(t, "describe", "pods", "-n", namespace)
		c.show(t, "logs", "-n", namespace, "--tail=50", "--prefix", "--all-containers", "-l", "!nothing")
		t.Fatalf("install %s: %v: %s", c.system.title, err, out)
	}
}

// apply applies a file of the system's data; replacements are pairs of words in it.
func (c *check) apply(t *testing.T, file string, replacements ...string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", c.system.name, file))
	if err != nil {
		t.Fatal(err)
	}
	text = []byte(strings.NewReplacer(replacements...).Replace(string(text)))
	c.eventually(t, file+" is applied", func(ctx context.Context) (string, bool) {
		err := c.Apply(ctx, "default", text)
		if err == nil {
			return "", true
		}
		// A system's webhook may serve later than its pod says that it is ready.
		if !strings.Contains(err.Error(), "failed calling webhook") {
			t.Fatalf("%s: %v", file, err)
		}
		return err.Error(), false
	})
}

func (c *check) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// show logs the output of a kubectl command.
func (c *check) show(t *testing.T, args ...string) {
	t.Helper()
	out, _ := c.Kubectl(context.WithoutCancel(t.Context()), args...)
	t.Logf("kubectl %s:\n%s", strings.Join(args, " "), out)
}

// until repeats kubectl until its output matches.
func (c *check) until(t *testing.T, pattern string, args ...string) {
	t.Helper()
	want := regexp.MustCompile(pattern)
	c.eventually(t, "kubectl "+strings.Join(args, " ")+" prints "+pattern, func(ctx context.Context) (string, bool) {
		out, err := c.Kubectl(ctx, args...)
		return out, err == nil && want.MatchString(strings.TrimSpace(out))
	})
}

// eventually repeats a look at the cluster until it succeeds. The last look is printed if none
// does.
func (c *check) eventually(t *testing.T, what string, look func(context.Context) (saw string, ok bool)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		saw, ok := look(ctx)
		if ok {
			return
		}
		select {
		case <-ctx.Done():
			c.show(t, "get", "pods,resourceclaims", "-A", "-o", "wide")
			c.show(t, "get", "events", "--sort-by=.lastTimestamp")
			t.Fatalf("not in %s: %s; saw:\n%s", patience, what, saw)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// running prints names and UIDs of pods that run.
const running = `jsonpath={range .items[?(@.status.phase=="Running")]}{.metadata.name} {.metadata.uid}{"\n"}{end}`

// run waits until so many pods with a label run, and returns the GPU of each by the pod's UID.
// Each sees one, and no two the same.
func (c *check) run(t *testing.T, label string, want int) map[string]string {
	t.Helper()
	var pods []string
	c.eventually(t, label+": pods run with a GPU each", func(ctx context.Context) (string, bool) {
		out, err := c.Kubectl(ctx, "get", "pods", "-l", label, "-o", running)
		all, _ := c.Kubectl(ctx, "get", "pods", "-l", label, "-o", "name")
		pods = strings.FieldsFunc(out, func(r rune) bool { return r == '\n' })
		return out, err == nil && len(pods) == want && len(strings.Fields(all)) == want
	})
	gpus := map[string]string{}
	var seen []string
	for _, pod := range pods {
		name, uid, _ := strings.Cut(pod, " ")
		list := strings.TrimSpace(c.kubectl(t, "exec", name, "--", "nvidia-smi", "-L"))
		if strings.Count(list, "GPU-") != 1 || slices.Contains(seen, list) {
			t.Errorf("%s sees, when others see %q:\n%s", name, seen, list)
		}
		gpus[uid] = list
		seen = append(seen, list)
	}
	return gpus
}

// claims waits until there are so many claims.
func (c *check) claims(t *testing.T, want int) {
	t.Helper()
	c.eventually(t, "the number of claims is right", func(ctx context.Context) (string, bool) {
		out, err := c.Kubectl(ctx, "get", "resourceclaims", "-o", "name")
		return out, err == nil && len(strings.Fields(out)) == want
	})
}

// free waits until no claim is left, and checks that a pod can have all eight GPUs.
func (c *check) free(t *testing.T) {
	t.Helper()
	c.claims(t, 0)
	c.apply(t, "../all.yaml")
	c.until(t, "^Running$", "get", "pod", "all", "-o", "jsonpath={.status.phase}")
	if list := c.kubectl(t, "exec", "all", "--", "nvidia-smi", "-L"); strings.Count(list, "GPU-") != 8 {
		t.Errorf("a pod with a claim for eight GPUs sees:\n%s", list)
	}
}

// replaced waits until none of the pods that run returned is there.
func (c *check) replaced(t *testing.T, label string, before map[string]string) {
	t.Helper()
	c.eventually(t, label+": all pods are others", func(ctx context.Context) (string, bool) {
		out, err := c.Kubectl(ctx, "get", "pods", "-l", label, "-o", "jsonpath={.items[*].metadata.uid}")
		return out, err == nil && !slices.ContainsFunc(strings.Fields(out), func(uid string) bool { _, old := before[uid]; return old })
	})
}
