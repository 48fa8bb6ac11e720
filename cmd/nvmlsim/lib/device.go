package main

/*
#include "door.h"
*/
import "C"

import (
	"runtime"
	"unsafe"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

//export simDeviceGetName
func simDeviceGetName(h C.uintptr_t, buf *C.char, n C.uint) C.int {
	return text(h, buf, n, (*nvmlsim.GPU).Name, nvmlsim.Compute.Name)
}

//export simDeviceGetUUID
func simDeviceGetUUID(h C.uintptr_t, buf *C.char, n C.uint) C.int {
	return text(h, buf, n, (*nvmlsim.GPU).UUID, nvmlsim.Compute.UUID)
}

//export simDeviceGetSerial
func simDeviceGetSerial(h C.uintptr_t, buf *C.char, n C.uint) C.int {
	return text(h, buf, n, (*nvmlsim.GPU).Serial, nil)
}

//export simDeviceGetVbiosVersion
func simDeviceGetVbiosVersion(h C.uintptr_t, buf *C.char, n C.uint) C.int {
	return text(h, buf, n, (*nvmlsim.GPU).VBIOSVersion, nil)
}

//export simDeviceGetIndex
func simDeviceGetIndex(h C.uintptr_t, out *C.uint) C.int {
	if c, mig := migDevice(h); mig {
		return put1(out, c.Index)
	}
	return number(h, out, (*nvmlsim.GPU).Index)
}

//export simDeviceGetMinorNumber
func simDeviceGetMinorNumber(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).MinorNumber)
}

//export simDeviceGetModuleId
func simDeviceGetModuleId(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).ModuleID)
}

//export simDeviceGetBoardId
func simDeviceGetBoardId(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).BoardID)
}

//export simDeviceGetBrand
func simDeviceGetBrand(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).Brand)
}

//export simDeviceGetArchitecture
func simDeviceGetArchitecture(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).Architecture)
}

//export simDeviceGetCudaComputeCapability
func simDeviceGetCudaComputeCapability(h C.uintptr_t, major, minor *C.int) C.int {
	if minor == nil {
		return code(nvmlsim.InvalidArgument)
	}
	return number(h, major, func(g *nvmlsim.GPU) (int, error) {
		v, err := g.CUDAComputeCapability()
		if err == nil {
			*minor = C.int(v[1])
		}
		return v[0], err
	})
}

//export simDeviceGetPciInfo_v2
func simDeviceGetPciInfo_v2(h C.uintptr_t, out *C.nvmlPciInfo_t) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	p, err := g.PCIInfo()
	if err != nil {
		return code(err)
	}
	*out = C.nvmlPciInfo_t{
		domain: C.uint(p.Domain), bus: C.uint(p.Bus), device: C.uint(p.Device),
		pciDeviceId: C.uint(g.Model().PCIDeviceID), pciSubSystemId: C.uint(g.Model().PCISubSystemID),
	}
	put(out.busId[:], p.BusID())
	put(out.busIdLegacy[:], p.BusIDLegacy())
	return ok
}

//export simDeviceGetPciInfo_v3
func simDeviceGetPciInfo_v3(h C.uintptr_t, out *C.nvmlPciInfo_t) C.int {
	return simDeviceGetPciInfo_v2(h, out)
}

//export simDeviceGetPciInfoExt
func simDeviceGetPciInfoExt(h C.uintptr_t, out *C.nvmlPciInfoExt_v1_t) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	if out.version != C.nvmlPciInfoExt_v1 {
		return code(nvmlsim.ArgumentVersion)
	}
	p, err := g.PCIInfo()
	if err != nil {
		return code(err)
	}
	out.domain, out.bus, out.device = C.uint(p.Domain), C.uint(p.Bus), C.uint(p.Device)
	out.pciDeviceId, out.pciSubSystemId = C.uint(g.Model().PCIDeviceID), C.uint(g.Model().PCISubSystemID)
	out.baseClass, out.subClass = 3, 2 // display controller, 3D
	put(out.busId[:], p.BusID())
	return ok
}

//export simDeviceGetMemoryInfo
func simDeviceGetMemoryInfo(h C.uintptr_t, out *C.nvmlMemory_t) C.int {
	return memory(h, out != nil, func(i nvmlsim.MemoryInfo) {
		// Unlike the second version's, its used counts what is reserved.
		out.total, out.free, out.used = C.ulonglong(i.Total), C.ulonglong(i.Free), C.ulonglong(i.Total-i.Free)
	})
}

//export simDeviceGetMemoryInfo_v2
func simDeviceGetMemoryInfo_v2(h C.uintptr_t, out *C.nvmlMemory_v2_t) C.int {
	if out != nil && out.version != C.nvmlMemory_v2 {
		return code(nvmlsim.ArgumentVersion)
	}
	return memory(h, out != nil, func(i nvmlsim.MemoryInfo) {
		out.total, out.free, out.used = C.ulonglong(i.Total), C.ulonglong(i.Free), C.ulonglong(i.Used)
		out.reserved = C.ulonglong(i.Reserved)
	})
}

