// Command soak runs pods with claims of all kinds on a local cluster of two nodes with
// simulated GPUs, one after the other for an hour by default, while something fails every
// few seconds: programs are killed or replaced by rollouts, hardware is slow or fails, a
// node loses power. In the end nothing may be left over, no pod may be stuck, and no program may have grown.
//
// It prints how far it is, and writes _output/soak/soak.svg, a plot, and soak.csv, its
// data. The seed decides which faults and which pods come in which order, but not how the
// programs of a cluster take turns. It ends with 1 if it finds anything.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/test/command"
	"github.com/tessera-dra/tessera/test/stack"
)

type options struct {
	length time.Duration
	seed   uint64
	out    string
	keep   bool
}

func main() {
	var o options
	flag.DurationVar(&o.length, "for", time.Hour, "how long pods come and go")
	flag.Uint64Var(&o.seed, "seed", 0, "seed of the faults and the pods; 0: a new one, which is printed")
	flag.StringVar(&o.out, "out", "_output/soak", "directory for the plot and its data")
	flag.BoolVar(&o.keep, "keep", false, "leave the cluster up")
	flag.Parse()
	if o.seed == 0 {
		o.seed = rand.Uint64()
	}
	os.Exit(command.Run("soak", func(ctx context.Context) error { return run(ctx, o, os.Stdout) }))
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	say(out, "seed %d, %v", o.seed, o.length)
	s, err := stack.Up(ctx, stack.Options{Name: "soak", Machines: []string{"4xh100-80gb", "4xh100-80gb"}, Out: os.Stderr, Values: []string{"crds.keep=false"}})
	if s != nil && !o.keep {
		defer func() { err = errors.Join(err, s.Down(context.WithoutCancel(ctx))) }()
	}
	if err != nil {
		return err
	}
	r := &soak{stack: s, options: o, out: out, start: time.Now()}
	if err := r.prepare(ctx); err != nil {
		return err
	}
	r.churn(ctx)
	say(out, "%d pods have run; waiting until all of it is gone", r.pods.ended.Load())
	err = errors.Join(r.awaitClean(ctx), r.checkGrowth())
	return errors.Join(err, r.write(o.out))
}

// soak is one run.
type soak struct {
	options

	stack  *stack.Stack
	out    io.Writer
	start  time.Time
	slices int // in the beginning
	pods   pods

	mu      sync.Mutex
	samples []sample
	faults  []event
}

//go:embed testdata/soak.yaml
var manifests []byte

// prepare makes what pods claim, and waits until it is offered.
func (r *soak) prepare(ctx context.Context) error {
	if _, err := r.stack.Kubectl(ctx, "create", "namespace", namespace); err != nil {
		return err
	}
	if err := r.stack.Apply(ctx, namespace, manifests); err != nil {
		return err
	}
	for _, policy := range []string{"whole", "shares", "turns"} {
		if _, err := r.stack.Kubectl(ctx, "wait", "--for=condition=Applied", "--timeout=2m", "sharingpolicy/"+policy); err != nil {
			return err
		}
	}
	list, err := r.stack.Slices(ctx)
	r.slices = len(list)
	return err
}

// churn has pods come and go beside the faults, and takes samples, until the time is over
// and the last pods have ended.
func (r *soak) churn(ctx context.Context) {
	during, stop := context.WithTimeout(ctx, r.length)
	defer stop()
	r.start = time.Now()
	r.pods.client, r.pods.log = r.stack.Kube().CoreV1().Pods(namespace), func(format string, args ...any) { say(r.out, format, args...) }
	var beside sync.WaitGroup
	beside.Go(func() { r.breakThings(during) })
	beside.Go(func() { r.watch(during) })
	r.pods.run(ctx, during, r.seed)
	beside.Wait()
}

// recovery is how long the cluster may take to become clean after the last fault.
const recovery = 5 * time.Minute

// awaitClean waits until nothing is left over.
func (r *soak) awaitClean(ctx context.Context) error {
	if err := r.heal(ctx); err != nil {
		return err
	}
	var last error
	err := wait.PollUntilContextTimeout(ctx, 2*time.Second, recovery, true, func(ctx context.Context) (bool, error) {
		last = r.checkClean(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("not clean %v after the end: %w", recovery, last)
	}
	stuck := r.pods.stuck.Load()
	if stuck > 0 {
		return fmt.Errorf("%d pods were stuck", stuck)
	}
	say(r.out, "nothing is left over, and no pod was stuck")
	return nil
}

// checkClean checks that there are no pods and claims, that the doctor finds nothing on any
// node, that the slices are there, and that rollouts have ended.
func (r *soak) checkClean(ctx context.Context) error {
	pods, err := r.pods.client.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	claims, err := r.stack.Kubectl(ctx, "get", "resourceclaims", "-n", namespace, "-o", "name")
	if err != nil {
		return err
	}
	list, err := r.stack.Slices(ctx)
	if err != nil {
		return err
	}
	if len(pods.Items) > 0 || claims != "" || len(list) != r.slices {
		return fmt.Errorf("%d pods, claims %q, %d slices of %d", len(pods.Items), claims, len(list), r.slices)
	}
	if err := r.checkRolledOut(ctx); err != nil {
		return err
	}
	for _, node := range r.stack.Cluster.Nodes() {
		pod, err := r.pod(ctx, "node", node)
		if err != nil {
			return err
		}
		if _, err := r.stack.Kubectl(ctx, "exec", "-n", stack.Namespace, pod, "--", "kubelet-plugin", "doctor", "--strict", "--looks=1"); err != nil {
			return fmt.Errorf("%s: %w", node, err)
		}
		records, specs, err := r.files(ctx, node)
		if err != nil || records+specs > 0 {
			return errors.Join(err, fmt.Errorf("%s: %d records in the journal and %d CDI specs", node, records, specs))
		}
	}
	return nil
}

// write writes the plot and its data.
func (r *soak) write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "soak.csv"), csv(r.samples), 0o644); err != nil {
		return err
	}
	say(r.out, "faults: %s", tally(r.faults))
	picture, err := plot(r.samples, r.faults)
	if err != nil {
		return err
	}
	say(r.out, "%d pods, %d faults; the plot is %s", r.pods.ended.Load(), len(r.faults), filepath.Join(dir, "soak.svg"))
	return os.WriteFile(filepath.Join(dir, "soak.svg"), picture, 0o644)
}

// say prints a line with the time.
func say(out io.Writer, format string, args ...any) {
	fmt.Fprintf(out, "%s soak: %s\n", time.Now().UTC().Format("15:04:05"), fmt.Sprintf(format, args...))
}
