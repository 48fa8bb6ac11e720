package fit_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
)

// nicDriver is another driver, of network cards.
const nicDriver = "nic.example.com"

// at returns the slice with the devices behind PCIe roots, in order.
func at(s resourceapi.ResourceSlice, roots ...string) resourceapi.ResourceSlice {
	for i, root := range roots {
		s.Spec.Devices[i].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"resource.kubernetes.io/pcieRoot": {StringValue: &root},
		}
	}
	return s
}

// pair is a claim for a GPU and a network card behind one PCIe root.
func pair(name string) resourceapi.ResourceClaim {
	of := func(driver string) func(*resourceapi.ExactDeviceRequest) {
		return where(`device.driver == "` + driver + `"`)
	}
	c := linked(together(exactly(anyDevice().Name, of("gpu.nvidia.com")), exactly(anyDevice().Name, of(nicDriver))), "resource.kubernetes.io/pcieRoot")
	c.Name = name
	return *c
}

// TestPair: a GPU and a network card of another driver under one PCIe root are found
// together. Where none are left, the reason names the constraint.
func TestPair(t *testing.T) {
	for name, tc := range map[string]struct {
		nicRoots []string
		taken    []string // GPUs that another claim has
		cause    fit.Cause
		says     string
	}{
		"a pair is free":      {[]string{"pci0000:10", "pci0000:20"}, []string{"gpu-0"}, "", ""},
		"no card at the root": {[]string{"pci0000:40", "pci0000:50"}, nil, fit.Constraint, "the same resource.kubernetes.io/pcieRoot"},
		"the pair is taken":   {[]string{"pci0000:10", "pci0000:40"}, []string{"gpu-0"}, fit.InUse, "none of them together have the same resource.kubernetes.io/pcieRoot"},
		"and who has it":      {[]string{"pci0000:10", "pci0000:40"}, []string{"gpu-0"}, fit.InUse, "gpu-0 on node-0 belongs to claim ns/other"},
		"all GPUs are taken":  {[]string{"pci0000:10", "pci0000:20"}, []string{"gpu-0", "gpu-1"}, fit.InUse, "Other claims have what it needs"},
	} {
		t.Run(name, func(t *testing.T) {
			nics := at(slice("node-0", "nic-0", "nic-1"), tc.nicRoots...)
			nics.Name, nics.Spec.Driver = "nics", nicDriver
			o := fit.Objects{
				Nodes: []corev1.Node{node("node-0")}, Classes: []resourceapi.DeviceClass{anyDevice()},
				Slices: []resourceapi.ResourceSlice{at(slice("node-0", "gpu-0", "gpu-1"), "pci0000:10", "pci0000:20"), nics},
				Claims: []resourceapi.ResourceClaim{claim("other", tc.taken...), pair("waits")},
			}
			answer, _ := answerTo(t, o, podWith("waits"))
			r := answer.Reason
			switch {
			case tc.cause == "" && r != nil:
				t.Errorf("got %+v, want a place", r)
			case tc.cause == "":
			case r == nil || r.Cause != tc.cause || !strings.Contains(r.Text, tc.says):
				t.Errorf("got %+v, want %s: %s", r, tc.cause, tc.says)
			case name == "all GPUs are taken" && strings.Contains(r.Text, "Free devices"):
				t.Errorf("no devices are free: %s", r.Text)
			}
		})
	}
}
