package offer_test

import (
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/inventory"
)

// TestAttributesOfDCGMExporter: from a device that a pod has, dcgm-exporter (4.6.0)
// finds DCGM's series by four attributes, which are strings without a domain. Devices of
// type gpu need uuid; those of type mig parentUUID and profile, and uuid is that of
// the MIG device if there is one. It leaves out other types, which shares must have.
func TestAttributesOfDCGMExporter(t *testing.T) {
	files, err := filepath.Glob("testdata/*.in.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no test data", err)
	}
	seen := map[string]int{}
	for _, file := range files {
		var inv v1alpha1.GPUInventory
		read(t, file, &inv)
		known := map[string]bool{}
		for _, g := range inv.Status.GPUs {
			known[g.UUID] = true
		}
		for _, g := range build(inventory.Node(&inv), readOptions(t, strings.TrimSuffix(file, ".in.yaml")+".options.yaml")) {
			for _, d := range g.Devices {
				kind := text(d, "type")
				seen[kind]++
				switch kind {
				case "gpu":
					if !known[text(d, "uuid")] {
						t.Errorf("%s: %s has uuid %q", file, d.Name, text(d, "uuid"))
					}
				case "mig":
					if uuid := text(d, "uuid"); !known[text(d, "parentUUID")] || text(d, "profile") == "" || uuid != "" && !strings.HasPrefix(uuid, "MIG-") {
						t.Errorf("%s: %s has parentUUID %q, profile %q, uuid %q", file, d.Name, text(d, "parentUUID"), text(d, "profile"), uuid)
					}
				}
			}
		}
	}
	if seen["gpu"] == 0 || seen["mig"] == 0 || seen["mps"] == 0 || seen["timeslice"] == 0 {
		t.Errorf("devices by type: %v, want some of each", seen)
	}
}

// text is a device's attribute of type string; empty if there is none.
func text(d resourceapi.Device, name resourceapi.QualifiedName) string {
	if v := d.Attributes[name].StringValue; v != nil {
		return *v
	}
	return ""
}
