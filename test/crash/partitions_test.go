//go:build integration

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// parts are partitions of the second GPU.
func parts(profiles ...string) func(*node) []string {
	return func(n *node) []string {
		var names []string
		for _, p := range profiles {
			names = append(names, n.part(1, p))
		}
		return names
	}
}

// TestPartitions kills in what is done to partitions.
func TestPartitions(t *testing.T) {
	t.Parallel()
	gpuPut := []string{"journal.gpu.put.created", "journal.gpu.put.written", "journal.gpu.put.synced", "journal.gpu.put.renamed", "journal.gpu.put.durable"}
	make := []string{"partition.intended", "partition.created", "partition.made"}
	testOperations(t, map[string]operation{
		"the first of a GPU": {
			other: first, claim: parts("1g10gb-4"), before: nothing, do: prepareIt,
			wants: slices.Concat(gpuPut, make, []string{"partition.switched", "prepare.made#2"}),
		},
		"beside another": {
			other: parts("1g10gb-6"), claim: parts("3g40gb-0"), before: nothing, do: prepareIt, only: "partition.", wants: make,
		},
		"on both GPUs": {
			other: parts("1g10gb-6"), claim: func(n *node) []string { return []string{n.part(0, "2g20gb-0"), n.part(1, "2g20gb-0")} },
			before: nothing, do: prepareIt, only: "partition.", wants: append(make, "partition.made#2"),
		},
		"the last of a GPU": {
			other: first, claim: parts("1g10gb-4"), before: prepared, do: unprepareAndRest, gone: true,
			wants: slices.Concat(gpuPut, []string{
				"partition.destroyed", "partition.switched", "journal.gpu.delete.unlinked", "journal.gpu.delete.durable", "unprepare.released",
			}),
		},
		"a prepare that fails": {
			other: parts("1g10gb-6"), claim: func(n *node) []string { return []string{n.part(0, "2g20gb-0"), n.part(1, "2g20gb-0")} },
			before: nothing, do: failToPrepare, gone: true, only: "partition.",
			wants: []string{"partition.created", "partition.destroyed", "unprepare.released", "journal.delete.durable"},
		},
		"in the place of an idle one": {
			other: first, claim: parts("3g40gb-0"), only: "partition.", do: evict,
			before: func(t *testing.T, n *node, _ *plugin, _ *resourceapi.ResourceClaim) { n.keepWarm(t, time.Hour) },
			wants:  []string{"partition.made", "partition.destroyed", "partition.made#2"},
		},
		"another stays": {
			other: parts("1g10gb-6"), claim: parts("3g40gb-0", "1g10gb-4"), before: prepared, do: unprepareIt, only: "partition.", gone: true,
			wants: []string{"partition.destroyed", "partition.destroyed#2"},
		},
		"recover what is half made": {
			other: parts("1g10gb-6"), claim: parts("1g10gb-4"), do: doNothing, starting: true, wants: []string{"recover.written"},
			before: func(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) {
				p.kill()
				n.dieIn(t, "partition.created", func(p *plugin) error { return prepareIt(t, n, p, c) })
			},
		},
		"recover what is half gone": {
			other: parts("1g10gb-6"), claim: parts("1g10gb-4"), do: doNothing, starting: true, wants: []string{"recover.written"},
			before: func(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) {
				p.mustPrepare(t, c)
				p.kill()
				n.dieIn(t, "partition.destroyed", func(p *plugin) error { return p.unprepare(t, c) })
			},
		},
	})
}

// dieIn makes a plugin die at a step of an operation.
func (n *node) dieIn(t *testing.T, step string, do func(*plugin) error) {
	t.Helper()
	p := n.start(t, step)
	n.register(t, p)
	if err := do(p); err == nil {
		t.Errorf("the plugin has answered before it died at %s", step)
	}
	p.waitDead(t)
}

