//go:build integration

package control_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
)

// node is a node with its plugin, as far as the controller can tell.
type node struct {
	name   string
	uid    types.UID
	facts  gpu.Node
	status v1alpha1.GPUInventoryStatus
}

// newPublishedNode returns a node with a plugin, whose GPUs are published, and a
// function that kills the plugin.
func newPublishedNode(t *testing.T, gpus int) (n *node, kill func()) {
	t.Helper()
	n = newNode(t, gpus)
	n.report(t)
	kill = n.startPlugin(t)
	n.waitForPool(t, gpus)
	return n, kill
}

func newNode(t *testing.T, gpus int) *node {
	t.Helper()
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{GenerateName: "node-"}}
	if err := api.Create(t.Context(), object); err != nil {
		t.Fatal(err)
	}
	n := &node{name: object.Name, uid: object.UID, facts: gpu.Node{Name: object.Name, DriverVersion: "580.159.04", CUDADriverVersion: "13.0"}}
	n.status.RegisteredAt = new(metav1.NowMicro())
	for i := range gpus {
		n.facts.GPUs = append(n.facts.GPUs, gpu.GPU{
			UUID: gpu.UUID(fmt.Sprintf("GPU-%08x-0000-0000-0000-%012x", i, i)), Index: i, Minor: i,
			PCI:         gpu.PCIAddress(fmt.Sprintf("0000:%02x:00.0", i)),
			Model:       gpu.Model{ProductName: "NVIDIA H100 80GB HBM3", Brand: "Nvidia", Architecture: "Hopper", CUDAComputeCapability: "9.0"},
			MemoryBytes: 81559 << 20,
		})
	}
	t.Cleanup(func() {
		_ = api.Delete(context.Background(), object)
		_ = api.Delete(context.Background(), &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: n.name}})
		_ = slices.DeleteCollection(context.Background(), metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
	})
	return n
}

// report writes the inventory as the plugin does.
func (n *node) report(t *testing.T) {
	t.Helper()
	inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{
		Name:            n.name,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.name, UID: n.uid}},
	}}
	if err := api.Create(t.Context(), inv); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	eventually(t, "the report is stored", func() bool {
		inv := n.inventory(t)
		response := inv.Status.PublishResponse
		inv.Status = n.status
		inv.Status.PublishResponse = response
		inventory.SetFacts(&inv.Status, n.facts)
		return api.Status().Update(t.Context(), inv) == nil
	})
}

func (n *node) inventory(t *testing.T) *v1alpha1.GPUInventory {
	t.Helper()
	inv := &v1alpha1.GPUInventory{}
	if err := api.Get(t.Context(), types.NamespacedName{Name: n.name}, inv); err != nil {
		t.Fatal(err)
	}
	return inv
}

// startPlugin answers publishRequests until it is killed or the test ends, also
// after the server was restarted.
func (n *node) startPlugin(t *testing.T) (kill func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w, err := n.watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ; ctx.Err() == nil; w, err = n.watch(ctx) {
			if err != nil {
				time.Sleep(100 * time.Millisecond)
				continue
			}
			n.answer(ctx, t, w)
		}
	}()
	kill = func() { cancel(); <-done }
	t.Cleanup(kill)
	return kill
}

func (n *node) watch(ctx context.Context) (watch.Interface, error) {
	return api.Watch(ctx, &v1alpha1.GPUInventoryList{}, client.MatchingFields{"metadata.name": n.name})
}

// answer answers publishRequests until the watch ends.
func (n *node) answer(ctx context.Context, t *testing.T, w watch.Interface) {
	defer w.Stop()
	for e := range w.ResultChan() {
		inv, ok := e.Object.(*v1alpha1.GPUInventory)
		if !ok || inv.Status.PublishResponse >= inv.Spec.PublishRequest {
			continue
		}
		base := inv.DeepCopy()
		inv.Status.PublishResponse = inv.Spec.PublishRequest
		err := api.Status().Patch(ctx, inv, client.MergeFrom(base))
		if _, answered := err.(apierrors.APIStatus); err != nil && ctx.Err() == nil && answered {
			t.Errorf("plugin: %v", err)
		}
	}
}

