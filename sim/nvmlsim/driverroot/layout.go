package driverroot

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// entry is one path of the layout, and a function that creates or corrects it.
type entry struct {
	path string
	put  func(full string) error
}

// Majors of the character devices. 195 is NVIDIA's own; the others are dynamic
// on real machines; here they have fixed, typical values.
const (
	nvidiaMajor = 195
	uvmMajor    = 510
	capsMajor   = 509

	ctlMinor     = 255
	modesetMinor = 254
)

func file(path string, mode fs.FileMode, content []byte) entry {
	return entry{path, func(full string) error { return replace(full, content, mode) }}
}

func link(path, target string) entry {
	return entry{path, func(full string) error {
		if have, err := os.Readlink(full); err == nil && have == target {
			return nil
		}
		return swap(full, func(tmp string) error { return os.Symlink(target, tmp) })
	}}
}

// sameFile returns an entry for a second name of an existing file under the
// root: a link if it is in another file system.
func sameFile(path, root, as string) entry {
	return entry{path, func(full string) error {
		other := filepath.Join(root, as)
		have, err := os.Stat(full)
		want, wantErr := os.Stat(other)
		if err == nil && wantErr == nil && os.SameFile(have, want) {
			return nil
		}
		return swap(full, func(tmp string) error {
			err := os.Link(other, tmp)
			if !errors.Is(err, unix.EXDEV) {
				return err
			}
			target, err := filepath.Rel(realPath(filepath.Dir(full)), realPath(other))
			if err != nil {
				return err
			}
			return os.Symlink(target, tmp)
		})
	}}
}

func charDevice(path string, major, minor uint32) entry {
	return entry{path, func(full string) error { return makeNode(full, major, minor) }}
}

func makeNode(full string, major, minor uint32) error {
	const mode = 0o666
	var st unix.Stat_t
	want := unix.Mkdev(major, minor)
	if unix.Lstat(full, &st) == nil && st.Mode == unix.S_IFCHR|mode && st.Rdev == want {
		return nil
	}
	err := swap(full, func(tmp string) error {
		if err := unix.Mknod(tmp, unix.S_IFCHR|mode, int(want)); err != nil {
			return err
		}
		return os.Chmod(tmp, mode)
	})
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("make device node %d:%d: %w (device nodes need root with CAP_MKNOD, outside a user namespace)", major, minor, err)
	}
	return err
}

// layout returns all entries of the driver in the order of creation.
// libnvidia-ml.so.1 comes last, because programs wait for it.
func layout(o Options, t tree) ([]entry, error) {
	if o.Machine.WSL {
		return wslLayout(o, t)
	}
	libraries, err := libraryEntries(o, t)
	if err != nil {
		return nil, err
	}
	programs, err := programEntries(o, t)
	if err != nil {
		return nil, err
	}
	firmware, err := firmwareEntries(o, t)
	if err != nil {
		return nil, err
	}
	return slices.Concat(kernelEntries(o.Machine, t.kernel, o.Kernel != ""), programs, firmware, libraries), nil
}

// kernelEntries returns the entries of the device nodes and the kernel's files, in a
// directory below the root, which may be the machine's own.
func kernelEntries(d nvmlsim.Description, dir string, ofMachine bool) []entry {
	entries := append(deviceEntries(d), kernelLog())
	entries = append(entries, procEntries(d)...)
	entries = append(entries, paramsFile(ofMachine))
	entries = append(entries, sysEntries(d)...)
	for i := range entries {
		entries[i].path = filepath.Join(dir, entries[i].path)
	}
	return entries
}

func programEntries(o Options, t tree) ([]entry, error) {
	smi, err := smiEntry(o, t)
	if err != nil {
		return nil, err
	}
	entries := []entry{smi}
	for _, name := range []string{"nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-modprobe"} {
		entries = append(entries, sameFile(filepath.Join(t.programs, name), t.root, smi.path))
	}
	return entries, nil
}

// smiEntry returns the entry of nvidia-smi.
func smiEntry(o Options, t tree) (entry, error) {
	toRoot, err := t.relative(t.programs, "")
	if err != nil {
		return entry{}, fmt.Errorf("nvidia-smi: %w", err)
	}
	content, err := withMachine(o.SMI, toRoot, o.Machine)
	if err != nil {
		return entry{}, fmt.Errorf("nvidia-smi: %w", err)
	}
	return file(filepath.Join(t.programs, "nvidia-smi"), 0o755, content), nil
}

// firmwareEntries returns second names of the state file, with which container runtimes
// mount it.
func firmwareEntries(o Options, t tree) ([]entry, error) {
	dirs, err := t.firmwareDirs()
	if err != nil {
		return nil, fmt.Errorf("firmware: %w", err)
	}
	var entries []entry
	for _, dir := range dirs {
		entries = append(entries, sameFile(filepath.Join(dir, nvmlsim.FirmwareFile(o.Machine.DriverVersion)), t.root, nvmlsim.StateFile))
	}
	return entries, nil
}