// unprepareAndRest also waits until the plugin has switched MIG mode off.
func unprepareAndRest(t *testing.T, _ *node, p *plugin, c *resourceapi.ResourceClaim) error {
	if err := p.unprepare(t, c); err != nil {
		return err
	}
	err := p.poll(t, func() bool { return slices.Contains(p.ran(t), "journal.gpu.delete.durable") })
	if err != nil {
		return fmt.Errorf("wait for the GPU to rest: %w", err)
	}
	return p.answers(t) // it may have died at that very step
}

// failToPrepare makes the second GPU refuse after the first is done; an error
// means that the plugin has died.
func failToPrepare(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) error {
	n.fault(t, nvmlsim.Fault{Call: "GpuInstanceCreateComputeInstance", GPU: 1, Code: nvmlsim.Unknown, DelayMS: 500, Count: 2})
	if names, err := p.prepare(t, c); err == nil {
		t.Errorf("prepared in spite of hardware: %v", names)
	}
	return p.answers(t)
}

// answers is an error if the plugin is dead.
func (p *plugin) answers(t *testing.T) error {
	_, err := p.dra.NodeUnprepareResources(t.Context(), &drapbv1.NodeUnprepareResourcesRequest{}, grpc.WaitForReady(false))
	return err
}

// evict leaves an idle partition behind, in whose place comes the claim's.
func evict(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) error {
	idle := n.newClaim(t, n.part(1, "1g10gb-2"))
	n.passing = append(n.passing, idle)
	if err := prepareIt(t, n, p, idle); err != nil {
		return err
	}
	if err := p.unprepare(t, idle); err != nil {
		return err
	}
	n.has(t, 1, "2+1")
	return prepareIt(t, n, p, c)
}

// keepWarm sets the second GPU's keepWarm as a SharingPolicy would.
func (n *node) keepWarm(t *testing.T, d time.Duration) {
	t.Helper()
	n.ask(t, &v1alpha1.GPUSpec{KeepWarm: &metav1.Duration{Duration: d}})
}

