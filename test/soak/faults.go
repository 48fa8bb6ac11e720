package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/tessera-dra/tessera/test/cluster"
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

// faults lists what fails. The second node's plugin and, after the first quarter of the
// time, the controller are left alone, so that it shows whether they grow.
func faults() []fault {
	crash := func(program string) func(context.Context, *soak, string) error {
		return func(ctx context.Context, r *soak, node string) error {
			_, err := r.stack.Crash(ctx, node, program)
			return err
		}
	}
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
		{"controller killed", 2, func(ctx context.Context, r *soak, _ string) error {
			if time.Since(r.start) > r.length/4 {
				return nil
			}
			return crash("controller")(ctx, r, "all")
		}},
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
	all := faults()
	var sum int
	for _, f := range all {
		sum += f.weight
	}
	for {
		sleep(ctx, 3*time.Second+time.Duration(random.IntN(5000))*time.Millisecond)
		if ctx.Err() != nil {
			return
		}
		at, node := random.IntN(sum), r.stack.Cluster.Nodes()[random.IntN(2)]
		for _, f := range all {
			if at -= f.weight; at >= 0 {
				continue
			}
			began := time.Since(r.start)
			if err := f.make(context.WithoutCancel(ctx), r, node); err == nil {
				r.mu.Lock()
				r.faults = append(r.faults, event{began, f.name})
				r.mu.Unlock()
			}
			break
		}
	}
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
