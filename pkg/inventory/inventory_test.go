package inventory_test

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
)

// FuzzThereAndBack sends nodes with every field of gpu.Node filled at random
// through an object's JSON and expects them back unchanged. Fields are found
// by reflection, so one that is added to gpu.Node and forgotten here fails.
func FuzzThereAndBack(f *testing.F) {
	for seed := range uint64(64) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		want := randomNode(rand.New(rand.NewPCG(seed, 0)))
		got := inventory.Node(throughJSON(t, want))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("seed %d (-want +got):\n%s", seed, diff)
		}
	})
}

// FuzzStrings gives NVML's strings any bytes. The stored strings must not change when they
// are read and reported again: otherwise a plugin would write without end.
func FuzzStrings(f *testing.F) {
	f.Add("GPU-980fb007-d0f5-47e3-8d7f-b16b8b11bba9", "NVIDIA H100 80GB HBM3", "580.159.04", "00000000:C1:00.0", "3g.40gb")
	f.Add("\xff", "\x00\n\u2028", "<&>", "\xc3\x28", "\ufeff")
	f.Fuzz(func(t *testing.T, uuid, product, version, pci, profile string) {
		n := gpu.Node{DriverVersion: version, CUDADriverVersion: version, GPUs: []gpu.GPU{{
			UUID: gpu.UUID(uuid), PCI: gpu.PCIAddress(pci), PCIeRoot: pci, Model: gpu.Model{ProductName: product, Brand: product, Architecture: product, CUDAComputeCapability: version},
			VirtualizationMode: product, AddressingMode: product, Fabric: &gpu.Fabric{ClusterUUID: uuid}, NVLink: &gpu.NVLink{Domain: uuid},
			MIG:        &gpu.MIG{Profiles: []gpu.Profile{{Name: profile}}, Instances: []gpu.Instance{{UUID: gpu.UUID(uuid), Profile: profile}}},
			Conditions: []gpu.Condition{{Type: gpu.PrepareFailed, Message: product, Refused: []gpu.DeviceName{gpu.DeviceName(uuid)}}},
		}}}
		stored := throughJSON(t, n)
		again := throughJSON(t, inventory.Node(stored))
		if diff := cmp.Diff(stored, again); diff != "" {
			t.Errorf("(-stored +reported again):\n%s", diff)
		}
	})
}

