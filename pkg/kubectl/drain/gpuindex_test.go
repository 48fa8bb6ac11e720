package drain

import (
	"slices"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// TestAmbiguousGPU: an index that two GPUs have names none of them, and one that isn't known
// names none; devices and UUIDs do.
func TestAmbiguousGPU(t *testing.T) {
	c := view.Cluster{Nodes: []view.Node{{Name: "node", GPUs: []view.GPU{
		{Index: 3, Device: "gpu-aaaaaaaa", UUID: "GPU-aaaaaaaa"}, {Index: 3, Device: "gpu-bbbbbbbb"},
		{Index: 4, Device: "gpu-cccccccc"}, {Index: -1, Device: "gpu-dddddddd"},
	}}}}
	const which = "node node has 2 GPUs with index 3: name one by its device or UUID: " +
		"node/gpu-aaaaaaaa (GPU-aaaaaaaa), node/gpu-bbbbbbbb (UUID unknown)"
	none := func(name string) string {
		return "node node has no GPU " + name + "; kubectl gpu map node shows its GPUs"
	}
	for target, want := range map[string]string{
		"node/3": which, "node/4": "gpu-cccccccc", "node/-1": none("-1"), "node/": none(""),
		"node/gpu-bbbbbbbb": "gpu-bbbbbbbb", "node/GPU-aaaaaaaa": "gpu-aaaaaaaa", "node/gpu-dddddddd": "gpu-dddddddd",
	} {
		d := &drainer{target: target, Reader: &cluster.Reader{}}
		err := d.find(c)
		got := ""
		if err != nil {
			got = err.Error()
		} else {
			got = d.gpu.Device
		}
		if got != want {
			t.Errorf("%s: %s\nwant %s", target, got, want)
		}
	}
}

// TestDrainOfAGPUWithoutDevice: the GPU's UUID gives no name, and a rule without the name of a
// device would be for the whole node.
func TestDrainOfAGPUWithoutDevice(t *testing.T) {
	s := kubectltest.New(t)
	kubectltest.Healthy(s)
	kubectltest.Taint(s)
	inv := s.Items[kubectltest.Own+"gpuinventories"][0].(v1alpha1.GPUInventory)
	inv.Status.GPUs = slices.Clone(inv.Status.GPUs)
	inv.Status.GPUs = append(inv.Status.GPUs, v1alpha1.GPU{Index: 77, UUID: "GPU-odd", ProductName: "odd"})
	s.Items[kubectltest.Own+"gpuinventories"] = []any{inv}
	for target, want := range map[string]string{
		"0": "device: gpu-00000001\n", "77": "no device can be named after its UUID, GPU-odd",
		"GPU-odd": "GPU GPU-odd of node node can't be drained", "": "node node has no GPU ;",
	} {
		out := s.Run(t, Command, terminal.Screen{}, "", "drain", "node/"+target, "--dry-run")
		if !strings.Contains(out, want) || strings.Contains(out, "error: ") != (target != "0") {
			t.Errorf("%s: no %q in\n%s", target, want, out)
		}
	}
}
