// Package nvmltest tests the contract of the hardware port: every implementation must
// pass Contract, which changes nothing on the GPUs, and MIGLifecycle and ComputeModes,
// which do. Contract runs on the simulator in process, on the simulator's library through
// go-nvml, and on real hardware; the others only on the simulator.
//
// Simulated is the port for tests of other packages: the production Session on
// the simulator's engine in this process, without a library.
package nvmltest

import (
	"context"
	"errors"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// Port has the methods that the driver uses of NVML.
type Port interface {
	Driver() (nvml.Driver, error)
	GPUs() ([]gpu.GPU, error)
	MIG(uuid gpu.UUID) (gpu.MIG, error)
	ComputeMode(uuid gpu.UUID) (nvml.ComputeMode, error)
	healthPort
}

type healthPort interface {
	WaitEvent(ctx context.Context) (nvml.Event, error)
	Vitals(uuid gpu.UUID) (gpu.Vitals, error)
	Usage(uuid gpu.UUID, over time.Duration) (gpu.Usage, error)
}

var (
	uuidForm       = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	pciForm        = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
	versionForm    = regexp.MustCompile(`^[0-9]+(\.[0-9]+)+$`)
	majorMinorForm = regexp.MustCompile(`^[0-9]+\.[0-9]+$`)
	// "1g.18gb", with the engines' suffixes of the MIG guide: +me, +me.all, +gfx, -me.
	profileForm = regexp.MustCompile(`^[1-8]g\.[0-9]+gb(\+me|\+me\.all|\+gfx|-me)?$`)
)

// nowhere is a UUID that no GPU has.
const nowhere = gpu.UUID("GPU-00000000-0000-0000-0000-000000000000")

// Contract checks one machine with at least one healthy GPU.
func Contract(t *testing.T, port Port) {
	t.Run("driver", func(t *testing.T) { checkDriver(t, port) })
	gpus, err := port.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	if len(gpus) == 0 {
		t.Fatal("the machine lists no GPU")
	}
	t.Run("identity", func(t *testing.T) { checkIdentity(t, gpus) })
	for _, g := range gpus {
		t.Run(string(g.UUID), func(t *testing.T) {
			checkGPU(t, g)
			checkNVLink(t, g, gpus)
			checkMIG(t, port, g)
			checkComputeMode(t, port, g)
			checkVitals(t, port, g)
			checkUsage(t, port, g)
		})
	}
	_, err = port.MIG(nowhere)
	want(t, "MIG of a GPU that isn't there", err, nvml.ErrLost)
	_, err = port.ComputeMode(nowhere)
	want(t, "compute mode of a GPU that isn't there", err, nvml.ErrLost)
	_, err = port.Vitals(nowhere)
	want(t, "vitals of a GPU that isn't there", err, nvml.ErrLost)
	_, err = port.Usage(nowhere, usageOver)
	want(t, "usage of a GPU that isn't there", err, nvml.ErrLost)
	t.Run("readers agree", func(t *testing.T) { checkReaders(t, port, gpus) })
	t.Run("waiting ends with the context", func(t *testing.T) { checkWait(t, port) })
}

func checkDriver(t *testing.T, port Port) {
	d, err := port.Driver()
	if err != nil {
		t.Fatal(err)
	}
	if !versionForm.MatchString(d.Version) {
		t.Errorf("driver version %q: not a version", d.Version)
	}
	if !majorMinorForm.MatchString(d.CUDAVersion) {
		t.Errorf("CUDA version %q: want major.minor", d.CUDAVersion)
	}
}

func checkIdentity(t *testing.T, gpus []gpu.GPU) {
	uuids, minors, pcis := map[gpu.UUID]bool{}, map[int]bool{}, map[gpu.PCIAddress]bool{}
	for i, g := range gpus {
		if g.Index != i {
			t.Errorf("GPU %d of the list has index %d", i, g.Index)
		}
		if uuids[g.UUID] || minors[g.Minor] || pcis[g.PCI] {
			t.Errorf("GPU %d shares its UUID, minor or PCI address with another", i)
		}
		uuids[g.UUID], minors[g.Minor], pcis[g.PCI] = true, true, true
	}
}

func checkGPU(t *testing.T, g gpu.GPU) {
	if !uuidForm.MatchString(string(g.UUID)) {
		t.Errorf("UUID %q: not of the form NVML prints", g.UUID)
	}
	if !pciForm.MatchString(string(g.PCI)) {
		t.Errorf("PCI address %q: not of the form sysfs prints", g.PCI)
	}
	if g.Model.ProductName == "" || g.Model.Architecture == "" || g.Model.Brand == "" {
		t.Errorf("model %+v: has an empty field", g.Model)
	}
	if !majorMinorForm.MatchString(g.Model.CUDAComputeCapability) {
		t.Errorf("compute capability %q: want major.minor", g.Model.CUDAComputeCapability)
	}
	if g.MemoryBytes < 1<<30 && g.MemoryBytes != 0 { // 0: it uses the computer's
		t.Errorf("memory %d bytes: less than a GiB", g.MemoryBytes)
	}
	if g.MemoryReservedBytes < 0 || g.MemoryReservedBytes > g.MemoryBytes/8 {
		t.Errorf("%d bytes of %d are reserved: more than an eighth", g.MemoryReservedBytes, g.MemoryBytes)
	}
	if len(g.Conditions) > 0 {
		t.Errorf("conditions %v: want a healthy GPU", g.Conditions)
	}
	if !slices.Contains([]string{"", "HMM", "ATS", "None"}, g.AddressingMode) {
		t.Errorf("addressing mode %q: want HMM, ATS, None or nothing", g.AddressingMode)
	}
	if g.MIG != nil {
		checkProfiles(t, g.MIG.Profiles, g.MemoryBytes)
	}
}

// checkNVLink checks that a domain is SwitchDomain, or is named after one of its
// GPUs and has another one.
func checkNVLink(t *testing.T, g gpu.GPU, gpus []gpu.GPU) {
	if g.NVLink == nil {
		t.Logf("%s: no NVLink, addressing mode %q", g.Model.ProductName, g.AddressingMode)
		return
	}
	l := *g.NVLink
	t.Logf("%s: %d NVLinks, domain %q, addressing mode %q", g.Model.ProductName, l.Links, l.Domain, g.AddressingMode)
	if l.Links < 1 || l.Links > gonvml.NVLINK_MAX_LINKS {
		t.Errorf("%d NVLinks: want 1 to %d", l.Links, gonvml.NVLINK_MAX_LINKS)
	}
	if l.Domain == "" || l.Domain == gpu.SwitchDomain {
		return
	}
	var members []gpu.UUID
	for _, other := range gpus {
		if other.NVLink != nil && other.NVLink.Domain == l.Domain {
			members = append(members, other.UUID)
		}
	}
	if len(members) < 2 || string(slices.Min(members)) != l.Domain {
		t.Errorf("domain %q of %v: want two members, and the UUID that sorts first", l.Domain, members)
	}
}

// NVLinks compares the number of links from the port with the simulated
// machine's.
func NVLinks(t *testing.T, port Port, machine *nvmlsim.Machine) {
	gpus, err := port.GPUs()
	must(t, err)
	for i, g := range machine.GPUs() {
		active := 0
		for link := range gonvml.NVLINK_MAX_LINKS {
			if up, err := g.NVLinkState(link); err == nil && up {
				active++
			}
		}
		got := 0
		if l := gpus[i].NVLink; l != nil {
			got = l.Links
		}
		if got != active {
			t.Errorf("GPU %d: %d NVLinks, want %d", i, got, active)
		}
	}
}

// checkMIG checks that MIG agrees with GPUs, and that its result is consistent.
func checkMIG(t *testing.T, port Port, g gpu.GPU) {
	got, err := port.MIG(g.UUID)
	if g.MIG == nil {
		want(t, "MIG of a GPU without", err, nvml.ErrNotSupported)
		return
	}
	must(t, err)
	if diff := cmp.Diff(*g.MIG, got); diff != "" {
		t.Errorf("GPUs and MIG disagree (-GPUs +MIG):\n%s", diff)
	}
	if got.Switchable && (got.Enabled != got.Pending || g.VirtualizationMode == "passthrough" || g.VirtualizationMode == "vgpu" || g.Model.Architecture == "Ampere") {
		t.Errorf("%+v of a %s GPU (virtualization %s) counts as switchable", got, g.Model.Architecture, g.VirtualizationMode)
	}
	if len(got.Instances) > 0 && !got.Enabled {
		t.Errorf("instances %+v with the mode off", got.Instances)
	}
	for i, a := range got.Instances {
		if (a.UUID == "") != (a.ComputeInstanceID == gpu.NoComputeInstance) {
			t.Errorf("instance %+v: a MIG device has both, UUID and compute instance", a)
		}
		for _, b := range got.Instances[:i] {
			if a.Placement.Overlaps(b.Placement) || a.GPUInstanceID <= b.GPUInstanceID || (a.UUID != "" && a.UUID == b.UUID) {
				t.Errorf("instances %+v and %+v: they overlap, are alike, or out of order", b, a)
			}
		}
	}
}

// checkComputeMode only reads the mode: setting it would affect other programs.
func checkComputeMode(t *testing.T, port Port, g gpu.GPU) {
	mode, err := port.ComputeMode(g.UUID)
	must(t, err)
	known := []nvml.ComputeMode{nvml.ComputeDefault, nvml.ComputeExclusiveProcess, nvml.ComputeExclusiveThread, nvml.ComputeProhibited}
	if !slices.Contains(known, mode) {
		t.Errorf("compute mode %q: want one of %q", mode, known)
	}
}

// checkVitals checks that a GPU is healthy, and which values it has.
func checkVitals(t *testing.T, port Port, g gpu.GPU) {
	v, err := port.Vitals(g.UUID)
	must(t, err)
	t.Logf("%s: vitals %+v, row remap %+v", g.Model.ProductName, v, v.RowRemap)
	if v.Recovery != gpu.RecoveryNone && v.Recovery != gpu.RecoveryUnsupported {
		t.Errorf("recovery action %q, want None", v.Recovery)
	}
	if v.RowRemap != nil && (v.RowRemap.Pending || v.RowRemap.Failed) {
		t.Errorf("row remap %+v, want neither", *v.RowRemap)
	}
	if e := v.SRAMThresholdExceeded; e != nil && *e || len(v.NVLinksDown) > 0 {
		t.Errorf("vitals %+v: want a healthy GPU", v)
	}
	if links := g.NVLink != nil && (g.MIG == nil || !g.MIG.Enabled && !g.MIG.Pending); links && len(v.NVLinksUp) == 0 {
		t.Error("the GPU has NVLinks, but none is up")
	}
	ecc := g.ECCEnabled != nil && *g.ECCEnabled
	if rows := ecc && g.MIG != nil && len(g.MIG.Instances) == 0; rows && v.RowRemap == nil {
		t.Error("the GPU remaps rows, but its row remap is unknown")
	}
}

func checkProfiles(t *testing.T, profiles []gpu.Profile, memory int64) {
	ids, names := map[int]bool{}, map[string]bool{}
	for _, p := range profiles {
		if !profileForm.MatchString(p.Name) {
			t.Errorf("profile name %q: not of the form NVIDIA prints", p.Name)
		}
		if ids[p.ID] || names[p.Name] {
			t.Errorf("profile %s (id %d): id or name listed twice", p.Name, p.ID)
		}
		ids[p.ID], names[p.Name] = true, true
		if p.MaxInstances < 1 || len(p.Placements) < p.MaxInstances {
			t.Errorf("profile %s: %d instances at most, but %d placements", p.Name, p.MaxInstances, len(p.Placements))
		}
		if p.MemoryBytes <= 0 || p.MemoryBytes > memory {
			t.Errorf("profile %s: %d bytes of the GPU's %d", p.Name, p.MemoryBytes, memory)
		}
		if p.Engines.Multiprocessors < 1 {
			t.Errorf("profile %s: no multiprocessors", p.Name)
		}
		for i, pl := range p.Placements {
			if pl.Size < 1 || pl.Start < 0 || (i > 0 && pl.Overlaps(p.Placements[i-1])) {
				t.Errorf("profile %s: placement %v is empty or overlaps the one before", p.Name, pl)
			}
		}
	}
}

// checkReaders reads from several goroutines at once, and checks that all get
// equal facts.
func checkReaders(t *testing.T, port Port, want []gpu.GPU) {
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			got, err := port.GPUs()
			if err != nil {
				t.Error(err)
				return
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("two readings differ (-first +second):\n%s", diff)
			}
		})
	}
	wg.Wait()
}

func checkWait(t *testing.T, port Port) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := port.WaitEvent(ctx)
		done <- err
	}()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) && !errors.Is(err, nvml.ErrNotSupported) {
		t.Errorf("cancelled wait: got %v, want the context's error", err)
	}
}
