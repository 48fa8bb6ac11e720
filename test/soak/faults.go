package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/tessera-dra/tessera/sim/cluster"
)

// event is a fault that was made, at a time since the beginning.
type event struct {
	at   time.Duration
	name string
}

// fault is something that fails.
type fault struct {
	name string
	// weight is how often it comes, compared with others.
	weight int
	make   func(ctx context.Context, r *soak, node string) error
}

const (
	first        = "node-0"
	controlPlane = "control-plane"
)

// crash returns a fault that kills a program.
func crash(program string) func(context.Context, *soak, string) error {
	return func(ctx context.Context, r *soak, node string) error {
		_, err := r.stack.Crash(ctx, node, program)
		return err
	}
}

// replacements lists what restarts the second node's plugin or the controller. In the second
// half of the time both are left alone, so that it shows whether they grow.
func replacements() []fault {
	rollout := func(object string) func(context.Context, *soak, string) error {
		return func(ctx context.Context, r *soak, _ string) error { return r.rollOut(ctx, object) }
	}
	kill := func(which string) func(context.Context, *soak, string) error {
		return func(ctx context.Context, r *soak, _ string) error { return r.killInRollout(ctx, which) }
	}
	return []fault{
		{"plugins rolled out", 4, rollout(plugins)},
		{"plugins rolled out, an old one killed", 3, kill("head")},
		{"plugins rolled out, a new one killed", 3, kill("tail")},
		{"controller rolled out", 2, rollout(controller)},
		{"controller killed", 2, func(ctx context.Context, r *soak, _ string) error { return crash("controller")(ctx, r, "all") }},
	}
}

// faults lists what fails during the whole time.
func faults() []fault {
	component := func(name string) func(context.Context, *soak, string) error {
		return func(_ context.Context, r *soak, node string) error { return r.stack.Cluster.Kill(node, name) }
	}
	control := func(name string) func(context.Context, *soak, string) error {
		return func(_ context.Context, r *soak, _ string) error { return r.stack.Cluster.Kill(controlPlane, name) }
	}
	simulator := func(args ...string) func(context.Context, *soak, string) error {
		return func(ctx context.Context, r *soak, node string) error { return r.simulate(ctx, node, args...) }
	}
	return []fault{
		{"plugin killed", 6, func(ctx context.Context, r *soak, _ string) error { return crash("kubelet-plugin")(ctx, r, first) }},
		{"MPS supervisor killed", 3, crash("mps-supervisor")},
		{"MPS daemon killed", 3, crash("nvidia-cuda-mps")},
		{"kubelet killed", 3, component("kubelet")},
		{"containerd killed", 2, component("containerd")},
		{"API server killed", 2, control("kube-apiserver")},
		{"etcd killed", 1, control("etcd")},
		{"scheduler killed", 1, control("kube-scheduler")},
		{"controller manager killed", 1, control("kube-controller-manager")},
		{"partitions are made slowly", 2, simulator("latency", "--create", "300ms", "--destroy", "700ms")},
		{"partitions are made fast again", 2, simulator("latency", "none")},
		{"creating partitions fails", 2, simulator("fault", "DeviceCreateGpuInstanceWithPlacement", "--code", "999", "--count", "2")},
		{"destroying partitions fails", 2, simulator("fault", "GpuInstanceDestroy", "--code", "19", "--count", "2")},
		{"power is lost", 1, func(ctx context.Context, r *soak, _ string) error {
			if err := r.stack.Cluster.PowerOff(ctx, first); err != nil {
				return err
			}
			return r.stack.Cluster.PowerOn(ctx)
		}},
	}
}

// breakThings makes a fault every few seconds. A fault that can't be made, as when the
// program to kill isn't there, is left out.
func (r *soak) breakThings(ctx context.Context) {
	random := rand.New(rand.NewPCG(r.seed, ^uint64(0)))
	for {
		sleep(ctx, 3*time.Second+time.Duration(random.IntN(5000))*time.Millisecond)
		if ctx.Err() != nil {
			return
		}
		all := faults()
		if time.Since(r.start) < r.length/2 {
			all = append(all, replacements()...)
		}
		f, node := draw(random, all), r.stack.Cluster.Nodes()[random.IntN(2)]
		began := time.Since(r.start)
		if err := f.make(context.WithoutCancel(ctx), r, node); err == nil {
			r.mu.Lock()
			r.faults = append(r.faults, event{began, f.name})
			r.mu.Unlock()
		}
	}
}

// draw returns one of the faults, each as often as its weight says.
func draw(random *rand.Rand, all []fault) fault {
	var sum int
	for _, f := range all {
		sum += f.weight
	}
	at := random.IntN(sum)
	for _, f := range all {
		if at -= f.weight; at < 0 {
			return f
		}
	}
	panic("unreachable: at is less than the sum of the weights")
}

// heal ends the faults that last.
func (r *soak) heal(ctx context.Context) error {
	for _, node := range r.stack.Cluster.Nodes() {
		if err := r.simulate(ctx, node, "latency", "none"); err != nil {
			return err
		}
		if err := r.simulate(ctx, node, "fault", "--clear"); err != nil {
			return err
		}
	}
	return nil
}

func (r *soak) simulate(ctx context.Context, node string, args ...string) error {
	var out bytes.Buffer
	if err := r.stack.Simulator(ctx, node, cluster.Stdio{Out: &out, Err: &out}, args...); err != nil {
		return fmt.Errorf("nvmlsim %v on %s: %w: %s", args, node, err, &out)
	}
	return nil
}