// wipe deletes the node's slices the way the kubelet does.
func (n *node) wipe(t *testing.T) {
	t.Helper()
	err := slices.DeleteCollection(t.Context(), metav1.DeleteOptions{},
		metav1.ListOptions{FieldSelector: "spec.driver=gpu.nvidia.com,spec.nodeName=" + n.name})
	if err != nil {
		t.Fatal(err)
	}
}

func (n *node) pool(t *testing.T) []resourceapi.ResourceSlice {
	t.Helper()
	list, err := slices.List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// waitForPool waits for a complete pool with devices of so many GPUs, and nothing else.
func (n *node) waitForPool(t *testing.T, gpus int) []resourceapi.ResourceSlice {
	t.Helper()
	var pool []resourceapi.ResourceSlice
	begun := time.Now()
	eventually(t, fmt.Sprintf("%s has a pool of %d GPUs", n.name, gpus), func() bool {
		pool = n.pool(t)
		for _, s := range pool {
			if s.Spec.Pool.ResourceSliceCount != int64(len(pool)) || s.Spec.Pool.Generation != pool[0].Spec.Pool.Generation {
				return false
			}
		}
		return len(gpusOf(pool)) == gpus
	})
	t.Logf("%s: a pool of %d GPUs after %s", n.name, gpus, time.Since(begun).Round(time.Millisecond))
	return pool
}

// waitForTaints waits until the devices of these GPUs, by name, have that taint, and the
// others none. It returns the pool.
func (n *node) waitForTaints(t *testing.T, want map[string]string) []resourceapi.ResourceSlice {
	t.Helper()
	var pool []resourceapi.ResourceSlice
	eventually(t, fmt.Sprintf("%s has the taints %v", n.name, want), func() bool {
		pool = n.pool(t)
		for _, s := range pool {
			for _, d := range s.Spec.Devices {
				var taints []string
				for _, x := range d.Taints {
					taints = append(taints, fmt.Sprintf("%s=%s:%s", x.Key, x.Value, x.Effect))
				}
				if strings.Join(taints, " ") != want[d.Name[:len("gpu-00000000")]] {
					return false
				}
			}
		}
		return len(pool) > 0
	})
	return pool
}

// gpusOf lists the GPUs of a pool's devices, each once, in the order of the
// slices' names.
func gpusOf(pool []resourceapi.ResourceSlice) []string {
	var out []string
	for _, s := range pool {
		for _, d := range s.Spec.Devices {
			name := d.Name[:min(len(d.Name), len("gpu-00000000"))]
			if !sets.New(out...).Has(name) {
				out = append(out, name)
			}
		}
	}
	return out
}

func (n *node) mustHaveNoSlices(t *testing.T) {
	t.Helper()
	if pool := n.pool(t); len(pool) > 0 {
		t.Errorf("%s has %d slices", n.name, len(pool))
	}
}

// somethingElseHappens has another node published from scratch: by then the
// controller has looked at everything that was there before.
func somethingElseHappens(t *testing.T) {
	t.Helper()
	newPublishedNode(t, 1)
}

func createSlice(t *testing.T, s *resourceapi.ResourceSlice) {
	t.Helper()
	if _, err := slices.Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = slices.Delete(context.Background(), s.Name, metav1.DeleteOptions{}) })
}

func versions(pool []resourceapi.ResourceSlice, inventories ...*v1alpha1.GPUInventory) map[string]string {
	out := make(map[string]string)
	for _, s := range pool {
		out[string(s.UID)] = s.Name + " " + s.ResourceVersion
	}
	for _, i := range inventories {
		out[string(i.UID)] = i.Name + " " + i.ResourceVersion
	}
	return out
}