// LibraryDir returns the default directory of the libraries under the root on this
// architecture.
func LibraryDir() string {
	if runtime.GOARCH == "arm64" {
		return "usr/lib/aarch64-linux-gnu"
	}
	return "usr/lib/x86_64-linux-gnu"
}

// nvml is the library's name.
const nvml = "libnvidia-ml.so.1"

// readLibrary reads the built library, which finds nvidia-smi where the tree has it.
func readLibrary(o Options, t tree) ([]byte, error) {
	image, err := os.ReadFile(o.Library)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nvml, err)
	}
	if err := checkLibrary(image, nvml); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", nvml, o.Library, err)
	}
	toPrograms, err := t.relative(t.libraries, t.programs)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nvml, err)
	}
	if image, err = withPrograms(image, toPrograms); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", nvml, o.Library, err)
	}
	return image, nil
}

func libraryEntries(o Options, t tree) ([]entry, error) {
	image, err := readLibrary(o, t)
	if err != nil {
		return nil, err
	}
	dir, version := t.libraries, o.Machine.DriverVersion
	var entries []entry
	// Sonames of a 580 driver; "" if the file has no link.
	for _, l := range []struct{ name, soname string }{
		{"libcuda", "libcuda.so.1"},
		{"libcudadebugger", "libcudadebugger.so.1"},
		{"libnvidia-cfg", "libnvidia-cfg.so.1"},
		{"libnvidia-gpucomp", ""},
		{"libnvidia-nvvm", "libnvidia-nvvm.so.4"},
		{"libnvidia-opencl", "libnvidia-opencl.so.1"},
		{"libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"},
	} {
		versioned := l.name + ".so." + version
		if l.soname == "" {
			entries = append(entries, file(filepath.Join(dir, versioned), 0o755, emptyLibrary(versioned)))
			continue
		}
		entries = append(entries,
			file(filepath.Join(dir, versioned), 0o755, emptyLibrary(l.soname)),
			link(filepath.Join(dir, l.soname), versioned))
	}
	return append(entries,
		link(filepath.Join(dir, "libcuda.so"), "libcuda.so.1"),
		file(filepath.Join(dir, "libnvidia-ml.so."+version), 0o755, image),
		link(filepath.Join(dir, nvml), "libnvidia-ml.so."+version)), nil
}

// withMachine returns a file's content with the description of the machine
// appended. If the file has a description already, that is removed first.
func withMachine(path, root string, d nvmlsim.Description) ([]byte, error) {
	b, err := nvmlsim.WithoutEmbedded(path)
	if err != nil {
		return nil, err
	}
	tail, err := nvmlsim.Embed(root, d)
	return append(b, tail...), err
}

func deviceEntries(d nvmlsim.Description) []entry {
	entries := []entry{
		charDevice("dev/nvidiactl", nvidiaMajor, ctlMinor),
		charDevice("dev/nvidia-modeset", nvidiaMajor, modesetMinor),
		charDevice("dev/nvidia-uvm", uvmMajor, 0),
		charDevice("dev/nvidia-uvm-tools", uvmMajor, 1),
		charDevice("dev/nvidia-caps/nvidia-cap1", capsMajor, 1),
		charDevice("dev/nvidia-caps/nvidia-cap2", capsMajor, 2),
	}
	for _, minor := range d.Minors() {
		entries = append(entries, charDevice(fmt.Sprintf("dev/nvidia%d", minor), nvidiaMajor, uint32(minor)))
	}
	return entries
}

func text(path, format string, args ...any) entry {
	return file(path, 0o444, fmt.Appendf(nil, format, args...))
}

// paramsFile returns the entry of the driver's parameters. A driver makes device files by
// default, and NVIDIA's container toolkit then mounts a file over this one in containers, which
// have it as part of /proc. They haven't here: a machine's own driver has the other setting
// (NVreg_ModifyDeviceFiles=0).
func paramsFile(ofMachine bool) entry {
	modify := 1
	if ofMachine {
		modify = 0
	}
	return text("proc/driver/nvidia/params", "ModifyDeviceFiles: %d\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n", modify)
}

