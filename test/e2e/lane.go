//go:build e2e

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/stack"
)

var (
	laneCount = flag.Int("lanes", 4, "how many stories run at the same time, each lane on a cluster of its own")
	keep      = flag.Bool("keep", false, "leave the clusters up afterwards, to look around")
	clusters  = flag.String("clusters", "e2e", "the beginning of the clusters' names")
	version   = flag.String("kubernetes", cluster.DefaultKubernetes, "the Kubernetes version of the clusters")
	kubelet   = flag.String("kubelet", "", "the version of the nodes' kubelets, if it is older")
	runtime   = flag.String("runtime", cluster.DefaultRuntime, "the nodes' container runtime; see localcluster up")
	long      = flag.Bool("long", false, "run the long stories of testdata/long instead")
	away      = flag.Duration("away", time.Minute, "how long the API server is away in the story api-server-away")
	dra       = flag.String("dra", string(cluster.DRAOn), "how much of Dynamic Resource Allocation is on; see localcluster up")
)

// storyTime bounds a story, so that the clusters are removed before go test's own
// limit ends the process.
const storyTime = 20 * time.Minute

// slowest lists the stories that take more than a minute, the longest first:
// they start first, so that no lane is left alone with one in the end.
var slowest = []string{
	"handover-shared", "handover", "prepare-fails-evict", "prepare-fails", "cdi-directories", "mps-crash", "churn", "migrate-device-plugin", "migrate-mig-manager", "time-slicing", "mig-models", "mps-policy", "pod-status", "gpu-health", "gpu-wedged",
	"migrate-dra-driver", "driver-upgrade", "rollout-stops", "slices-deleted", "mig-keep-warm", "rendered", "mig-lost", "uninstall", "odd-machines",
}

// storyFile is the file of a story.
func storyFile(name string) string {
	dir := "testdata"
	if *long {
		dir = "testdata/long"
	}
	return filepath.Join(dir, name+".txtar")
}

// queue returns the names of all stories in the order in which lanes take them.
func queue(t *testing.T) <-chan string {
	t.Helper()
	files, err := filepath.Glob(storyFile("*"))
	if err != nil {
		t.Fatal(err)
	}
	var rest, longest []string
	if !*long {
		rest, longest = []string{churnStory}, slowest
	}
	for _, file := range files {
		rest = append(rest, strings.TrimSuffix(filepath.Base(file), ".txtar"))
	}
	for _, name := range longest {
		i := slices.Index(rest, name)
		if i < 0 {
			t.Fatalf("there is no story %q", name)
		}
		rest = slices.Delete(rest, i, i+1)
	}
	stories := make(chan string, len(longest)+len(rest))
	for _, name := range slices.Concat(longest, rest) {
		stories <- name
	}
	close(stories)
	return stories
}

// lane runs stories one after the other on a cluster of its own.
type lane struct {
	name   string
	image  string
	stack  *stack.Stack // nil until the first story
	failed bool         // the cluster didn't come up
}

// run takes stories from the queue until it is empty or the lane's cluster
// can't be brought up.
func (l *lane) run(t *testing.T, stories <-chan string) {
	defer l.down(t)
	for name := range stories {
		began, ran := time.Now(), false
		passed := t.Run(name, func(t *testing.T) {
			ran = true
			l.story(t, name)
		})
		if l.failed {
			return
		}
		if ran { // and isn't left out by -run
			t.Logf("progress: %s: %s passed: %t (%.0f s)", l.name, name, passed, time.Since(began).Seconds())
		}
	}
}

func (l *lane) story(t *testing.T, name string) {
	if missing := lacks(t, name); missing != "" {
		t.Skipf("not on this server: Kubernetes %s, Dynamic Resource Allocation %s: %s", *version, *dra, missing)
	}
	l.up(t)
	if name == churnStory {
		churn(t, l.stack)
		return
	}
	testscript.RunT(inLane{t}, testscript.Params{
		Files:     []string{storyFile(name)},
		Deadline:  time.Now().Add(storyTime),
		Setup:     func(env *testscript.Env) error { return setup(env, l.stack) },
		Cmds:      commands(l.stack),
		Condition: have,
	})
}

// up brings the lane's cluster up for its first story. Stories that -run leaves
// out don't come here, so one story needs one cluster.
func (l *lane) up(t *testing.T) {
	t.Helper()
	if l.stack != nil {
		return
	}
	s, err := stack.Up(t.Context(), stack.Options{
		Name:       l.name,
		Kubernetes: *version, Kubelet: *kubelet, Runtime: *runtime, DRA: cluster.DRA(*dra),
		Machines: []string{"8xh100-80gb", mixed},
		Image:    l.image,
		Out:      t.Output(),
	})
	if err != nil {
		l.failed = true
		if !*keep {
			err = errors.Join(err, cluster.Down(context.WithoutCancel(t.Context()), l.name, t.Output()))
		}
		t.Fatal(err)
	}
	l.stack = s
	if err := published(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

// published waits until each node has offered its GPUs. The scheduler of
// Kubernetes 1.31 doesn't look at a pod again when devices come after it.
func published(ctx context.Context, s *stack.Stack) error {
	var seen string
	err := wait.PollUntilContextTimeout(ctx, time.Second, recovery, true, func(ctx context.Context) (bool, error) {
		var err error
		seen, err = s.Kubectl(ctx, "get", "resourceslices", "-o", "jsonpath={.items[*].spec.nodeName}")
		if err != nil {
			return false, err
		}
		offered := strings.Fields(seen)
		return !slices.ContainsFunc(s.Cluster.Nodes(), func(node string) bool { return !slices.Contains(offered, node) }), nil
	})
	if err != nil {
		return fmt.Errorf("wait for the devices of nodes %v, have those of %q: %w", s.Cluster.Nodes(), seen, err)
	}
	return nil
}

func (l *lane) down(t *testing.T) {
	t.Helper()
	if l.stack == nil || *keep {
		return
	}
	if err := l.stack.Down(context.WithoutCancel(t.Context())); err != nil {
		t.Errorf("take the cluster %s down: %v", l.name, err)
	}
}

// inLane is a story's test. testscript would make each story a subtest that
// waits for its parent; the lane has made it one already.
type inLane struct{ *testing.T }

func (inLane) Parallel() {}

func (l inLane) Run(_ string, f func(testscript.T)) { f(l) }

func (l inLane) Verbose() bool { return testing.Verbose() }
