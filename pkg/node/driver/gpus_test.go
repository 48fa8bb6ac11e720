package driver

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestPlaceInHost checks what is read from sysfs, whose addresses have four digits of domain
// or more.
func TestPlaceInHost(t *testing.T) {
	sys := t.TempDir()
	add := func(root, address, numa string) {
		t.Helper()
		dir := filepath.Join("devices", root, "0000:00:01.0", address)
		if err := os.MkdirAll(filepath.Join(sys, dir), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(sys, "bus/pci/devices"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join("../../..", dir), filepath.Join(sys, "bus/pci/devices", address)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(sys, dir, "numa_node"), []byte(numa), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	add("pci0000:00", "0000:07:00.0", "1\n")
	add("pci10001:80", "10001:8a:00.0", "0\n")
	add("pci0000:40", "0000:41:00.0", "-1\n")
	add("acpi", "0000:51:00.0", "none\n")
	zero, one := 0, 1
	for address, want := range map[gpu.PCIAddress]gpu.GPU{
		"0000:07:00.0":                        {PCIeRoot: "pci0000:00", NUMANode: &one},
		gpu.NewPCIAddress("00010001:8A:00.0"): {PCIeRoot: "pci10001:80", NUMANode: &zero},
		"0000:41:00.0":                        {PCIeRoot: "pci0000:40"},
		"0000:51:00.0":                        {},
		"0000:61:00.0":                        {},
		"":                                    {},
	} {
		want.PCI = address
		got := gpu.GPU{PCI: address}
		placeInHost(&got, sys)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", address, diff)
		}
	}
}

// simulated opens a session on a machine with two GPUs, after change has changed their
// identities.
func simulated(t *testing.T, change func([]nvmlsim.Identity)) *nvmltest.Simulated {
	t.Helper()
	spec, err := nvmlsim.ParseSpec([]byte("2xl4"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := nvmlsim.Describe(spec, t.Name())
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(d.GPUs)
	}
	m, err := nvmlsim.Create(filepath.Join(t.TempDir(), "state"), d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return nvmltest.OpenSimulated(m)
}

// TestReadNode checks which GPUs of a machine can be used when something is strange about the
// first one: the other one always can.
func TestReadNode(t *testing.T) {
	for name, tc := range map[string]struct {
		change  func([]nvmlsim.Identity) // of the GPUs; nil: none
		fault   nvmlsim.Fault
		want    [][]gpu.ConditionType // of the GPUs that are identified
		message string                // about those that aren't, a part
	}{
		"nothing": {want: [][]gpu.ConditionType{nil, nil}},
		"a UUID without prefix": {
			change: func(all []nvmlsim.Identity) { all[0].UUID = strings.TrimPrefix(all[0].UUID, "GPU-") },
			want:   [][]gpu.ConditionType{{gpu.UnusableUUID}, nil},
		},
		"no device node, as in WSL": {
			fault: nvmlsim.Fault{Call: "DeviceGetMinorNumber", Code: nvmlsim.NotSupported},
			want:  [][]gpu.ConditionType{{gpu.DeviceNodeMissing}, nil},
		},
		"no memory of its own": {
			fault: nvmlsim.Fault{Call: "DeviceGetMemoryInfo", Code: nvmlsim.NotSupported},
			want:  [][]gpu.ConditionType{nil, nil},
		},
		"memory that can't be read": {
			fault: nvmlsim.Fault{Call: "DeviceGetMemoryInfo", Code: nvmlsim.Unknown},
			want:  [][]gpu.ConditionType{{gpu.Unreadable}, nil},
		},
		"a brand that can't be read": {
			fault: nvmlsim.Fault{Call: "DeviceGetBrand", Code: nvmlsim.Unknown},
			want:  [][]gpu.ConditionType{{gpu.AttributesUnreadable}, nil},
		},
		"no UUID": {
			fault: nvmlsim.Fault{Call: "DeviceGetUUID", Code: nvmlsim.Unknown},
			want:  [][]gpu.ConditionType{nil}, message: "nvmlDeviceGetUUID of GPU 0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := simulated(t, tc.change)
			if tc.fault.Call != "" {
				if err := s.Machine.Fault(tc.fault); err != nil {
					t.Fatal(err)
				}
			}
			host := hostWithNodes(t)
			r, err := ReadNode("node-0", host, driverroot.Root{DevRoot: "/", SysRoot: "/"}, s.Session)
			if err != nil {
				t.Fatal(err)
			}
			var got [][]gpu.ConditionType
			for _, g := range r.Node.GPUs {
				var types []gpu.ConditionType
				for _, c := range g.Conditions {
					types = append(types, c.Type)
				}
				got = append(got, types)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("conditions (-want +got):\n%s", diff)
			}
			listing := r.Listing
			if (tc.message == "") != (listing.Message == "") || !strings.Contains(listing.Message, tc.message) {
				t.Errorf("message %q, want %q in it", listing.Message, tc.message)
			}
			if listing.Listed != 2 || listing.Identified != len(tc.want) {
				t.Errorf("%d GPUs are listed, %d identified; want 2, %d", listing.Listed, listing.Identified, len(tc.want))
			}
		})
	}
}

// TestOddMachines checks which GPUs of computers that NVML tells less of can be used, and what
// is said of the others.
func TestOddMachines(t *testing.T) {
	for machine, tc := range map[string]struct {
		dxg  bool
		want []string // of each GPU: its name, address and conditions
	}{
		"gb10": {want: []string{"NVIDIA GB10 at 000f:01:00.0, 0 bytes"}},
		"thor,l4": {want: []string{
			"NVIDIA Thor at 0000:01:00.0, 0 bytes; UnusableUUID: the GPU's UUID UUID doesn't begin with GPU-: it is an integrated GPU (Orin, Thor), and Tessera doesn't serve these",
			"NVIDIA L4 at PCI, 24152899584 bytes",
		}},
		"orin,l4": {want: []string{
			"Orin (nvgpu) at , 0 bytes; UnusableUUID: the GPU's UUID UUID doesn't begin with GPU-: it is an integrated GPU (Orin, Thor), and Tessera doesn't serve these; " +
				"DeviceNodeMissing: NVML doesn't say which device node is the GPU's (nvmlDeviceGetMinorNumber: not supported)",
			"NVIDIA L4 at PCI, 24152899584 bytes",
		}},
		"{wsl: true, gpus: [{model: l4}]}": {dxg: true, want: []string{
			"NVIDIA L4 at PCI, 24152899584 bytes; DeviceNodeMissing: the GPU has no device node: this is Windows Subsystem for Linux, " +
				"where programs use GPUs through /dev/dxg, and Tessera doesn't serve GPUs there",
		}},
	} {
		t.Run(machine, func(t *testing.T) {
			s := nvmltest.NewSimulated(t, machine)
			host := hostWithNodes(t)
			if tc.dxg {
				root := t.TempDir()
				if err := os.Mkdir(filepath.Join(root, "dev"), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink("/dev/null", filepath.Join(root, "dev/dxg")); err != nil {
					t.Fatal(err)
				}
				host = driverroot.NewHost(root)
			}
			r, err := ReadNode("node-0", host, driverroot.Root{DevRoot: "/", SysRoot: "/"}, s.Session)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for i, g := range r.Node.GPUs {
				line := fmt.Sprintf("%s at %s, %d bytes", g.Model.ProductName, g.PCI, g.MemoryBytes)
				for _, c := range g.Conditions {
					line += fmt.Sprintf("; %s: %s", c.Type, c.Message)
				}
				id := s.Machine.Description().GPUs[i]
				line = strings.ReplaceAll(line, id.UUID, "UUID")
				if g.Model.ProductName == "NVIDIA L4" {
					line = strings.ReplaceAll(line, id.BusID, "PCI")
				}
				got = append(got, line)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if l := r.Listing; l.Listed != len(tc.want) || l.Identified != len(tc.want) {
				t.Errorf("%d GPUs are listed, %d identified; want %d", l.Listed, l.Identified, len(tc.want))
			}
		})
	}
}

// TestCallsForTheNode checks that the error of a call that isn't about one GPU names the call,
// and that a driver that doesn't say which CUDA it supports costs nothing.
func TestCallsForTheNode(t *testing.T) {
	read := func(f nvmlsim.Fault) (gpu.Node, error) {
		s := simulated(t, nil)
		f.GPU = nvmlsim.AnyGPU
		if err := s.Machine.Fault(f); err != nil {
			t.Fatal(err)
		}
		r, err := ReadNode("node-0", hostWithNodes(t), driverroot.Root{DevRoot: "/", SysRoot: "/"}, s.Session)
		return r.Node, err
	}
	for _, call := range []string{"DeviceGetCount", "SystemGetDriverVersion", "SystemGetCudaDriverVersion"} {
		for _, code := range []nvmlsim.Return{nvmlsim.Unknown, nvmlsim.Timeout} {
			if _, err := read(nvmlsim.Fault{Call: call, Code: code}); err == nil || !strings.Contains(err.Error(), "nvml"+call) {
				t.Errorf("%s answers %v: error %v, want one that names it", call, code, err)
			}
		}
	}
	node, err := read(nvmlsim.Fault{Call: "SystemGetCudaDriverVersion", Code: nvmlsim.NotSupported})
	if err != nil || len(node.GPUs) != 2 || node.CUDADriverVersion != "" {
		t.Errorf("without a CUDA version: %d GPUs, CUDA %q, error %v", len(node.GPUs), node.CUDADriverVersion, err)
	}
	if slices.ContainsFunc(node.GPUs, func(g gpu.GPU) bool { return len(g.Conditions) > 0 }) {
		t.Errorf("without a CUDA version: %+v", node.GPUs)
	}
}

// hostWithNodes returns a host that has the device nodes of two GPUs.
func hostWithNodes(t *testing.T) driverroot.Host {
	t.Helper()
	return driverroot.NewHost(filepath.Join(installed.Host, installed.Root))
}

// TestFabricManagerComesLate checks that GPUs which Fabric Manager hasn't registered have a
// condition, and are looked at again soon.
func TestFabricManagerComesLate(t *testing.T) {
	m, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	set := func(state nvmlsim.FabricState) {
		t.Helper()
		if err := m.ChangeGPU(0, func(g *nvmlsim.GPUState) error { g.Fabric = state; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	set(nvmlsim.FabricInProgress)
	defer set(nvmlsim.FabricReady)
	f := startFixture(t)
	<-f.Looked()
	name := installed.Names()[0]
	if !hasConditions(f, name, gpu.FabricNotReady) {
		t.Errorf("want the condition %s", gpu.FabricNotReady)
	}
	if !hasConditions(f, installed.Names()[1]) {
		t.Error("the other GPU has conditions, too")
	}
	f.stop()
	if got := f.rereadAfter(); got != retryDriver {
		t.Errorf("it is looked at again after %s, want %s", got, retryDriver)
	}
	set(nvmlsim.FabricReady)
	f = startFixture(t)
	<-f.Looked()
	if !hasConditions(f, name) {
		t.Error("the GPU still has conditions when it is registered")
	}
}
