package driverroot

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"strings"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// Flags of a resource, of the kernel's include/linux/ioport.h.
const (
	memory32     = 0x40200  // IORESOURCE_MEM and IORESOURCE_SIZEALIGN
	memory64     = 0x14220c // besides: 64 bits, prefetchable
	regions      = 13       // those of a PCI function that is no bridge
	registerSize = 16 << 20
	windowSize   = 32 << 20
)

// pciResources returns the file resource of a GPU in sysfs: start, end and flags of its
// regions of memory. The regions are laid out as lspci shows them for an A100, and for an
// H100 from Hopper on: registers, the GPU's memory, and a window. The addresses are those
// of the n-th GPU of a machine.
func pciResources(m *nvmlsim.Model, n int) string {
	frame := uint64(1) << bits.Len64(m.MemoryMiB<<20-1) // the next power of two
	base := uint64(0x2000_0000_0000) + uint64(n)*4*frame
	type region struct{ start, size, flags uint64 }
	layout := map[int]region{
		0: {0xb000_0000 + uint64(n)*registerSize, registerSize, memory32}, 1: {base, frame, memory64}, 3: {base + frame, windowSize, memory64},
	}
	if m.Architecture == "Hopper" || m.Architecture == "Blackwell" {
		layout = map[int]region{
			0: {base + 2*frame, registerSize, memory64}, 2: {base, frame, memory64}, 4: {base + frame, windowSize, memory64},
		}
	}
	var b strings.Builder
	for i := range regions {
		r, ok := layout[i]
		if !ok {
			b.WriteString("0x0000000000000000 0x0000000000000000 0x0000000000000000\n")
			continue
		}
		fmt.Fprintf(&b, "0x%016x 0x%016x 0x%016x\n", r.start, r.start+r.size-1, r.flags)
	}
	return b.String()
}

// pciConfig returns the configuration space of a GPU: ids, class, and a list of
// capabilities with power management only. It has none of the vendor's, by which a
// virtual GPU is known.
func pciConfig(m *nvmlsim.Model) []byte {
	const (
		size             = 4096
		memoryAndMaster  = 0x6
		capabilitiesBit  = 0x10
		revision         = 0xa1
		powerManagement  = 0x01
		capabilityOffset = 0x60
	)
	c := make([]byte, size)
	binary.LittleEndian.PutUint32(c[0x00:], m.PCIDeviceID)
	binary.LittleEndian.PutUint16(c[0x04:], memoryAndMaster)
	binary.LittleEndian.PutUint16(c[0x06:], capabilitiesBit)
	binary.LittleEndian.PutUint32(c[0x08:], pciClass(m)<<8|revision)
	binary.LittleEndian.PutUint32(c[0x2c:], m.PCISubSystemID)
	c[0x34] = capabilityOffset
	c[capabilityOffset] = powerManagement
	return c
}

// pciClass returns the class of a GPU's PCI function: a VGA controller if the board has
// connectors for displays, else a 3D controller.
func pciClass(m *nvmlsim.Model) uint32 {
	if m.Displays {
		return 0x030000
	}
	return 0x030200
}
