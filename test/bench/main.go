// Command bench measures what a user of Tessera waits for and pays, on a local
// cluster with simulated GPUs, and prints one figure a line: "bench: NAME
// VALUE". Names and wanted values are in docs/measurements. It is run by `make
// bench`; figures in milliseconds depend on the machine, ratios much less.
//
// It is one package because the figures, a file for each group, are measured on the
// same cluster, with the same pods and watches.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/sim/cluster/platform"
	"github.com/tessera-dra/tessera/test/command"
	"github.com/tessera-dra/tessera/test/stack"
)

const (
	chartNamespace = stack.Namespace
	// simulated GPUs on the first node: 112 claims prepared, and eight to measure
	// with.
	simulated = 120
)

type options struct {
	only   string
	rounds int
	pods   int
	// rollouts of the plugin in which prepares are measured.
	rollouts int
	// refusals of partitions after which a pod runs elsewhere.
	refusals int
	// refusedPods are given a partition that the hardware refuses.
	refusedPods int
	// handovers from a force-deleted pod to the next one.
	handovers int
	idle      time.Duration
	// stormNodes is the number of hollow nodes whose GPUs fail at once.
	stormNodes int
	// scaleNodes is the number of hollow nodes of the part scale, which watches the idle
	// controller for scaleIdle.
	scaleNodes int
	scaleIdle  time.Duration
	// scheduleNodes are the numbers of nodes of the part schedule.
	scheduleNodes []int
	// flapping is how long a GPU comes and goes.
	flapping time.Duration
	packed   packingOptions
	keep     bool
	real     bool
	bundle   string
	// platform that the cluster imitates, and the nodes' container runtime.
	platform, runtime string
	// userNamespaces: pods with user namespaces are started, too.
	userNamespaces bool
}

func main() {
	var o options
	flag.StringVar(&o.only, "only", "", "measure only these, separated by commas: "+(*bench)(nil).names())
	flag.IntVar(&o.rounds, "rounds", 200, "prepares measured at each number of prepared claims")
	flag.IntVar(&o.pods, "pods", 20, "pods started with and without a claim")
	flag.IntVar(&o.handovers, "handovers", 30, "force-deleted pods whose GPU another pod waits for")
	flag.IntVar(&o.refusals, "refusals", 10, "pods whose partition is refused, and which run elsewhere")
	flag.IntVar(&o.refusedPods, "refused-pods", 100, "pods of which a GPU refuses the partition, one after the other")
	flag.IntVar(&o.rollouts, "rollouts", 10, "rollouts of the plugin that prepares are measured in")
	flag.DurationVar(&o.idle, "idle", 6*time.Minute, "how long to watch an idle cluster for API writes; 0 leaves that out")
	flag.IntVar(&o.stormNodes, "storm-nodes", 500, "hollow nodes, which have no machine, whose eight GPUs fail at once")
	flag.IntVar(&o.scaleNodes, "nodes", 1000, "hollow nodes of the part scale")
	flag.DurationVar(&o.scaleIdle, "scale-idle", time.Minute, "how long to watch the idle controller of the part scale for API writes")
	flag.DurationVar(&o.flapping, "flapping", time.Minute, "how long a GPU comes and goes; 0 leaves that out")
	o.scheduleNodes = []int{1, 10, 100}
	flag.Func("schedule-nodes", "hollow nodes of the part schedule, such as 100,1000 (default 1,10,100)", func(s string) (err error) {
		o.scheduleNodes, err = numbers(s)
		return err
	})
	o.packed.register()
	flag.BoolVar(&o.keep, "keep", false, "leave the cluster up")
	flag.BoolVar(&o.real, "real", false, "measure with this host's GPUs instead of simulated ones, leaving out what needs more of them")
	flag.StringVar(&o.bundle, "bundle", "", "directory with everything prebuilt (test/metal/bundle.sh), for hosts without Go")
	flag.StringVar(&o.platform, "platform", "", "measure on a cluster that imitates this platform (localcluster platforms); only the part pods")
	flag.StringVar(&o.runtime, "runtime", "", "the nodes' container runtime, if it isn't the platform's, or containerd; see localcluster up")
	flag.BoolVar(&o.userNamespaces, "user-namespaces", false, "the part pods also starts pods with user namespaces; needs a platform whose device nodes are in /dev, such as rhel")
	flag.Parse()
	os.Exit(command.Run("bench", func(ctx context.Context) error { return run(ctx, o) }))
}

