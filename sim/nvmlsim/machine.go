package nvmlsim

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

const (
	// DefaultDriverVersion and DefaultCUDAVersion are the versions on the host
	// from which the H200 model was read.
	DefaultDriverVersion = "580.159.04"
	DefaultCUDAVersion   = "13.0"
	// MaxGPUs is how many GPUs a machine can have.
	MaxGPUs = 128
)

// Spec declares a machine, as users write it:
//
//	driverVersion: 580.159.04
//	gpus:
//	- {model: h100-80gb, count: 8}
type Spec struct {
	// Name is the seed of UUIDs, serials and PCI addresses: machines with the same
	// name and GPUs are identical.
	Name string `json:"name,omitempty"`
	// DriverVersion is three or two dotted numbers; default DefaultDriverVersion.
	DriverVersion string `json:"driverVersion,omitempty"`
	// CUDAVersion is "major.minor"; default DefaultCUDAVersion.
	CUDAVersion string `json:"cudaVersion,omitempty"`
	// Virtualization is none (default) or passthrough.
	Virtualization string `json:"virtualization,omitempty"`
	// MinorsMove has a GPU's minor number change each time its MIG mode does, as
	// nvml.h allows (nvmlDeviceSetMigMode).
	MinorsMove bool `json:"minorsMove,omitempty"`
	// WSL makes the machine one of Windows Subsystem for Linux: its GPUs are Windows'.
	WSL  bool      `json:"wsl,omitempty"`
	GPUs []GPUSpec `json:"gpus"`
}

// GPUSpec declares Count GPUs of one model.
type GPUSpec struct {
	Model string `json:"model"`
	// Count defaults to 1.
	Count int `json:"count,omitempty"`
	// MIGEnabled is the MIG mode after booting.
	MIGEnabled bool `json:"migEnabled,omitempty"`
	// NVLink is the way in which these GPUs are linked with each other: none,
	// pairs (the first with the second, and so on), mesh or switch (NVSwitches).
	// Default: that of the model.
	NVLink string `json:"nvlink,omitempty"`
	// PCIBusIDs fixes the addresses ("0000:07:00.0", or with a domain of five to eight digits,
	// as sysfs and NVML print them), one per GPU; without it they are derived from the
	// machine's name.
	PCIBusIDs []string `json:"pciBusIDs,omitempty"`
}

// Description is a machine with its identities: all its properties that don't
// change while it runs.
type Description struct {
	Name           string     `json:"name"`
	DriverVersion  string     `json:"driverVersion"`
	CUDAVersion    string     `json:"cudaVersion"`
	Virtualization string     `json:"virtualization,omitempty"`
	MinorsMove     bool       `json:"minorsMove,omitempty"`
	WSL            bool       `json:"wsl,omitempty"`
	GPUs           []Identity `json:"gpus"`
}

// unsupported returns the calls of NVML that answer NotSupported for the machine's GPUs of a
// model. In WSL there are no device nodes and so no minor numbers: nvidia-smi's "Minor
// Number: N/A" in github.com/NVIDIA/nvidia-container-toolkit/issues/271.
func (d Description) unsupported(m *Model) []string {
	if d.WSL {
		return append(slices.Clone(m.Unsupported), "DeviceGetMinorNumber")
	}
	return m.Unsupported
}

// Minors returns the minor numbers that GPUs may have: one more than there are
// GPUs if they move.
func (d Description) Minors() []int {
	var minors []int
	for _, g := range d.GPUs {
		minors = append(minors, g.Minor)
	}
	if d.MinorsMove {
		minors = append(minors, len(minors))
	}
	return minors
}

// Identity is one GPU of a machine. GPUs are ordered by PCI address.
type Identity struct {
	Model  string `json:"model"`
	UUID   string `json:"uuid"`
	Serial string `json:"serial"`
	// BusID in the format of sysfs: "0000:07:00.0"; empty if the GPU isn't on a PCI bus.
	BusID string `json:"busID"`
	// PCIeRoot is the root complex: "pci0000:00"; empty without an address.
	PCIeRoot string `json:"pcieRoot"`
	// Minor is N of /dev/nvidiaN when the machine boots.
	Minor      int  `json:"minor"`
	NUMANode   int  `json:"numaNode"`
	ModuleID   int  `json:"moduleID"`
	MIGEnabled bool `json:"migEnabled,omitempty"`
	// NVLink is the way in which the GPUs with the same Board are linked; see
	// GPUSpec.
	NVLink string `json:"nvlink,omitempty"`
	// Board is the index of the GPU's entry in the machine file.
	Board int `json:"board,omitempty"`
}

