package nvmlsim

import (
	"embed"
	"fmt"
	"slices"
	"strings"
	"sync"

	"sigs.k8s.io/yaml"
)

//go:embed models/*.yaml
var modelFiles embed.FS

// Model describes the GPUs of one product. Sources lists the origins of the
// facts, Assumptions the facts without a source.
type Model struct {
	// ID is the name of the model in machine files, e.g. "h100-80gb".
	ID string `json:"id"`
	// ProductName as NVML prints it.
	ProductName string `json:"productName"`
	// Brand is one of GeForce, NVIDIA, NVIDIARTX, Tesla.
	Brand string `json:"brand"`
	// Architecture is one of Pascal, Volta, Turing, Ampere, Ada, Hopper, Blackwell, Orin.
	Architecture string `json:"architecture"`
	// CUDAComputeCapability is "major.minor".
	CUDAComputeCapability string `json:"cudaComputeCapability"`
	// MemoryMiB is NVML's total; MIG profile names follow from it. It is CUDA's if NVML has
	// none, because the GPU uses the computer's memory.
	MemoryMiB uint64 `json:"memoryMiB"`
	// ReservedMiB is the part of the memory that the driver reserves; 0 if it
	// wasn't measured (see ReservedBytes).
	ReservedMiB    uint64 `json:"reservedMiB,omitempty"`
	PCIDeviceID    uint32 `json:"pciDeviceID"`
	PCISubSystemID uint32 `json:"pciSubSystemID"`
	VBIOSVersion   string `json:"vbiosVersion,omitempty"`
	// BusID is the PCI address of a GPU that is part of a computer; a machine's first GPU of
	// the model has it. Empty for cards.
	BusID string `json:"busID,omitempty"`
	// BareUUID means that the UUID doesn't begin with "GPU-".
	BareUUID bool `json:"bareUUID,omitempty"`
	// Unsupported lists calls of NVML that answer NotSupported, besides those for which the
	// model has another field. Without DeviceGetPciInfo, the GPU isn't on a PCI bus.
	Unsupported []string `json:"unsupported,omitempty"`
	Engines     Engines  `json:"engines"`
	ECC         bool     `json:"ecc"`
	// Displays is true if the board has connectors for displays.
	Displays bool `json:"displays,omitempty"`
	// AddressingMode is none, HMM or ATS.
	AddressingMode      string `json:"addressingMode"`
	PowerLimitWatts     uint32 `json:"powerLimitWatts"`
	MaxPCIeGeneration   uint32 `json:"maxPCIeGeneration"`
	SupportedEventTypes uint64 `json:"supportedEventTypes"`
	// NVLink is nil if the product has none.
	NVLink *NVLinkModel `json:"nvlink,omitempty"`
	// MIG is nil if the product has none.
	MIG         *MIGModel `json:"mig,omitempty"`
	Sources     []string  `json:"sources"`
	Assumptions []string  `json:"assumptions,omitempty"`
}

// Engines are the counted units of a whole GPU.
type Engines struct {
	Multiprocessors uint32 `json:"multiprocessors"`
	Copy            uint32 `json:"copy"`
	Decoders        uint32 `json:"decoders"`
	Encoders        uint32 `json:"encoders"`
	JPEG            uint32 `json:"jpeg"`
	OFA             uint32 `json:"ofa"`
}

// MIGModel describes how a product can be divided.
type MIGModel struct {
	// MemorySlices is the number of memory slices: placements are within 0 to
	// MemorySlices.
	MemorySlices uint32 `json:"memorySlices"`
	// MaxDevices is GetMaxMigDeviceCount with the mode on.
	MaxDevices uint32 `json:"maxDevices"`
	// ModeNeedsReset means that a mode change is pending until the GPU is reset
	// (Ampere).
	ModeNeedsReset bool      `json:"modeNeedsReset"`
	Profiles       []Profile `json:"profiles"`
}

// Profile is one GPU instance profile: NVML's GpuInstanceProfileInfo, its enum
// and its possible placements.
type Profile struct {
	Name                string   `json:"name"`
	Enum                uint32   `json:"enum"`
	ID                  uint32   `json:"id"`
	SliceCount          uint32   `json:"slices"`
	InstanceCount       uint32   `json:"max"`
	MultiprocessorCount uint32   `json:"sm"`
	CopyEngineCount     uint32   `json:"ce"`
	DecoderCount        uint32   `json:"dec"`
	EncoderCount        uint32   `json:"enc"`
	JPEGCount           uint32   `json:"jpeg"`
	OFACount            uint32   `json:"ofa"`
	MemorySizeMB        uint64   `json:"memoryMB"`
	P2P                 bool     `json:"p2p,omitempty"`
	Starts              []uint32 `json:"starts"`
	// Size is in memory slices, the unit of Starts.
	Size uint32 `json:"size"`
}