// ask sets the settings of SharingPolicies for the second GPU; nil: none.
func (n *node) ask(t *testing.T, spec *v1alpha1.GPUSpec) {
	t.Helper()
	inventory := &v1alpha1.GPUInventory{}
	err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		if err := shared.objects.Get(ctx, client.ObjectKey{Name: n.name}, inventory); err != nil {
			return false, nil //nolint:nilerr // the plugin makes it
		}
		before := inventory.DeepCopy()
		inventory.Spec.GPUs = nil
		if spec != nil {
			spec.UUID = n.host.Machine.GPUs[1].UUID
			inventory.Spec.GPUs = []v1alpha1.GPUSpec{*spec}
		}
		return true, shared.objects.Patch(ctx, inventory, client.MergeFrom(before))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestWarm keeps idle partitions, and tests the following operations.
func TestWarm(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c, large, whole := n.newClaim(t, n.part(1, "1g10gb-2")), n.newClaim(t, n.part(1, "3g40gb-0")), n.newClaim(t, n.whole(1))
	p := n.serve(t)
	n.keepWarm(t, time.Hour)
	warm := func() {
		t.Helper()
		err := p.poll(t, func() bool { // until it has heard of it
			p.mustPrepare(t, c)
			p.mustUnprepare(t, c)
			return len(n.instances(1)) > 0
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	warm()
	born := n.hardware.State().GPUs[1].Instances[0].Born
	n.check(t, "with an idle instance")
	if r := n.doctor(t, "--strict", "--looks", "1"); r.Healthy || r.Findings[0].Check != "instance-idle" {
		t.Errorf("strictly, the doctor finds %s", findings(r))
	}
	p.mustPrepare(t, c)
	if now := n.hardware.State().GPUs[1].Instances[0].Born; now != born {
		t.Error("the idle instance wasn't used again")
	}
	p.mustUnprepare(t, c)
	p.mustPrepare(t, large)
	n.has(t, 1, "0+4")
	p.mustUnprepare(t, large)
	n.has(t, 1, "0+4")
	p.mustPrepare(t, whole)
	n.has(t, 1)
	n.check(t, "whole again")
	p.mustUnprepare(t, whole)

	warm()
	p.kill()
	p = n.serve(t)
	n.check(t, "after a restart")
	warm()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-p.done
	n.checkEmpty(t) // it leaves, and takes with it what is its own
}

// poll waits until something is so, as long as the plugin lives.
func (p *plugin) poll(t *testing.T, so func() bool) error {
	return wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		select {
		case <-p.done:
			return false, errors.New("the plugin is dead")
		default:
			return so(), nil
		}
	})
}

// instances are the GPU instances of a GPU: "4+1", first slice and size, with a
// mark where there is no compute instance.
func (n *node) instances(i int) []string {
	list := []string{}
	for _, g := range n.hardware.State().GPUs[i].Instances {
		text := fmt.Sprintf("%d+%d", g.Start, g.Size)
		if len(g.Compute) == 0 {
			text += " hollow"
		}
		list = append(list, text)
	}
	slices.Sort(list)
	return list
}

func (n *node) has(t *testing.T, gpu int, want ...string) {
	t.Helper()
	if diff := cmp.Diff(append([]string{}, want...), n.instances(gpu)); diff != "" {
		t.Errorf("instances of GPU %d (-want +got):\n%s", gpu, diff)
	}
}

func (n *node) fault(t *testing.T, f nvmlsim.Fault) {
	t.Helper()
	if err := n.hardware.Fault(f); err != nil {
		t.Fatal(err)
	}
}

// TestHalves kills between the two halves of making and of destroying: a GPU
// instance without a compute instance is there.
func TestHalves(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		slow   string // the call that is under way
		before func(*testing.T, *node, *plugin, *resourceapi.ResourceClaim)
		do     func(*testing.T, *node, *plugin, *resourceapi.ResourceClaim) error
	}{
		"made":      {slow: "GpuInstanceCreateComputeInstance", before: nothing, do: prepareIt},
		"destroyed": {slow: "GpuInstanceDestroy", before: prepared, do: unprepareIt},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			c := n.newClaim(t, n.part(1, "2g20gb-2"))
			p := n.serve(t)
			tc.before(t, n, p, c)
			n.fault(t, nvmlsim.Fault{Call: tc.slow, GPU: nvmlsim.AnyGPU, DelayMS: 60_000})
			answered := make(chan error, 1)
			go func() { answered <- tc.do(t, n, p, c) }()
			if err := p.poll(t, func() bool { return slices.Equal(n.instances(1), []string{"2+2 hollow"}) }); err != nil {
				t.Fatalf("%v; there are %v", err, n.instances(1))
			}
			p.kill()
			<-answered
			if err := n.hardware.ClearFaults(); err != nil {
				t.Fatal(err)
			}

			p = n.serve(t)
			n.check(t, "after recovery")
			n.has(t, 1, "2+2") // its claim is still recorded
			p.mustPrepare(t, c)
			p.mustUnprepare(t, c)
			n.checkEmpty(t)
		})
	}
}

// TestMakeFails has hardware refuse twice, which are both attempts of a prepare; the kubelet tries
// again.
func TestMakeFails(t *testing.T) {
	t.Parallel()
	create := nvmlsim.Fault{Call: "GpuInstanceCreateComputeInstance", GPU: nvmlsim.AnyGPU, Code: nvmlsim.Unknown, Count: 2}
	for name, faults := range map[string][]nvmlsim.Fault{
		"no GPU instance":                       {{Call: "DeviceCreateGpuInstanceWithPlacement", GPU: nvmlsim.AnyGPU, Code: nvmlsim.Unknown, Count: 2}},
		"no compute instance":                   {create},
		"no compute instance, stuck":            {create, {Call: "GpuInstanceDestroy", GPU: nvmlsim.AnyGPU, Code: nvmlsim.InUse, Count: 1}},
		"no compute instance, stuck for longer": {create, {Call: "GpuInstanceDestroy", GPU: nvmlsim.AnyGPU, Code: nvmlsim.InUse, Count: 4}},
		"no MIG mode":                           {{Call: "DeviceSetMigMode", GPU: nvmlsim.AnyGPU, Code: nvmlsim.Unknown, Count: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			c, other := n.newClaim(t, n.part(1, "2g20gb-2")), n.newClaim(t, n.part(0, "1g10gb-0"))
			p := n.serve(t)
			for _, f := range faults {
				n.fault(t, f)
			}
			if names, err := p.prepare(t, c); err == nil {
				t.Errorf("prepared: %v", names)
			}
			p.mustPrepare(t, other) // another GPU
			if err := p.poll(t, func() bool { _, err := p.prepare(t, c); return err == nil }); err != nil {
				t.Fatal(err)
			}
			n.check(t, "after a prepare that went well")
			n.has(t, 1, "2+2")
			p.mustUnprepare(t, other)
			p.mustUnprepare(t, c)
			n.checkEmpty(t)
		})
	}
}