// PCI returns the GPU's address; that of a GPU that isn't on a PCI bus is zero.
func (id Identity) PCI() PCI {
	p, _ := parseBusID(id.BusID) // Describe made it
	return p
}

// ParseSpec reads a machine declaration: YAML with known fields only, or the
// short form "8xh100-80gb" (also with × and comma-separated for several
// models). It returns only valid Specs.
func ParseSpec(text []byte) (Spec, error) {
	if short := strings.TrimSpace(string(text)); !strings.ContainsAny(short, ":\n{") {
		return parseShort(short)
	}
	b, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		return Spec{}, fmt.Errorf("machine file: %w", err)
	}
	var s Spec
	unknown, err := json.UnmarshalStrict(b, &s)
	if err := errors.Join(append(unknown, err)...); err != nil {
		return Spec{}, fmt.Errorf("machine file: %w", err)
	}
	if err := s.Validate(); err != nil {
		return Spec{}, fmt.Errorf("machine file: %w", err)
	}
	return s, nil
}

func parseShort(text string) (Spec, error) {
	form := regexp.MustCompile(`^(?:(\d{1,3})\s*[x×*]\s*)?([a-z0-9][a-z0-9-]*)$`)
	var s Spec
	for part := range strings.SplitSeq(text, ",") {
		m := form.FindStringSubmatch(strings.TrimSpace(part))
		if m == nil {
			return Spec{}, fmt.Errorf("machine %q: want COUNTxMODEL such as 8xh100-80gb, several separated by commas, or a YAML file", text)
		}
		g := GPUSpec{Model: m[2], Count: 1}
		if m[1] != "" {
			g.Count, _ = strconv.Atoi(m[1])
		}
		if g.Count == 0 {
			return Spec{}, fmt.Errorf("machine %q: count 0 of %s", text, g.Model)
		}
		s.GPUs = append(s.GPUs, g)
	}
	if err := s.Validate(); err != nil {
		return Spec{}, fmt.Errorf("machine %q: %w", text, err)
	}
	return s, nil
}

// Validate returns an error that names the first invalid field of a Spec.
func (s Spec) Validate() error {
	if s.DriverVersion != "" && !regexp.MustCompile(`^\d+\.\d+(\.\d+)?$`).MatchString(s.DriverVersion) {
		return fmt.Errorf("driverVersion: %q is not of the form %s", s.DriverVersion, DefaultDriverVersion)
	}
	if s.CUDAVersion != "" && !regexp.MustCompile(`^\d+\.\d+$`).MatchString(s.CUDAVersion) {
		return fmt.Errorf("cudaVersion: %q is not of the form %s", s.CUDAVersion, DefaultCUDAVersion)
	}
	if !slices.Contains([]string{"", "none", "passthrough"}, s.Virtualization) {
		return fmt.Errorf("virtualization: %q is neither none nor passthrough", s.Virtualization)
	}
	total := 0
	for i, g := range s.GPUs {
		if err := g.validate(); err != nil {
			return fmt.Errorf("gpus[%d].%w", i, err)
		}
		total += max(g.Count, 1)
	}
	if total > MaxGPUs {
		return fmt.Errorf("gpus: %d GPUs; a machine has at most %d", total, MaxGPUs)
	}
	return nil
}

func (g GPUSpec) validate() error {
	m, err := FindModel(g.Model)
	if err != nil {
		return fmt.Errorf("model: %w", err)
	}
	if g.Count < 0 {
		return fmt.Errorf("count: %d is negative", g.Count)
	}
	if g.MIGEnabled && m.MIG == nil {
		return fmt.Errorf("migEnabled: %s has no MIG", g.Model)
	}
	if err := g.validateNVLink(m); err != nil {
		return err
	}
	if len(g.PCIBusIDs) > 0 && !m.OnPCI() {
		return fmt.Errorf("pciBusIDs: %s isn't on a PCI bus", g.Model)
	}
	if n := len(g.PCIBusIDs); n != 0 && n != max(g.Count, 1) {
		return fmt.Errorf("pciBusIDs: %d addresses for %d GPUs", n, max(g.Count, 1))
	}
	for i, id := range g.PCIBusIDs {
		if !regexp.MustCompile(`^[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.0$`).MatchString(id) {
			return fmt.Errorf("pciBusIDs[%d]: %q is not of the form 0000:07:00.0", i, id)
		}
	}
	return nil
}