func procEntries(d nvmlsim.Description) []entry {
	entries := []entry{
		devices(),
		text("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build  (nvmlsim)\n", d.DriverVersion),
		text("proc/driver/nvidia/capabilities/mig/config", capability, 1, 256),
		text("proc/driver/nvidia/capabilities/mig/monitor", capability, 2, 292),
		text("proc/driver/nvidia-caps/mig-minors", "%s", migMinors(d)),
	}
	for _, g := range d.GPUs {
		m, err := nvmlsim.FindModel(g.Model)
		if err != nil {
			continue // Describe checked it
		}
		if !m.OnPCI() {
			continue
		}
		entries = append(entries, text("proc/driver/nvidia/gpus/"+g.BusID+"/information",
			"Model: \t\t %s\nIRQ:   \t\t 0\nGPU UUID: \t %s\nVideo BIOS: \t ??.??.??.??.??\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t %s\nDevice Minor: \t %d\nGPU Excluded:\t No\n",
			m.ProductName, g.UUID, g.BusID, g.Minor))
	}
	for i, minor := range d.Minors() {
		who := d.GPUs
		if !d.MinorsMove {
			who = d.GPUs[i : i+1]
		}
		entries = append(entries, capabilityEntries(minor, who)...)
	}
	return entries
}

// capability is the format of the content of a file under
// /proc/driver/nvidia/capabilities.
const capability = "DeviceFileMinor: %d\nDeviceFileMode: %d\nDeviceFileModify: 1\n"

// migMinors returns the content of /proc/driver/nvidia-caps/mig-minors: the
// minor of each capability, for all possible instances.
func migMinors(d nvmlsim.Description) string {
	var b strings.Builder
	b.WriteString("config 1\nmonitor 2\n")
	for _, minor := range d.Minors() {
		for gi := range uint32(15) {
			for ci := range uint32(8) {
				giMinor, ciMinor := nvmlsim.CapabilityMinors(minor, gi, ci)
				if ci == 0 {
					fmt.Fprintf(&b, "gpu%d/gi%d/access %d\n", minor, gi, giMinor)
				}
				fmt.Fprintf(&b, "gpu%d/gi%d/ci%d/access %d\n", minor, gi, ci, ciMinor)
			}
		}
	}
	return b.String()
}

// capabilityEntries are the capabilities of all instances that the GPUs which may
// have the minor number could have. A real driver shows those of instances that
// exist; these are always there, so that a driver root that is mounted read-only
// is as good.
func capabilityEntries(minor int, gpus []nvmlsim.Identity) []entry {
	devices := map[uint32]uint32{} // by GPU instance
	for _, g := range gpus {
		m, err := nvmlsim.FindModel(g.Model)
		if err != nil || m.MIG == nil {
			continue
		}
		for _, gi := range m.MIG.InstanceIDs() {
			devices[gi] = max(devices[gi], m.MIG.MaxDevices)
		}
	}
	var entries []entry
	mig := fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig", minor)
	for _, gi := range slices.Sorted(maps.Keys(devices)) {
		for ci := range devices[gi] {
			giMinor, ciMinor := nvmlsim.CapabilityMinors(minor, gi, ci)
			if ci == 0 {
				entries = append(entries, text(fmt.Sprintf("%s/gi%d/access", mig, gi), capability, giMinor, 292))
			}
			entries = append(entries, text(fmt.Sprintf("%s/gi%d/ci%d/access", mig, gi, ci), capability, ciMinor, 292))
		}
	}
	return entries
}

// sysEntries returns the entries of the PCI functions in sysfs, with the facts
// that a driver and NVIDIA's tools read there: NUMA node, ids, regions, configuration space
// and, in the path of the device, the root complex.
func sysEntries(d nvmlsim.Description) []entry {
	entries := []entry{text(nvmlsim.ModuleFile, "%s\n", d.DriverVersion)}
	for n, g := range d.GPUs {
		m, err := nvmlsim.FindModel(g.Model)
		if err != nil || !m.OnPCI() {
			continue // Describe checked that there is the model
		}
		dir := filepath.Join("devices", g.PCIeRoot, strings.TrimPrefix(g.PCIeRoot, "pci")+":01.0", g.BusID)
		entries = append(entries,
			text(filepath.Join("sys", dir, "vendor"), "0x%04x\n", m.PCIDeviceID&0xFFFF),
			text(filepath.Join("sys", dir, "device"), "0x%04x\n", m.PCIDeviceID>>16),
			text(filepath.Join("sys", dir, "subsystem_vendor"), "0x%04x\n", m.PCISubSystemID&0xFFFF),
			text(filepath.Join("sys", dir, "subsystem_device"), "0x%04x\n", m.PCISubSystemID>>16),
			text(filepath.Join("sys", dir, "class"), "0x%06x\n", pciClass(m)),
			text(filepath.Join("sys", dir, "resource"), "%s", pciResources(m, n)),
			text(filepath.Join("sys", dir, "config"), "%s", pciConfig(m)),
			text(filepath.Join("sys", dir, "numa_node"), "%d\n", g.NUMANode),
			link(filepath.Join("sys/bus/pci/devices", g.BusID), filepath.Join("../../..", dir)))
	}
	return entries
}
