package offer_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/offer"
)

var update = flag.Bool("update", false, "write testdata/*.out.yaml again")

// TestGolden offers testdata/NAME.in.yaml, a GPUInventory, as
// testdata/NAME.options.yaml says, if there is one, and expects
// testdata/NAME.out.yaml.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.in.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no test data", err)
	}
	for _, file := range files {
		base := strings.TrimSuffix(file, ".in.yaml")
		t.Run(filepath.Base(base), func(t *testing.T) {
			var inv v1alpha1.GPUInventory
			read(t, file, &inv)
			gpus := build(inventory.Node(&inv), readOptions(t, base+".options.yaml"))
			got := golden(t, gpus)
			if *update {
				if err := os.WriteFile(base+".out.yaml", []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(base + ".out.yaml")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			for _, g := range gpus {
				checkRoom(t, g)
				for _, d := range g.Devices {
					checkLimits(t, d)
				}
			}
		})
	}
}

func read(t *testing.T, file string, into any) {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(raw, into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

func readOptions(t *testing.T, file string) options {
	t.Helper()
	var o struct {
		Partitioned *v1alpha1.PartitionedPlan `json:"partitioned"`
		MPS         *v1alpha1.MPSPlan         `json:"mps"`
		TimeSliced  *v1alpha1.TimeSlicedPlan  `json:"timeSliced"`
		Allocated   []gpu.DeviceName          `json:"allocated"`
		Counters    bool                      `json:"counters"`
		Multiple    bool                      `json:"multiple"`
		Charged     bool                      `json:"charged"`
	}
	if _, err := os.Stat(file); err == nil {
		read(t, file, &o)
	}
	return options{
		Server:    offer.Server{Counters: o.Counters, Multiple: o.Multiple, Charged: o.Charged},
		Plan:      v1alpha1.Plan{Partitioned: o.Partitioned, MPS: o.MPS, TimeSliced: o.TimeSliced},
		Allocated: o.Allocated,
	}
}

// golden writes an offer as YAML, with one line for each device and counter
// set, in the order of a ResourceSlice.
func golden(t *testing.T, gpus []offer.GPU) string {
	t.Helper()
	var out strings.Builder
	line := func(indent, key string, value any) {
		raw, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		if s := string(raw); s != "null" {
			fmt.Fprintf(&out, "%s%s: %s\n", indent, key, s)
		}
	}
	for _, g := range gpus {
		line("- ", "gpu", g.Name)
		line("  ", "problems", g.Problems)
		line("  ", "missing", g.Missing)
		line("  ", "leftover", g.Leftover)
		line("  ", "counters", g.Counters)
		out.WriteString("  devices:\n")
		for _, d := range g.Devices {
			line("  - ", "name", d.Name)
			line("    ", "attributes", d.Attributes)
			line("    ", "capacity", d.Capacity)
			line("    ", "consumesCounters", d.ConsumesCounters)
			line("    ", "allowMultipleAllocations", d.AllowMultipleAllocations)
		}
	}
	return out.String()
}

// checkLimits checks the server's limits: one refused device would keep all
// GPUs of the node from being published.
func checkLimits(t *testing.T, d resourceapi.Device) {
	t.Helper()
	if errs := validation.IsDNS1123Label(d.Name); len(errs) > 0 {
		t.Errorf("device %q: %v", d.Name, errs)
	}
	if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		t.Errorf("device %s: %d attributes and capacities", d.Name, n)
	}
	checkRequests(t, d)
	for name, a := range d.Attributes {
		for _, s := range []*string{a.StringValue, a.VersionValue} {
			if s != nil && (*s == "" || len(*s) > resourceapi.DeviceAttributeMaxValueLength) {
				t.Errorf("device %s: attribute %s has %d bytes", d.Name, name, len(*s))
			}
		}
	}
}

// checkRoom: a GPU's devices are in one slice.
func checkRoom(t *testing.T, g offer.GPU) {
	t.Helper()
	most := resourceapi.ResourceSliceMaxDevices
	if g.Counters != nil {
		most = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	}
	if len(g.Devices) > most {
		t.Errorf("%d devices, and room for %d", len(g.Devices), most)
	}
}

// checkRequests checks that the server accepts the request policies.
func checkRequests(t *testing.T, d resourceapi.Device) {
	t.Helper()
	for name, c := range d.Capacity {
		if c.Value.Sign() < 0 {
			t.Errorf("device %s has %s %s", d.Name, c.Value.String(), name)
		}
		p := c.RequestPolicy
		if p == nil {
			continue
		}
		ok := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations && p.Default.Sign() > 0
		switch {
		case p.ValidRange != nil:
			r := p.ValidRange
			two := r.Min.DeepCopy()
			two.Add(*r.Step)
			ok = ok && p.ValidValues == nil && p.Default.Cmp(*r.Min) >= 0 && two.Cmp(c.Value) <= 0 && r.Step.Sign() > 0 &&
				(p.Default.Value()-r.Min.Value())%r.Step.Value() == 0 && (r.Max == nil || r.Max.Cmp(c.Value) <= 0 && p.Default.Cmp(*r.Max) <= 0)
		default:
			ok = ok && len(p.ValidValues) == 1 && p.ValidValues[0].Cmp(*p.Default) == 0 && p.Default.Cmp(c.Value) <= 0
		}
		if !ok {
			t.Errorf("device %s: %s of %s: policy %+v", d.Name, c.Value.String(), name, p)
		}
	}
}

// A plugin that reports thousands of GPUs must not flood the cluster with
// slices.
func TestNodeThatReportsTooManyGPUs(t *testing.T) {
	n := node(t, "l4", 1)
	g := n.GPUs[0]
	n.GPUs = nil
	for i := range 7000 {
		g.UUID, g.Index = gpu.UUID(fmt.Sprintf("GPU-%08x-0000-0000-0000-%012x", i, i)), i
		n.GPUs = append(n.GPUs, g)
	}
	if got := len(build(n, options{})); got != 128 {
		t.Errorf("%d GPUs are offered, want 128", got)
	}
}

// TestWithheld checks that every GPU of a node is either offered or withheld with a
// reason.
func TestWithheld(t *testing.T) {
	n := node(t, "l4", 7)
	n.GPUs[1].Conditions = []gpu.Condition{{Type: gpu.CDIFailed, Message: "no space"}, {Type: gpu.Lost, Message: "gone"}, {Type: gpu.Unreadable}}
	n.GPUs[2].Conditions = []gpu.Condition{{Type: gpu.CDIFailed, Message: "no space"}}
	n.GPUs[4].UUID = n.GPUs[3].UUID
	n.GPUs[5].UUID = "GPU-nonsense"
	n.GPUs[6].UUID = "54d0709b-558d-5a59-9c65-0c5fc14a21a4"
	ambiguous := "its UUID doesn't identify it: it is malformed, or another GPU of the node has the same"
	want := []offer.WithheldGPU{
		{UUID: n.GPUs[1].UUID, Name: "gpu-00000002", Reason: "Lost: gone; Unreadable"},
		{UUID: n.GPUs[3].UUID, Reason: ambiguous},
		{UUID: n.GPUs[3].UUID, Reason: ambiguous},
		{UUID: "GPU-nonsense", Reason: ambiguous},
		{UUID: n.GPUs[6].UUID, Reason: "its UUID doesn't begin with GPU-, as that of an integrated GPU, and no device can be named after it"},
	}
	if diff := cmp.Diff(want, offer.Withheld(n, build(n, options{}))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := len(build(n, options{})); got != 2 {
		t.Errorf("%d GPUs are offered, want the two others", got)
	}
}

// TestNVLinkDomain: a claim's constraint keeps GPUs together that reach each other
// over NVLink, on one node and on several.
func TestNVLinkDomain(t *testing.T) {
	for name, tc := range map[string]struct {
		gpu    gpu.GPU
		domain string
	}{
		"no NVLink":               {gpu.GPU{}, ""},
		"links that lead nowhere": {gpu.GPU{NVLink: &gpu.NVLink{Links: 4}}, ""},
		"NVSwitches of the node":  {gpu.GPU{NVLink: &gpu.NVLink{Links: 18, Domain: gpu.SwitchDomain}}, "node-7"},
		"a bridge":                {gpu.GPU{NVLink: &gpu.NVLink{Links: 4, Domain: "GPU-00000001"}}, "GPU-00000001"},
		"NVSwitches of several nodes": {gpu.GPU{
			NVLink: &gpu.NVLink{Links: 18, Domain: gpu.SwitchDomain}, Fabric: &gpu.Fabric{ClusterUUID: "c0ffee00", CliqueID: 2},
		}, "c0ffee00.2"},
	} {
		d := offer.Whole(gpu.Node{Name: "node-7"}, tc.gpu)
		got := ""
		if a, ok := d.Attributes["nvlinkDomain"]; ok {
			got = *a.StringValue
		}
		if got != tc.domain {
			t.Errorf("%s: domain %q, want %q", name, got, tc.domain)
		}
		if links, ok := d.Attributes["nvlinkLinks"]; ok != (tc.gpu.NVLink != nil) || (ok && *links.IntValue != int64(tc.gpu.NVLink.Links)) {
			t.Errorf("%s: links %v", name, links)
		}
	}
}