// Describe derives the identities of a machine's GPUs. name, if not empty,
// replaces the Spec's. Equal arguments give equal results; different names give
// different UUIDs, serials and addresses.
func Describe(s Spec, name string) (Description, error) {
	if err := s.Validate(); err != nil {
		return Description{}, err
	}
	d := Description{Name: s.Name, DriverVersion: s.DriverVersion, CUDAVersion: s.CUDAVersion, Virtualization: s.Virtualization, MinorsMove: s.MinorsMove, WSL: s.WSL}
	if name != "" {
		d.Name = name
	}
	if d.DriverVersion == "" {
		d.DriverVersion = DefaultDriverVersion
	}
	if d.CUDAVersion == "" {
		d.CUDAVersion = DefaultCUDAVersion
	}
	for board, g := range s.GPUs {
		m, err := FindModel(g.Model)
		if err != nil {
			return Description{}, err
		}
		for i := range max(g.Count, 1) {
			id := Identity{Model: g.Model, MIGEnabled: g.MIGEnabled, NVLink: g.topology(m), Board: board}
			id.BusID = g.busID(i, m, d.GPUs)
			d.GPUs = append(d.GPUs, id)
		}
	}
	if err := identify(&d); err != nil {
		return Description{}, err
	}
	for i := 1; i < len(d.GPUs); i++ {
		if d.GPUs[i].BusID == d.GPUs[i-1].BusID && d.GPUs[i].BusID != "" {
			return Description{}, fmt.Errorf("pciBusIDs: %s is listed twice", d.GPUs[i].BusID)
		}
	}
	return d, nil
}

// busID returns the fixed address of the i-th GPU, in the format of sysfs: that of the machine
// file, or that of the model for the first one after those before. Empty if there is none.
func (g GPUSpec) busID(i int, m *Model, before []Identity) string {
	if g.PCIBusIDs != nil {
		p, _ := parseBusID(g.PCIBusIDs[i]) // validated
		return p.sysfs()
	}
	if slices.ContainsFunc(before, func(other Identity) bool { return other.Model == g.Model }) {
		return ""
	}
	return m.BusID
}

// identify sets the fields that are derived from the machine's name and the
// GPU's position.
func identify(d *Description) error {
	n := len(d.GPUs)
	for i := range d.GPUs {
		g := &d.GPUs[i]
		m, err := FindModel(g.Model)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d/%s", d.Name, i, g.Model))
		g.UUID = uuidText(sum[:16])
		if !m.BareUUID {
			g.UUID = "GPU-" + g.UUID
		}
		g.Serial = fmt.Sprintf("165%010d", binary.BigEndian.Uint64(sum[16:24])%1e10)
		if g.BusID == "" && m.OnPCI() {
			// Buses 0x10 to 0xcf in ascending order, so that the order of declaration is
			// the order of indexes.
			stride := 0xc0 / n
			g.BusID = fmt.Sprintf("0000:%02x:00.0", 0x10+i*stride+int(sum[24])%max(stride-1, 1))
		}
	}
	slices.SortStableFunc(d.GPUs, func(a, b Identity) int { return a.PCI().compare(b.PCI()) })
	for i := range d.GPUs {
		g := &d.GPUs[i]
		g.Minor, g.ModuleID = i, i+1
		if n > 1 {
			g.NUMANode = i * 2 / n
		}
		if g.BusID == "" {
			continue
		}
		// Two GPUs share a root complex, as they share a switch on HGX boards.
		first := d.GPUs[i&^1].PCI()
		g.PCIeRoot = fmt.Sprintf("pci%04x:%02x", g.PCI().Domain, max(first.Bus, 1)-1)
	}
	return nil
}

// uuidText formats 16 bytes as a random-looking UUID (version 4 layout).
func uuidText(b []byte) string {
	u := slices.Clone(b)
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80
	h := hex.EncodeToString(u)
	return strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}

// CUDADriverVersion is nvmlSystemGetCudaDriverVersion: 1000*major + 10*minor.
func (d Description) CUDADriverVersion() int {
	major, minor, _ := strings.Cut(d.CUDAVersion, ".")
	a, _ := strconv.Atoi(major)
	b, _ := strconv.Atoi(minor)
	return 1000*a + 10*b
}
