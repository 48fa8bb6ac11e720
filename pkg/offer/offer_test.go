package offer_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/offer"
)

var update = flag.Bool("update", false, "write testdata/*.out.yaml anew")

// TestGolden offers testdata/NAME.in.yaml, a GPUInventory, and expects
// testdata/NAME.out.yaml: devices as a ResourceSlice lists them.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.in.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no test data", err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".in.yaml")
		t.Run(name, func(t *testing.T) {
			devices := buildFile(t, file)
			got, err := yaml.Marshal(devices)
			if err != nil {
				t.Fatal(err)
			}
			golden := strings.TrimSuffix(file, ".in.yaml") + ".out.yaml"
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			for _, d := range devices {
				checkLimits(t, d)
			}
		})
	}
}

func buildFile(t *testing.T, file string) []resourceapi.Device {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var inv v1alpha1.GPUInventory
	if err := yaml.UnmarshalStrict(raw, &inv); err != nil {
		t.Fatal(err)
	}
	devices := []resourceapi.Device{}
	for _, g := range offer.Build(inventory.Node(&inv), offer.Options{}) {
		devices = append(devices, g.Devices...)
	}
	return devices
}

// checkLimits: what a server refuses would keep the whole node's GPUs back.
func checkLimits(t *testing.T, d resourceapi.Device) {
	t.Helper()
	if errs := validation.IsDNS1123Label(d.Name); len(errs) > 0 {
		t.Errorf("device %q: %v", d.Name, errs)
	}
	if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		t.Errorf("device %s: %d attributes and capacities", d.Name, n)
	}
	for name, a := range d.Attributes {
		for _, s := range []*string{a.StringValue, a.VersionValue} {
			if s != nil && (*s == "" || len(*s) > resourceapi.DeviceAttributeMaxValueLength) {
				t.Errorf("device %s: attribute %s has %d bytes", d.Name, name, len(*s))
			}
		}
	}
}
