package main

/*
#include "door.h"
*/
import "C"

import (
	"unsafe"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

//export simDeviceGetMigMode
func simDeviceGetMigMode(h C.uintptr_t, current, pending *C.uint) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if current == nil || pending == nil {
		return code(nvmlsim.InvalidArgument)
	}
	now, next, err := g.MIGMode()
	if err != nil {
		return code(err)
	}
	*current, *pending = C.uint(enabled(now)), C.uint(enabled(next))
	return ok
}

//export simDeviceGetMaxMigDeviceCount
func simDeviceGetMaxMigDeviceCount(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).MaxMIGDeviceCount)
}

//export simDeviceGetGpuInstanceProfileInfo
func simDeviceGetGpuInstanceProfileInfo(h C.uintptr_t, profileEnum C.uint, out *C.nvmlGpuInstanceProfileInfo_t) C.int {
	find := func(g *nvmlsim.GPU) (nvmlsim.Profile, error) { return g.ProfileByEnum(uint32(profileEnum)) }
	return profile(h, out != nil, find, func(p nvmlsim.Profile) C.int {
		*out = C.nvmlGpuInstanceProfileInfo_t{
			id: C.uint(p.ID), isP2pSupported: C.uint(enabled(p.P2P)), sliceCount: C.uint(p.SliceCount), instanceCount: C.uint(p.InstanceCount),
			multiprocessorCount: C.uint(p.MultiprocessorCount), copyEngineCount: C.uint(p.CopyEngineCount), decoderCount: C.uint(p.DecoderCount),
			encoderCount: C.uint(p.EncoderCount), jpegCount: C.uint(p.JPEGCount), ofaCount: C.uint(p.OFACount), memorySizeMB: C.ulonglong(p.MemorySizeMB),
		}
		return ok
	})
}

//export simDeviceGetGpuInstanceProfileInfoV
func simDeviceGetGpuInstanceProfileInfoV(h C.uintptr_t, profileEnum C.uint, out *C.nvmlGpuInstanceProfileInfo_v2_t) C.int {
	find := func(g *nvmlsim.GPU) (nvmlsim.Profile, error) { return g.ProfileByEnumV(uint32(profileEnum)) }
	return profile(h, out != nil, find, func(p nvmlsim.Profile) C.int { return versioned(out, p) })
}

//export simDeviceGetGpuInstanceProfileInfoByIdV
func simDeviceGetGpuInstanceProfileInfoByIdV(h C.uintptr_t, id C.uint, out *C.nvmlGpuInstanceProfileInfo_v2_t) C.int {
	find := func(g *nvmlsim.GPU) (nvmlsim.Profile, error) { return g.ProfileByID(uint32(id)) }
	return profile(h, out != nil, find, func(p nvmlsim.Profile) C.int { return versioned(out, p) })
}

func profile(h C.uintptr_t, wanted bool, find func(*nvmlsim.GPU) (nvmlsim.Profile, error), put func(nvmlsim.Profile) C.int) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if !wanted {
		return code(nvmlsim.InvalidArgument)
	}
	p, err := find(g)
	if err != nil {
		return code(err)
	}
	return put(p)
}

// versioned fills the version of the struct that the caller asked for.
func versioned(out *C.nvmlGpuInstanceProfileInfo_v2_t, p nvmlsim.Profile) C.int {
	switch out.version {
	case C.nvmlGpuInstanceProfileInfo_v2:
		*out = C.nvmlGpuInstanceProfileInfo_v2_t{
			version: out.version,
			id:      C.uint(p.ID), isP2pSupported: C.uint(enabled(p.P2P)), sliceCount: C.uint(p.SliceCount), instanceCount: C.uint(p.InstanceCount),
			multiprocessorCount: C.uint(p.MultiprocessorCount), copyEngineCount: C.uint(p.CopyEngineCount), decoderCount: C.uint(p.DecoderCount),
			encoderCount: C.uint(p.EncoderCount), jpegCount: C.uint(p.JPEGCount), ofaCount: C.uint(p.OFACount), memorySizeMB: C.ulonglong(p.MemorySizeMB),
		}
		put(out.name[:], p.Name)
	case C.nvmlGpuInstanceProfileInfo_v3:
		v3 := (*C.nvmlGpuInstanceProfileInfo_v3_t)(unsafe.Pointer(out))
		*v3 = C.nvmlGpuInstanceProfileInfo_v3_t{
			version: out.version,
			id:      C.uint(p.ID), sliceCount: C.uint(p.SliceCount), instanceCount: C.uint(p.InstanceCount),
			multiprocessorCount: C.uint(p.MultiprocessorCount), copyEngineCount: C.uint(p.CopyEngineCount), decoderCount: C.uint(p.DecoderCount),
			encoderCount: C.uint(p.EncoderCount), jpegCount: C.uint(p.JPEGCount), ofaCount: C.uint(p.OFACount), memorySizeMB: C.ulonglong(p.MemorySizeMB),
			capabilities: C.uint(p.Capabilities()),
		}
		put(v3.name[:], p.Name)
	default:
		return code(nvmlsim.ArgumentVersion)
	}
	return ok
}

//export simDeviceGetGpuInstancePossiblePlacements_v2
func simDeviceGetGpuInstancePossiblePlacements_v2(h C.uintptr_t, id C.uint, out *C.nvmlGpuInstancePlacement_t, count *C.uint) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if count == nil {
		return code(nvmlsim.InvalidArgument)
	}
	starts, size, err := g.PossiblePlacements(uint32(id))
	if err != nil {
		return code(err)
	}
	// The caller's count isn't read: by NVML's contract the array, if there is
	// one, has room for all.
	*count = C.uint(len(starts))
	if out == nil {
		return ok
	}
	for i, start := range starts {
		unsafe.Slice(out, len(starts))[i] = C.nvmlGpuInstancePlacement_t{start: C.uint(start), size: C.uint(size)}
	}
	return ok
}

//export simDeviceGetGpuInstancePossiblePlacements
func simDeviceGetGpuInstancePossiblePlacements(h C.uintptr_t, id C.uint, out *C.nvmlGpuInstancePlacement_t, count *C.uint) C.int {
	return simDeviceGetGpuInstancePossiblePlacements_v2(h, id, out, count)
}

//export simDeviceGetGpuInstanceRemainingCapacity
func simDeviceGetGpuInstanceRemainingCapacity(h C.uintptr_t, id C.uint, out *C.uint) C.int {
	return number(h, out, func(g *nvmlsim.GPU) (int, error) { return g.RemainingCapacity(uint32(id)) })
}