func run(ctx context.Context, o options) error {
	b := &bench{options: o, report: report{out: os.Stdout}}
	parts, err := b.chosen()
	if err != nil {
		return err
	}
	if slices.ContainsFunc(parts, func(p part) bool { return p.stack }) {
		defer b.end(context.WithoutCancel(ctx))
		if err := b.begin(ctx); err != nil {
			return err
		}
	}
	for _, p := range parts {
		if err := p.measure(ctx); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// part is some of the figures.
type part struct {
	name    string
	measure func(context.Context) error
	// stack: it needs everything that a user has installed.
	stack bool
}

func (b *bench) parts() []part {
	return []part{
		{"shelf", b.shelf, false},
		{"view", b.view, false},
		{"metrics", b.metrics, false},
		{"journal", b.journal, true},
		{"prepare", b.prepares, true},
		{"at-once", b.atOnce, true},
		{"mig", b.mig, true},
		{"mps", b.mps, true},
		{"pods", b.pods, true},
		{"handover", b.handover, true},
		{"refusal", b.refused, true},
		{"health", b.health, true},
		{"memory", b.memory, true},
		{"writes", b.writesPerClaim, true},
		{"idle", b.writesIdle, true},
		{"schedule", b.schedule, false},
		{"storm", b.storm, false},
		{"scale", b.scale, false},
		{"packing", b.packing, false},
		{"rollout", b.rollout, false},
		{"rollout-gap", b.rolloutGap, true},
	}
}

func (b *bench) names() string {
	var all []string
	for _, p := range b.parts() {
		all = append(all, p.name)
	}
	return strings.Join(all, ", ")
}

// chosen are the parts that -only names; all where it names none.
func (b *bench) chosen() ([]part, error) {
	all := b.parts()
	if b.platform != "" && b.only != "pods" {
		return nil, errors.New("-platform: nodes of platforms have few GPUs; add -only pods")
	}
	if b.only == "" {
		return all, nil
	}
	var out []part
	for name := range strings.SplitSeq(b.only, ",") {
		i := slices.IndexFunc(all, func(p part) bool { return p.name == name })
		if i < 0 {
			return nil, fmt.Errorf("-only: there is no part %q, but %s", name, b.names())
		}
		out = append(out, all[i])
	}
	return out, nil
}

// bench is one run.
type bench struct {
	options
	report
	stack *stack.Stack
	node  string

	// devices are the whole GPUs of node; partitions those of the second node.
	devices, partitions []resourcev1.Device

	scheduled bool // the part "schedule" is done
}

// begin brings everything up, waits for all devices and makes what the
// measurements share.
func (b *bench) begin(ctx context.Context) error {
	machines := []string{fmt.Sprintf("%dxh100-80gb", simulated), fmt.Sprintf("%dxh100-80gb", migGPUs)}
	want := simulated
	few := b.real || b.platform != ""
	if few {
		machines, want = nil, 1
	}
	s, err := stack.Up(ctx, stack.Options{
		Name: "bench", Platform: b.platform, Runtime: b.runtime, Machines: machines, Values: b.values(), Bundle: b.bundle, Out: os.Stderr,
	})
	if err != nil {
		return err
	}
	b.stack, b.node = s, s.Cluster.Nodes()[0]
	if err := installOn(ctx, s, b.platform); err != nil {
		return err
	}
	b.progress("waiting for %d devices", want)
	if b.devices, err = b.await(ctx, b.node, "gpu", want); err != nil {
		return err
	}
	if !few {
		if b.partitions, err = b.await(ctx, s.Cluster.Nodes()[1], "mig", migGPUs*migEach); err != nil {
			return err
		}
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := s.Kube().CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create namespace: %w", err)
	}
	return createTemplate(ctx, s.Kube())
}

// end takes down what begin has brought up, unless it is to be kept.
func (b *bench) end(ctx context.Context) {
	if b.stack != nil && !b.keep {
		_ = b.stack.Down(ctx)
	}
}

// installOn installs the chart on the cluster of a platform as its page says. Other clusters have
// it already.
func installOn(ctx context.Context, s *stack.Stack, name string) error {
	if name == "" {
		return nil
	}
	p, err := platform.Find(name)
	if err != nil {
		return err
	}
	_, err = s.Shell(ctx, p.Use.Before+"\n"+p.HelmCommand("install", stack.ImageRepository, "--wait", "--timeout", "3m"))
	return err
}

// values are the chart's that aren't the default. A compute mode is a setting
// of other people's hardware.
func (b *bench) values() []string {
	if b.real {
		return []string{"node.mpsComputeMode=unchanged"}
	}
	return nil
}

// await waits until a node offers so many devices of a kind.
func (b *bench) await(ctx context.Context, node, kind string, want int) (devices []resourcev1.Device, err error) {
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, 2*time.Minute, true, func(ctx context.Context) (bool, error) {
		list, err := b.stack.Kube().ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourcev1.ResourceSliceSelectorNodeName + "=" + node})
		if err != nil {
			return false, err
		}
		devices = ofType(list.Items, kind)
		return len(devices) >= want, nil
	})
	if err != nil {
		return nil, fmt.Errorf("wait for %d devices of type %s on %s, last seen %d: %w", want, kind, node, len(devices), err)
	}
	return devices, nil
}

// ofType are the devices of a kind.
func ofType(slices []resourcev1.ResourceSlice, kind string) (devices []resourcev1.Device) {
	for _, s := range slices {
		for _, d := range s.Spec.Devices {
			if t := d.Attributes["type"].StringValue; t != nil && *t == kind {
				devices = append(devices, d)
			}
		}
	}
	return devices
}

func (b *bench) dial(node string) (*plugin, error) {
	sockets, err := b.sockets(node)
	if err != nil {
		return nil, err
	}
	return dialPlugin(sockets[len(sockets)-1])
}

func (b *bench) handover(ctx context.Context) error {
	uuid := *b.devices[0].Attributes["uuid"].StringValue
	claim, err := claimFor(ctx, b.stack.Kube(), uuid)
	if err != nil {
		return err
	}
	var worst time.Duration
	early := 0
	for round := range b.handovers {
		took, err := handover(ctx, b.stack.Kube(), stack.TestImage, b.node, round, claim)
		if err != nil {
			return err
		}
		b.progress("handover %d took %v", round, took)
		worst = max(worst, took)
		if took < 0 {
			early++
		}
	}
	b.figure("handover_before_old_ended", float64(early))
	b.figure("handover_after_force_delete_s", worst.Seconds())
	return nil
}
