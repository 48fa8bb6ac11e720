//go:build integration

package control_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	stdslices "slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// newMachine is a node of eight simulated H100s in the pool "training". Machines differ
// in the UUIDs of their GPUs.
func newMachine(t *testing.T, machine int) *node {
	t.Helper()
	n := newNode(t, 0)
	facts, err := offertest.Node("h100-80gb", 8)
	if err != nil {
		t.Fatal(err)
	}
	facts.Name = n.name
	for i := range facts.GPUs {
		facts.GPUs[i].UUID = gpu.UUID(fmt.Sprintf("GPU-%06d%02d-0000-0000-0000-000000000000", machine, i))
		facts.GPUs[i].PCI = gpu.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 16+i))
		facts.GPUs[i].PCIeRoot = fmt.Sprintf("pci0000:%02x", i/2)
	}
	n.facts = facts
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}
	change(t, object, func() { object.Labels = map[string]string{"pool": "training"} })
	return n
}

// asOf rewrites the UUIDs of a machine's GPUs, and the names that follow from them, to
// those of another.
func asOf(t *testing.T, v any, from, to int) string {
	t.Helper()
	raw, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(raw), fmt.Sprintf("-%06d", from), fmt.Sprintf("-%06d", to))
}

// printed runs kubectl gpu template with the arguments, and returns the slices by name.
func printed(t *testing.T, program string, args ...string) []resourceapi.ResourceSlice {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, append([]string{"template", "-o", "json", "--kubeconfig", kubeconfig}, args...)...)
	cmd.Stderr = t.Output()
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var list struct{ Items []resourceapi.ResourceSlice }
	if err := json.Unmarshal(out, &list); err != nil {
		t.Fatal(err)
	}
	return byName(list.Items)
}

func byName(all []resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
	stdslices.SortFunc(all, func(a, b resourceapi.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// TestTemplate checks that kubectl gpu template prints, for a node and for a machine that
// doesn't exist, the slices that the controller publishes for another node with the same
// GPUs.
func TestTemplate(t *testing.T) {
	program := filepath.Join(t.TempDir(), "kubectl-gpu")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../../cmd/kubectl-gpu").CombinedOutput(); err != nil {
		t.Fatalf("build kubectl-gpu: %v\n%s", err, out)
	}
	startController(t)
	p := newPolicy(t, v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: new(int32(4))}})
	p.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"pool": "training"}}
	p.Spec.GPUSelector = `device.attributes["gpu.nvidia.com"].index < 2`
	if err := api.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the policy is accepted", func() bool {
		err := api.Get(t.Context(), client.ObjectKeyFromObject(p), p)
		return err == nil && p.Status.Accepted != nil
	})

	old := newMachine(t, 1)
	old.facts.GPUs[3].Conditions = []gpu.Condition{{Type: gpu.ResetRequired, Message: "XID 95"}}
	old.report(t)
	old.startPlugin(t)
	old.waitForPool(t, 8)
	fresh := newMachine(t, 2)
	fresh.facts.DriverVersion = "590.44.01"
	out := printed(t, program, old.name, "--name", fresh.name, "--driver-version", "590.44.01")
	fresh.report(t)
	fresh.startPlugin(t)
	published := byName(fresh.waitForPool(t, 8))
	if len(out) != len(published) {
		t.Fatalf("%d slices were printed, %d published", len(out), len(published))
	}
	for i := range published {
		want, got := published[i], out[i]
		if want.Name != got.Name {
			t.Errorf("slice %d is %s, was printed as %s", i, want.Name, got.Name)
		}
		if diff := gocmp.Diff(asOf(t, want.Spec, 2, 2), asOf(t, got.Spec, 1, 2)); diff != "" {
			t.Errorf("slice %s (-published +printed):\n%s", want.Name, diff)
		}
	}

	machine := newMachine(t, 3)
	machine.facts.GPUs = simulatedGPUs(t, "8xh100-80gb")
	out = printed(t, program, "--machine", "8xh100-80gb", "--name", machine.name, "--driver-version", machine.facts.DriverVersion, "--labels", "pool=training")
	machine.report(t)
	machine.startPlugin(t)
	published = byName(machine.waitForPool(t, 8))
	for _, s := range published {
		for i := range s.Spec.Devices {
			for _, unknown := range []resourceapi.QualifiedName{
				"cudaDriverVersion", deviceattribute.StandardDeviceAttributePCIBusID, deviceattribute.StandardDeviceAttributePCIeRoot, deviceattribute.StandardDeviceAttributeNUMANode,
			} {
				delete(s.Spec.Devices[i].Attributes, unknown)
			}
		}
	}
	spec := func(s resourceapi.ResourceSlice) string { return asOf(t, s.Spec, 0, 0) }
	if diff := gocmp.Diff(each(published, spec), each(out, spec)); diff != "" {
		t.Errorf("of a machine (-published +printed):\n%s", diff)
	}
}

func each[T, U any](all []T, f func(T) U) (out []U) {
	for _, x := range all {
		out = append(out, f(x))
	}
	return out
}

// simulatedGPUs are those that a plugin reads on the simulated machine, but with UUIDs as
// kubectl gpu template makes them up.
func simulatedGPUs(t *testing.T, machine string) []gpu.GPU {
	t.Helper()
	gpus, err := nvmltest.NewSimulated(t, machine).GPUs()
	if err != nil {
		t.Fatal(err)
	}
	for i := range gpus {
		gpus[i].UUID = gpu.UUID(fmt.Sprintf("GPU-%08x-0000-0000-0000-000000000000", i+1))
	}
	return gpus
}