// TestAPIServerAway has a plugin start that can't ask anybody anything.
func TestAPIServerAway(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	stays, goes, late := n.newClaim(t, n.part(1, "2g20gb-2")), n.newClaim(t, n.part(1, "1g10gb-0")), n.newClaim(t, n.part(0, "1g10gb-0"))
	p := n.serve(t)
	p.mustPrepare(t, stays)
	p.mustPrepare(t, goes)
	p.kill()
	n.wipeCDI(t)
	n.kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	nobody := clientcmdapi.NewConfig()
	nobody.Clusters["c"] = &clientcmdapi.Cluster{Server: "https://127.0.0.1:1"}
	nobody.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
	nobody.CurrentContext = "c"
	if err := clientcmd.WriteToFile(*nobody, n.kubeconfig); err != nil {
		t.Fatal(err)
	}
	p = n.serve(t)
	n.check(t, "without an API server")
	p.mustUnprepare(t, goes)
	n.has(t, 1, "2+2")
	if names, err := p.prepare(t, late); err == nil {
		t.Errorf("prepared a claim that nobody could be asked about: %v", names)
	}
	n.has(t, 0)
	n.check(t, "after an unprepare")
	p.mustUnprepare(t, stays)
	n.checkEmpty(t)
}

// TestStorm kills at any time while many claims come and go at once.
func TestStorm(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	var claims []*resourceapi.ResourceClaim
	for gpu := range 2 {
		for slice := range 7 {
			claims = append(claims, n.newClaim(t, n.part(gpu, fmt.Sprintf("1g10gb-%d", slice))))
		}
	}
	for call, ms := range map[string]int{"DeviceCreateGpuInstanceWithPlacement": 20, "GpuInstanceCreateComputeInstance": 10, "GpuInstanceDestroy": 40} {
		n.fault(t, nvmlsim.Fault{Call: call, GPU: nvmlsim.AnyGPU, DelayMS: ms})
	}
	all := func(do func(*resourceapi.ResourceClaim)) { withAll(claims, do) }
	for round := range 6 {
		p := n.serve(t)
		after := time.Duration(rand.IntN(300)) * time.Millisecond
		time.AfterFunc(after, func() { _ = p.cmd.Process.Kill() })
		all(func(c *resourceapi.ResourceClaim) { // as far as they come
			if round%2 == 0 {
				_, _ = p.prepare(t, c)
			} else {
				_ = p.unprepare(t, c)
			}
		})
		<-p.done

		p = n.serve(t)
		n.check(t, fmt.Sprintf("in round %d, killed after %s,", round, after))
		if round%2 == 0 {
			all(func(c *resourceapi.ResourceClaim) {
				if err := prepareIt(t, n, p, c); err != nil {
					t.Error(err)
				}
			})
			n.has(t, 0, "0+1", "1+1", "2+1", "3+1", "4+1", "5+1", "6+1")
			n.has(t, 1, "0+1", "1+1", "2+1", "3+1", "4+1", "5+1", "6+1")
		} else {
			all(func(c *resourceapi.ResourceClaim) {
				if err := p.unprepare(t, c); err != nil {
					t.Error(err)
				}
			})
		}
		n.check(t, fmt.Sprintf("after round %d", round))
		if round == 5 {
			n.checkEmpty(t)
		}
		p.kill()
	}
}
