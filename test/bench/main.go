// Command bench measures what a user of Tessera waits for and pays, on a local
// cluster with simulated GPUs, and prints one figure a line: "bench: NAME
// VALUE". Names and wanted values are in docs/measurements. It is run by `make
// bench`; figures in milliseconds depend on the machine, ratios much less.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

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
	// handovers from a force-deleted pod to the next one.
	handovers int
	idle      time.Duration
	keep      bool
	real      bool
	bundle    string
}

func main() {
	var o options
	flag.StringVar(&o.only, "only", "", "measure only these, separated by commas: "+(*bench)(nil).names())
	flag.IntVar(&o.rounds, "rounds", 200, "prepares measured at each number of prepared claims")
	flag.IntVar(&o.pods, "pods", 20, "pods started with and without a claim")
	flag.IntVar(&o.handovers, "handovers", 30, "force-deleted pods whose GPU another pod waits for")
	flag.DurationVar(&o.idle, "idle", 6*time.Minute, "how long to watch an idle cluster for API writes; 0 leaves that out")
	flag.BoolVar(&o.keep, "keep", false, "leave the cluster up")
	flag.BoolVar(&o.real, "real", false, "measure with this host's GPUs instead of simulated ones, leaving out what needs more of them")
	flag.StringVar(&o.bundle, "bundle", "", "directory with everything prebuilt (test/metal/bundle.sh), for hosts without Go")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1) //nolint:gocritic // stop() only restores signals
	}
}