func memory(h C.uintptr_t, wanted bool, put func(nvmlsim.MemoryInfo)) C.int {
	var get func() (nvmlsim.MemoryInfo, error)
	if c, mig := migDevice(h); mig {
		get = c.MemoryInfo
	} else {
		g, err := gpu(h)
		if err != nil {
			return code(err)
		}
		get = g.MemoryInfo
	}
	if !wanted {
		return code(nvmlsim.InvalidArgument)
	}
	info, err := get()
	if err != nil {
		return code(err)
	}
	put(info)
	return ok
}

//export simDeviceGetAddressingMode
func simDeviceGetAddressingMode(h C.uintptr_t, out *C.nvmlDeviceAddressingMode_v1_t) C.int {
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	if out.version != C.nvmlDeviceAddressingMode_v1 {
		return code(nvmlsim.ArgumentVersion)
	}
	return number(h, &out.value, (*nvmlsim.GPU).AddressingMode)
}

//export simDeviceGetMemoryAffinity
func simDeviceGetMemoryAffinity(h C.uintptr_t, n C.uint, set *C.ulong, _ C.uint) C.int {
	return bits(h, n, set, func(g *nvmlsim.GPU) ([]int, error) {
		node, err := g.NUMANode()
		return []int{node}, err
	})
}

//export simDeviceGetCpuAffinity
func simDeviceGetCpuAffinity(h C.uintptr_t, n C.uint, set *C.ulong) C.int {
	return bits(h, n, set, func(g *nvmlsim.GPU) ([]int, error) {
		_, err := g.NUMANode()
		cpus := make([]int, runtime.NumCPU())
		for i := range cpus {
			cpus[i] = i
		}
		return cpus, err
	})
}

//export simDeviceGetCpuAffinityWithinScope
func simDeviceGetCpuAffinityWithinScope(h C.uintptr_t, n C.uint, set *C.ulong, _ C.uint) C.int {
	return simDeviceGetCpuAffinity(h, n, set)
}

// bits fills a bit set of n words; bits that don't fit are left out.
func bits(h C.uintptr_t, n C.uint, set *C.ulong, get func(*nvmlsim.GPU) ([]int, error)) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if set == nil || n == 0 {
		return code(nvmlsim.InvalidArgument)
	}
	on, err := get(g)
	if err != nil {
		return code(err)
	}
	words := unsafe.Slice(set, n)
	clear(words)
	for _, b := range on {
		if b/64 < len(words) {
			words[b/64] |= 1 << (b % 64)
		}
	}
	return ok
}

//export simDeviceGetTopologyCommonAncestor
func simDeviceGetTopologyCommonAncestor(h1, h2 C.uintptr_t, out *C.uint) C.int {
	other, err := gpu(h2)
	if err != nil {
		return code(err)
	}
	return number(h1, out, func(g *nvmlsim.GPU) (uint32, error) { return g.CommonAncestor(other) })
}

//export simDeviceGetVirtualizationMode
func simDeviceGetVirtualizationMode(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).VirtualizationMode)
}

//export simDeviceGetPersistenceMode
func simDeviceGetPersistenceMode(h C.uintptr_t, out *C.uint) C.int {
	return flag(h, out, (*nvmlsim.GPU).PersistenceMode)
}

//export simDeviceSetPersistenceMode
func simDeviceSetPersistenceMode(h C.uintptr_t, mode C.uint) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	return code(g.SetPersistenceMode(mode != 0))
}

//export simDeviceGetComputeMode
func simDeviceGetComputeMode(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).ComputeMode)
}

//export simDeviceSetComputeMode
func simDeviceSetComputeMode(h C.uintptr_t, mode C.uint) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	return code(g.SetComputeMode(uint32(mode)))
}

//export simDeviceGetDisplayActive
func simDeviceGetDisplayActive(h C.uintptr_t, out *C.uint) C.int {
	return flag(h, out, func(g *nvmlsim.GPU) (bool, error) {
		_, err := g.Index()
		return false, err
	})
}

func pcieGeneration(g *nvmlsim.GPU) (uint32, error) {
	_, err := g.PCIInfo()
	return g.Model().MaxPCIeGeneration, err
}

func pcieWidth(g *nvmlsim.GPU) (uint32, error) {
	_, err := g.PCIInfo()
	return 16, err
}

//export simDeviceGetMaxPcieLinkGeneration
func simDeviceGetMaxPcieLinkGeneration(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, pcieGeneration)
}

//export simDeviceGetCurrPcieLinkGeneration
func simDeviceGetCurrPcieLinkGeneration(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, pcieGeneration)
}

//export simDeviceGetMaxPcieLinkWidth
func simDeviceGetMaxPcieLinkWidth(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, pcieWidth)
}

//export simDeviceGetCurrPcieLinkWidth
func simDeviceGetCurrPcieLinkWidth(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, pcieWidth)
}
