package nvmlsim_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// probe holds data that was read from a real GPU.
type probe struct {
	Facts    map[string]any `json:"facts"`
	Profiles []struct {
		ID, IsP2pSupported, SliceCount, InstanceCount, MultiprocessorCount, CopyEngineCount uint32
		DecoderCount, EncoderCount, JpegCount, OfaCount, MemorySizeMB, Enum                 uint32
		Name                                                                                string
	} `json:"gpuInstanceProfiles"`
	Placements map[string]struct {
		Starts []uint32
		Size   uint32
	} `json:"placements"`
	OtherEnums struct {
		NotSupported []uint32 `json:"NOT_SUPPORTED"`
	} `json:"otherEnums"`
}

func readProbe(t *testing.T) probe {
	t.Helper()
	b, err := os.ReadFile("testdata/h200-nvml.json")
	if err != nil {
		t.Fatal(err)
	}
	var p probe
	if err := json.Unmarshal(b, &p); err != nil {
		t.Fatal(err)
	}
	return p
}

// h200 declares the machine on which the probe was read.
const h200 = `
driverVersion: 580.159.04
cudaVersion: "13.0"
virtualization: passthrough
gpus:
- {model: h200, pciBusIDs: ["0000:00:06.0"]}
`

func TestH200AnswersWhatARealOneDid(t *testing.T) {
	want := readProbe(t)
	g := create(t, h200).GPUs()[0]

	current, pending, err := g.MIGMode()
	check(t, err)
	capability := get(t, g.CUDAComputeCapability)
	memory := get(t, g.MemoryInfo)
	got := map[string]any{
		"productName":                       get(t, g.Name),
		"brand":                             number(get(t, g.Brand)),
		"architecture":                      number(get(t, g.Architecture)),
		"minorNumber":                       number(get(t, g.MinorNumber)),
		"migModeCurrent":                    flag(current),
		"migModePending":                    flag(pending),
		"maxMigDeviceCountWhileMigDisabled": number(get(t, g.MaxMIGDeviceCount)),
		"computeMode":                       number(get(t, g.ComputeMode)),
		"persistenceMode":                   flag(get(t, g.PersistenceMode)),
		"cudaComputeCapability":             fmt.Sprintf("%d.%d", capability[0], capability[1]),
		"vbiosVersion":                      get(t, g.VBIOSVersion),
		"supportedEventTypes":               number(get(t, g.SupportedEventTypes)),
		"addressingMode":                    number(get(t, g.AddressingMode)),
		"virtualizationMode":                number(get(t, g.VirtualizationMode)),
		"pciBusId":                          get(t, g.PCIInfo).BusID(),
		"pciDeviceId":                       fmt.Sprintf("0x%08X", g.Model().PCIDeviceID),
		"pciSubSystemId":                    fmt.Sprintf("0x%08X", g.Model().PCISubSystemID),
		"memoryTotalBytes":                  number(memory.Total),
		"memoryTotalSmiMiB":                 number(memory.Total >> 20),
	}
	want.Facts["pciDeviceId"] = "0x233510DE"
	if diff := cmp.Diff(want.Facts, got); diff != "" {
		t.Errorf("facts (-real +simulated):\n%s", diff)
	}
}

func TestH200ProfilesAreThoseOfARealOne(t *testing.T) {
	want := readProbe(t)
	g := create(t, h200).GPUs()[0]
	seen := map[uint32]bool{}
	for _, w := range want.Profiles {
		seen[w.Enum] = true
		p, err := g.ProfileByEnum(w.Enum)
		check(t, err)
		wantProfile := nvmlsim.Profile{
			Name: w.Name, Enum: w.Enum, ID: w.ID, SliceCount: w.SliceCount, InstanceCount: w.InstanceCount, MultiprocessorCount: w.MultiprocessorCount,
			CopyEngineCount: w.CopyEngineCount, DecoderCount: w.DecoderCount, EncoderCount: w.EncoderCount, JPEGCount: w.JpegCount, OFACount: w.OfaCount,
			MemorySizeMB: uint64(w.MemorySizeMB), P2P: w.IsP2pSupported != 0, Starts: want.Placements[w.Name].Starts, Size: want.Placements[w.Name].Size,
		}
		if diff := cmp.Diff(wantProfile, p); diff != "" {
			t.Errorf("%s (-real +simulated):\n%s", w.Name, diff)
		}
		starts, size, err := g.PossiblePlacements(w.ID)
		check(t, err)
		if diff := cmp.Diff(want.Placements[w.Name], struct {
			Starts []uint32
			Size   uint32
		}{starts, size}); diff != "" {
			t.Errorf("placements of %s (-real +simulated):\n%s", w.Name, diff)
		}
	}
	for _, enum := range want.OtherEnums.NotSupported {
		seen[enum] = true
		if _, err := g.ProfileByEnum(enum); err != nvmlsim.NotSupported {
			t.Errorf("enum %d: %v, want Not Supported", enum, err)
		}
	}
	for enum := range uint32(30) {
		if _, err := g.ProfileByEnum(enum); !seen[enum] && err != nvmlsim.InvalidArgument {
			t.Errorf("enum %d: %v, want Invalid Argument", enum, err)
		}
	}
}