func TestFactsAreTheSameInAnyOrder(t *testing.T) {
	n := randomNode(rand.New(rand.NewPCG(7, 0)))
	for len(n.GPUs) < 3 {
		n.GPUs = append(n.GPUs, gpu.GPU{Index: len(n.GPUs)})
	}
	want := throughJSON(t, n)
	n.GPUs[0], n.GPUs[2] = n.GPUs[2], n.GPUs[0]
	if diff := cmp.Diff(want, throughJSON(t, n)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSetFactsLeavesTheConversationAlone(t *testing.T) {
	s := v1alpha1.GPUInventoryStatus{PublishResponse: 3, BootID: "b", PluginVersion: "v", DriverVersion: "old", Models: "old"}
	inventory.SetFacts(&s, gpu.Node{})
	want := v1alpha1.GPUInventoryStatus{PublishResponse: 3, BootID: "b", PluginVersion: "v"}
	if diff := cmp.Diff(want, s); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The object's condition list is keyed by type; a server refuses it otherwise.
func TestConditionsOfOneTypeBecomeOne(t *testing.T) {
	var s v1alpha1.GPUInventoryStatus
	inventory.SetFacts(&s, gpu.Node{GPUs: []gpu.GPU{{Conditions: []gpu.Condition{
		{Type: gpu.Lost, Message: "fell off the bus"},
		{Type: gpu.DeviceNodeMissing, Message: "/dev/nvidia0 is missing"},
		{Type: gpu.DeviceNodeMissing, Message: "/dev/nvidia-uvm is missing"},
		{Type: gpu.DeviceNodeMissing, Message: "/dev/nvidia0 is missing"},
	}}}})
	want := []v1alpha1.GPUCondition{
		{Type: "DeviceNodeMissing", Status: metav1.ConditionTrue, Message: "/dev/nvidia-uvm is missing; /dev/nvidia0 is missing"},
		{Type: "Lost", Status: metav1.ConditionTrue, Message: "fell off the bus"},
	}
	if diff := cmp.Diff(want, s.GPUs[0].Conditions); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A condition keeps the time at which it was first reported, whatever its
// message says since, until it ends.
func TestConditionsKeepTheirTime(t *testing.T) {
	at := func(second int64) metav1.Time { return metav1.NewTime(time.Unix(second, 0)) }
	var s v1alpha1.GPUInventoryStatus
	for i, step := range []struct {
		conditions []gpu.Condition
		want       map[string]metav1.Time
	}{
		{[]gpu.Condition{{Type: gpu.Lost, Message: "one"}}, map[string]metav1.Time{"Lost": at(0)}},
		{[]gpu.Condition{{Type: gpu.Lost, Message: "two"}, {Type: gpu.Unreadable}}, map[string]metav1.Time{"Lost": at(0), "Unreadable": at(1)}},
		{nil, map[string]metav1.Time{}},
		{[]gpu.Condition{{Type: gpu.Lost, Message: "two"}}, map[string]metav1.Time{"Lost": at(3)}},
	} {
		inventory.SetFacts(&s, gpu.Node{GPUs: []gpu.GPU{{UUID: "GPU-1", Conditions: step.conditions}}})
		inventory.Stamp(&s, at(int64(i)))
		got := make(map[string]metav1.Time)
		for _, c := range s.GPUs[0].Conditions {
			got[c.Type] = *c.LastTransitionTime
		}
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
}

// TestReportOfRefusals: a report that was stored equals the next one, unless a device or the time
// is another. Otherwise the plugin writes without end, or not at all.
func TestReportOfRefusals(t *testing.T) {
	report := func(c gpu.Condition) v1alpha1.GPUInventoryStatus {
		var s v1alpha1.GPUInventoryStatus
		inventory.SetFacts(&s, gpu.Node{GPUs: []gpu.GPU{{UUID: "GPU-1", Conditions: []gpu.Condition{c}}}})
		return s
	}
	at := time.Date(2026, 11, 28, 9, 0, 0, 123456789, time.UTC)
	refused := gpu.Condition{Type: gpu.PrepareFailed, Message: "m", Refused: []gpu.DeviceName{"a", "b"}, RetryAt: at}
	stored := throughJSON(t, gpu.Node{GPUs: []gpu.GPU{{UUID: "GPU-1", Conditions: []gpu.Condition{refused}}}}).Status
	other, later := refused, refused
	other.Refused, later.RetryAt = []gpu.DeviceName{"b", "a"}, at.Add(time.Second)
	for name, tc := range map[string]struct {
		now  gpu.Condition
		want bool
	}{"same": {refused, true}, "other order": {other, false}, "later": {later, false}} {
		if got := equality.Semantic.DeepEqual(stored, report(tc.now)); got != tc.want {
			t.Errorf("%s: equal: %t\n%s", name, got, cmp.Diff(stored, report(tc.now)))
		}
	}
	got := inventory.Node(&v1alpha1.GPUInventory{Status: stored}).GPUs[0].Conditions[0]
	refused.RetryAt = at.Truncate(time.Second)
	if diff := cmp.Diff(refused, got); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
}

// A condition with status False, which a newer plugin may write, is ignored.
func TestConditionsThatHaveEnded(t *testing.T) {
	inv := &v1alpha1.GPUInventory{Status: v1alpha1.GPUInventoryStatus{GPUs: []v1alpha1.GPU{{Conditions: []v1alpha1.GPUCondition{
		{Type: "Lost", Status: metav1.ConditionFalse}, {Type: "Unreadable"}, {Type: "DeviceNodeMissing", Status: metav1.ConditionUnknown},
	}}}}}
	want := []gpu.Condition{{Type: gpu.Unreadable}, {Type: gpu.DeviceNodeMissing}}
	if diff := cmp.Diff(want, inventory.Node(inv).GPUs[0].Conditions); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestModels(t *testing.T) {
	model := func(name string) gpu.GPU { return gpu.GPU{Model: gpu.Model{ProductName: name}} }
	for name, tc := range map[string]struct {
		gpus []gpu.GPU
		want string
	}{
		"none":  {nil, ""},
		"one":   {[]gpu.GPU{model("NVIDIA H200")}, "1×NVIDIA H200"},
		"mixed": {[]gpu.GPU{model("Tesla T4"), model("NVIDIA L4"), model("Tesla T4")}, "2×Tesla T4, 1×NVIDIA L4"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := inventory.Models(tc.gpus); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func throughJSON(t *testing.T, n gpu.Node) *v1alpha1.GPUInventory {
	t.Helper()
	inv := v1alpha1.GPUInventory{}
	inv.Name = n.Name
	inventory.SetFacts(&inv.Status, n)
	raw, err := json.Marshal(inv)
	if err != nil {
		t.Fatal(err)
	}
	var out v1alpha1.GPUInventory
	if err := json.Unmarshal(raw, &out); err != nil {
		t.Fatal(err)
	}
	return &out
}

// randomNode fills every field. Indexes count up and conditions have distinct
// types in order, as they come back.
func randomNode(r *rand.Rand) gpu.Node {
	var n gpu.Node
	fill(r, reflect.ValueOf(&n).Elem())
	for i := range n.GPUs {
		n.GPUs[i].Index = i
		for j := range n.GPUs[i].Conditions {
			c := gpu.Condition{Type: gpu.ConditionType(rune('A' + j)), Message: n.GPUs[i].Conditions[j].Message, Refused: n.GPUs[i].Conditions[j].Refused}
			if len(c.Refused) > 0 {
				c.RetryAt = time.Unix(r.Int64N(1<<32), 0)
			}
			n.GPUs[i].Conditions[j] = c
		}
	}
	return n
}

func fill(r *rand.Rand, v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return
		}
		for _, field := range v.Fields() {
			fill(r, field)
		}
	case reflect.Pointer:
		if r.IntN(3) > 0 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(r, v.Elem())
		}
	case reflect.Slice:
		for range r.IntN(4) {
			e := reflect.New(v.Type().Elem()).Elem()
			fill(r, e)
			v.Set(reflect.Append(v, e))
		}
	case reflect.String:
		v.SetString(string(rune('a'+r.IntN(26))) + string(rune('a'+r.IntN(26))))
	case reflect.Int:
		v.SetInt(int64(r.Int32()))
	case reflect.Int64:
		v.SetInt(r.Int64())
	case reflect.Bool:
		v.SetBool(r.IntN(2) == 0)
	default:
		panic("gpu.Node has a kind of field this test can't fill: " + v.Kind().String())
	}
}