func run(ctx context.Context, o options) error {
	b := &bench{options: o, report: report{out: os.Stdout}}
	parts, err := b.chosen()
	if err != nil {
		return err
	}
	if slices.ContainsFunc(parts, func(p part) bool { return p.stack }) {
		if err := b.begin(ctx); err != nil {
			return err
		}
		if !o.keep {
			defer func() { _ = b.stack.Down(context.WithoutCancel(ctx)) }()
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
		{"journal", b.journal, true},
		{"prepare", b.prepares, true},
		{"at-once", b.atOnce, true},
		{"mig", b.mig, true},
		{"mps", b.mps, true},
		{"pods", b.pods, true},
		{"handover", b.handover, true},
		{"memory", b.memory, true},
		{"writes", b.writesPerClaim, true},
		{"idle", b.writesIdle, true},
		{"schedule", b.schedule, false},
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
	if b.real {
		machines, want = nil, 1
	}
	s, err := stack.Up(ctx, stack.Options{Name: "bench", Machines: machines, Values: b.values(), Bundle: b.bundle, Out: os.Stderr})
	if err != nil {
		return err
	}
	b.stack, b.node = s, s.Cluster.Nodes()[0]
	b.progress("waiting for %d devices", want)
	if b.devices, err = b.await(ctx, b.node, "gpu", want); err != nil {
		return err
	}
	if !b.real {
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
	return dialPlugin(filepath.Join(b.stack.Cluster.NodeDir(node), "var/lib/kubelet/plugins", driver, "dra.sock"))
}

// journal measures what one durable write of a small file costs on this disk,
// two fsyncs: the floor of a prepare.
func (b *bench) journal(context.Context) error {
	dir := filepath.Join(b.stack.Cluster.NodeDir(b.node), "var/lib/tessera", ".bench")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("measure the journal's writes: %w", err)
	}
	defer os.RemoveAll(dir)
	s, err := measure(b.rounds, func() error { return durable(dir) })
	if err != nil {
		return fmt.Errorf("measure the journal's writes: %w", err)
	}
	b.percentiles("journal_write", s)
	return nil
}

// durable writes as the journal does: temporary file, fsync, rename, fsync of
// the directory.
func durable(dir string) error {
	tmp := filepath.Join(dir, "record.tmp")
	f, err := os.Create(tmp)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(strings.Repeat("x", 600)); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(dir, "record")); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// prepares measures one claim at a time while more and more others are
// prepared.
func (b *bench) prepares(ctx context.Context) error {
	p, err := b.dial(b.node)
	if err != nil {
		return err
	}
	defer p.close()
	var names []string
	for _, d := range b.devices {
		names = append(names, d.Name)
	}
	b.progress("allocating %d claims", len(names))
	claims, err := allocatedClaims(ctx, b.stack.Kube(), b.node, names)
	if err != nil {
		return err
	}
	spare := max(len(claims)-8, 0)
	measured, others := claims[spare:], claims[:spare]
	p50 := map[int]float64{}
	done := 0
	for _, n := range []int{0, 8, 56, 112} {
		if n > len(others) {
			break
		}
		for ; done < n; done++ {
			if err := p.prepare(ctx, others[done]); err != nil {
				return err
			}
		}
		prep, unprep, floor, err := b.measurePrepares(ctx, p, measured)
		if err != nil {
			return err
		}
		if n == 0 {
			b.figure("prepare_floor_p50_ms", floor.percentile(50))
			b.figure("prepare_floor_ratio", prep.percentile(50)/floor.percentile(50))
		}
		b.percentiles(fmt.Sprintf("prepare_%d", n), prep)
		b.percentiles(fmt.Sprintf("unprepare_%d", n), unprep)
		p50[n] = prep.percentile(50)
	}
	if p50[112] > 0 {
		b.figure("prepare_ratio_112_to_0", p50[112]/p50[0])
	}
	for _, c := range others[:done] {
		if err := p.unprepare(ctx, c); err != nil {
			return err
		}
	}
	return b.deleteClaims(ctx)
}

// measurePrepares measures prepares and unprepares, and between them their floor:
// one durable write and one GET of a claim, which every prepare makes.
func (b *bench) measurePrepares(ctx context.Context, p *plugin, claims []*resourcev1.ResourceClaim) (prep, unprep, floor sample, err error) {
	dir := filepath.Join(b.stack.Cluster.NodeDir(b.node), "var/lib/tessera", ".bench")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, nil, fmt.Errorf("measure the floor of a prepare: %w", err)
	}
	defer os.RemoveAll(dir)
	for i := range b.rounds {
		one, two, err := measureRounds(ctx, p, claims[i%len(claims):][:1], 1)
		if err != nil {
			return nil, nil, nil, err
		}
		both, err := measure(1, func() error { return b.floor(ctx, dir, claims[i%len(claims)].Name) })
		if err != nil {
			return nil, nil, nil, fmt.Errorf("measure the floor of a prepare: %w", err)
		}
		prep, unprep, floor = append(prep, one...), append(unprep, two...), append(floor, both...)
	}
	return prep, unprep, floor, nil
}

// floor measures the work that every prepare must do.
func (b *bench) floor(ctx context.Context, dir, claim string) error {
	if _, err := b.stack.Kube().ResourceV1().ResourceClaims(namespace).Get(ctx, claim, metav1.GetOptions{}); err != nil {
		return err
	}
	return durable(dir)
}

// measureRounds prepares and unprepares one claim after the other.
func measureRounds(ctx context.Context, p *plugin, claims []*resourcev1.ResourceClaim, rounds int) (prep, unprep sample, err error) {
	for i := range rounds {
		c := claims[i%len(claims)]
		s, err := measure(1, func() error { return p.prepare(ctx, c) })
		if err != nil {
			return nil, nil, err
		}
		prep = append(prep, s...)
		s, err = measure(1, func() error { return p.unprepare(ctx, c) })
		if err != nil {
			return nil, nil, err
		}
		unprep = append(unprep, s...)
	}
	return prep, unprep, nil
}

func (b *bench) deleteClaims(ctx context.Context) error {
	err := b.stack.Kube().ResourceV1().ResourceClaims(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("delete claims: %w", err)
	}
	return nil
}

// atOnce measures eight prepares that start together, until the last is done.
func (b *bench) atOnce(ctx context.Context) error {
	if len(b.devices) < 8 {
		return nil
	}
	p, err := b.dial(b.node)
	if err != nil {
		return err
	}
	defer p.close()
	var names []string
	for _, d := range b.devices[:8] {
		names = append(names, d.Name)
	}
	claims, err := allocatedClaims(ctx, b.stack.Kube(), b.node, names)
	if err != nil {
		return err
	}
	var all sample
	for range 20 {
		s, err := measure(1, func() error {
			return together(claims, func(c *resourcev1.ResourceClaim) error { return p.prepare(ctx, c) })
		})
		if err != nil {
			return err
		}
		all = append(all, s...)
		if err := together(claims, func(c *resourcev1.ResourceClaim) error { return p.unprepare(ctx, c) }); err != nil {
			return err
		}
	}
	b.figure("prepare_8_at_once_ms", all.percentile(50))
	return b.deleteClaims(ctx)
}

// together calls f for all of them at the same time, and returns one of the
// errors when all are done.
func together[T any](all []T, f func(T) error) error {
	errs := make(chan error, len(all))
	for _, c := range all {
		go func() { errs <- f(c) }()
	}
	var first error
	for range all {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return first
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

// memory reads how much of each part is resident, on the node where it is more.
func (b *bench) memory(context.Context) error {
	for name, program := range map[string]string{"plugin_rss_mib": "kubelet-plugin", "controller_rss_mib": "controller", "supervisor_rss_mib": "mps-supervisor"} {
		mib, err := rss(program)
		if err != nil {
			return err
		}
		b.figure(name, mib)
	}
	return nil
}

func rss(program string) (float64, error) {
	processes, err := findCommands(func(args []string) bool { return args[0] == "/usr/bin/"+program })
	if err != nil {
		return 0, fmt.Errorf("read memory of %s: %w", program, err)
	}
	most := 0.0
	for _, process := range processes {
		mib, err := resident(process)
		if err != nil {
			return 0, fmt.Errorf("read memory of %s: %w", program, err)
		}
		most = max(most, mib)
	}
	return most, nil
}

func resident(process string) (float64, error) {
	status, err := os.ReadFile(filepath.Join(process, "status"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if kib, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.ParseFloat(strings.Fields(kib)[0], 64)
			return n / 1024, err
		}
	}
	return 0, fmt.Errorf("no VmRSS in %s/status", process)
}

// writesPerClaim counts the driver's API writes over the lives of pods with
// one claim each.
func (b *bench) writesPerClaim(ctx context.Context) error {
	const n = 10
	before, err := writes(b.stack.Cluster.AuditLog())
	if err != nil {
		return err
	}
	for i := range n {
		name := fmt.Sprintf("writes-%d", i)
		if _, err := startPod(ctx, b.stack.Kube(), newPod(name, stack.TestImage, b.node, fromTemplate())); err != nil {
			return err
		}
		if err := deletePod(ctx, b.stack.Kube(), name); err != nil {
			return err
		}
	}
	after, err := writes(b.stack.Cluster.AuditLog())
	if err != nil {
		return err
	}
	b.figure("api_writes_per_claim", float64(after-before)/n)
	return nil
}

// writesIdle counts the driver's API writes while nothing happens on the
// cluster. Measurements of another cluster run at the same time.
func (b *bench) writesIdle(ctx context.Context) error {
	if b.idle == 0 {
		return nil
	}
	b.progress("watching the idle cluster for %v", b.idle)
	before, err := writes(b.stack.Cluster.AuditLog())
	if err != nil {
		return err
	}
	over := time.After(b.idle)
	if b.only == "" {
		if err := b.schedule(ctx); err != nil {
			return err
		}
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-over:
	}
	after, err := writes(b.stack.Cluster.AuditLog())
	if err != nil {
		return err
	}
	b.figure(fmt.Sprintf("api_writes_idle_%.0fmin", b.idle.Minutes()), float64(after-before))
	return nil
}