// Programs derive profile names from memory sizes, by a rule of go-nvlib. The
// tables must agree with that rule.
func TestProfileNamesFollowFromMemory(t *testing.T) {
	for _, m := range models(t) {
		if m.MIG == nil {
			continue
		}
		for _, p := range m.MIG.Profiles {
			total := float64(m.MemoryMiB)
			eighths := math.Ceil(8 * float64(p.MemorySizeMB) / total)
			gb := math.Round(eighths / 8 * math.Ceil(total/1024))
			if want := fmt.Sprintf("%dg.%dgb", p.SliceCount, int(gb)); len(p.Name) < len(want) || p.Name[:len(want)] != want {
				t.Errorf("%s: profile %s would be called %s", m.ID, p.Name, want)
			}
		}
	}
}

func TestModelsAreConsistent(t *testing.T) {
	for _, m := range models(t) {
		if len(m.Sources) == 0 {
			t.Errorf("%s: no source", m.ID)
		}
		if m.BrandType() == 0 || m.ArchitectureType() > 11 {
			t.Errorf("%s: brand %q, architecture %q", m.ID, m.Brand, m.Architecture)
		}
		if m.MIG == nil {
			continue
		}
		ids, enums := map[uint32]bool{}, map[uint32]bool{}
		for _, p := range m.MIG.Profiles {
			if ids[p.ID] || enums[p.Enum] {
				t.Errorf("%s: %s: id %d or enum %d is there twice", m.ID, p.Name, p.ID, p.Enum)
			}
			ids[p.ID], enums[p.Enum] = true, true
			for _, start := range p.Starts {
				if start+p.Size > m.MIG.MemorySlices {
					t.Errorf("%s: %s at %d leaves the GPU", m.ID, p.Name, start)
				}
			}
			if p.MultiprocessorCount > m.Engines.Multiprocessors || p.DecoderCount > m.Engines.Decoders || p.JPEGCount > m.Engines.JPEG || p.OFACount > m.Engines.OFA {
				t.Errorf("%s: %s has more than the GPU", m.ID, p.Name)
			}
		}
	}
}

func models(t *testing.T) []*nvmlsim.Model {
	t.Helper()
	all, err := nvmlsim.Models()
	check(t, err)
	if len(all) != 32 {
		t.Errorf("%d models, want 32", len(all))
	}
	return all
}

// create creates a machine and opens it.
func create(t *testing.T, machine string) *nvmlsim.Machine {
	t.Helper()
	return createAt(t, filepath.Join(t.TempDir(), "state"), machine)
}

func createAt(t *testing.T, path, machine string) *nvmlsim.Machine {
	t.Helper()
	spec, err := nvmlsim.ParseSpec([]byte(machine))
	check(t, err)
	d, err := nvmlsim.Describe(spec, "node-a")
	check(t, err)
	m, err := nvmlsim.Create(path, d)
	check(t, err)
	t.Cleanup(func() { check(t, m.Close()) })
	return m
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func get[T any](t *testing.T, f func() (T, error)) T {
	t.Helper()
	v, err := f()
	check(t, err)
	return v
}

func number[T int | uint32 | uint64](v T) float64 { return float64(v) }

func flag(on bool) float64 {
	if on {
		return 1
	}
	return 0
}