// MemoryBytes is NVML's memory total, 0 if NVML has none.
func (m *Model) MemoryBytes() uint64 {
	if !m.supports(callMemoryInfo) {
		return 0
	}
	return m.MemoryMiB << 20
}

// ReservedBytes is NVML's memory reserved, 0 if NVML has none. If it wasn't measured, it
// is estimated with the H200's ratio.
func (m *Model) ReservedBytes() uint64 {
	const h200, h200Reserved = 143771, 616
	if !m.supports(callMemoryInfo) {
		return 0
	}
	if m.ReservedMiB == 0 {
		return m.MemoryMiB * h200Reserved / h200 << 20
	}
	return m.ReservedMiB << 20
}

// CUDABytes is the memory of the GPU that CUDA programs can use.
func (m *Model) CUDABytes() uint64 { return m.MemoryMiB<<20 - m.ReservedBytes() }

// Calls that models without them differ by.
const (
	callMemoryInfo = "DeviceGetMemoryInfo"
	callPCIInfo    = "DeviceGetPciInfo"
)

// supports reports whether the GPUs have a call of NVML.
func (m *Model) supports(call string) bool { return !slices.Contains(m.Unsupported, call) }

// OnPCI reports whether the GPUs are on a PCI bus.
func (m *Model) OnPCI() bool { return m.supports(callPCIInfo) }

// Models returns all known models, ordered by id.
func Models() ([]*Model, error) {
	entries, err := modelFiles.ReadDir("models")
	if err != nil {
		return nil, fmt.Errorf("read built-in models: %w", err)
	}
	models := make([]*Model, 0, len(entries))
	for _, e := range entries {
		m, err := readModel(strings.TrimSuffix(e.Name(), ".yaml"))
		if err != nil {
			return nil, err
		}
		models = append(models, m)
	}
	slices.SortFunc(models, func(a, b *Model) int { return strings.Compare(a.ID, b.ID) })
	return models, nil
}

func readModel(id string) (*Model, error) {
	if m, ok := modelsRead.Load(id); ok {
		model := m.(Model)
		return &model, nil
	}
	b, err := modelFiles.ReadFile("models/" + id + ".yaml")
	if err != nil {
		return nil, fmt.Errorf("model %q: %w", id, err)
	}
	m := new(Model)
	if err := yaml.UnmarshalStrict(b, m); err != nil {
		return nil, fmt.Errorf("built-in model %q: %w", id, err)
	}
	modelsRead.Store(id, *m)
	return m, nil
}

// modelsRead has the models that were read before, because parsing one takes as long as
// everything else that opens a machine.
var modelsRead sync.Map //nolint:gochecknoglobals // of files that never change

// FindModel returns the model with this id; the error for an unknown id lists
// all ids.
func FindModel(id string) (*Model, error) {
	entries, err := modelFiles.ReadDir("models")
	if err != nil {
		return nil, fmt.Errorf("read built-in models: %w", err)
	}
	ids := make([]string, 0, len(entries))
	for _, e := range entries {
		ids = append(ids, strings.TrimSuffix(e.Name(), ".yaml"))
	}
	if slices.Contains(ids, id) {
		return readModel(id)
	}
	return nil, fmt.Errorf("%q is not a GPU model; the models are %s", id, strings.Join(ids, ", "))
}

// The values of NVML's enumerations that models refer to by name.

// BrandType is nvmlBrandType_t.
func (m *Model) BrandType() uint32 {
	switch m.Brand {
	case "NVIDIA":
		return 14
	case "NVIDIARTX":
		return 12
	case "Tesla":
		return 2
	case "GeForce":
		return 5
	}
	return 0
}

// NVML_DEVICE_ARCH_VOLTA, NVML_DEVICE_ARCH_AMPERE and NVML_DEVICE_ARCH_HOPPER.
const (
	architectureVolta  = 5
	architectureAmpere = 7
	architectureHopper = 9
)

// ArchitectureType is nvmlDeviceArchitecture_t.
func (m *Model) ArchitectureType() uint32 {
	switch m.Architecture {
	case "Pascal":
		return 4
	case "Volta":
		return architectureVolta
	case "Turing":
		return 6
	case "Ampere":
		return architectureAmpere
	case "Ada":
		return 8
	case "Hopper":
		return architectureHopper
	case "Blackwell":
		return 10
	case "Orin": // NVML_DEVICE_ARCH_T23X
		return 11
	}
	return 0xFFFFFFFF
}

// AddressingModeType is nvmlDeviceAddressingModeType_t.
func (m *Model) AddressingModeType() uint32 {
	switch m.AddressingMode {
	case "HMM":
		return 1
	case "ATS":
		return 2
	}
	return 0
}
