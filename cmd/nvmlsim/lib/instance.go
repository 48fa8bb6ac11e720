package main

/*
#include "door.h"
*/
import "C"

import (
	"unsafe"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

//export simDeviceSetMigMode
func simDeviceSetMigMode(h C.uintptr_t, mode C.uint, activation *C.int) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if activation == nil || mode > 1 {
		return code(nvmlsim.InvalidArgument)
	}
	a, err := g.SetMIGMode(mode == 1)
	if err != nil {
		return code(err)
	}
	*activation = C.int(a)
	return ok
}

//export simDeviceIsMigDeviceHandle
func simDeviceIsMigDeviceHandle(h C.uintptr_t, out *C.uint) C.int {
	if _, mig := migDevice(h); mig {
		return put1(out, func() (int, error) { return 1, nil })
	}
	return flag(h, out, func(*nvmlsim.GPU) (bool, error) { return false, nil })
}

//export simDeviceGetMigDeviceHandleByIndex
func simDeviceGetMigDeviceHandleByIndex(h C.uintptr_t, index C.uint, out *unsafe.Pointer) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	c, err := g.MIGDevice(int(index))
	return give(out, device{c}, err)
}

//export simDeviceGetDeviceHandleFromMigDeviceHandle
func simDeviceGetDeviceHandleFromMigDeviceHandle(h C.uintptr_t, out *unsafe.Pointer) C.int {
	d, err := object[device](h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	return handle(out, d.Instance().GPU(), nil)
}

//export simDeviceGetGpuInstanceId
func simDeviceGetGpuInstanceId(h C.uintptr_t, out *C.uint) C.int {
	d, err := object[device](h)
	if err != nil {
		return code(err)
	}
	return put1(out, d.GPUInstanceID)
}

//export simDeviceGetComputeInstanceId
func simDeviceGetComputeInstanceId(h C.uintptr_t, out *C.uint) C.int {
	d, err := object[device](h)
	if err != nil {
		return code(err)
	}
	return put1(out, d.ComputeInstanceID)
}

//export simDeviceGetAttributes_v2
func simDeviceGetAttributes_v2(h C.uintptr_t, out *C.nvmlDeviceAttributes_t) C.int {
	d, err := object[device](h)
	if err != nil {
		return code(err) // only MIG devices have attributes
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	p, c, err := d.Attributes()
	if err != nil {
		return code(err)
	}
	*out = C.nvmlDeviceAttributes_t{
		multiprocessorCount: C.uint(c.MultiprocessorCount), sharedCopyEngineCount: C.uint(p.CopyEngineCount), sharedDecoderCount: C.uint(p.DecoderCount),
		sharedEncoderCount: C.uint(p.EncoderCount), sharedJpegCount: C.uint(p.JPEGCount), sharedOfaCount: C.uint(p.OFACount),
		gpuInstanceSliceCount: C.uint(p.SliceCount), computeInstanceSliceCount: C.uint(c.SliceCount), memorySizeMB: C.ulonglong(p.MemorySizeMB),
	}
	return ok
}

//export simDeviceCreateGpuInstance
func simDeviceCreateGpuInstance(h C.uintptr_t, profileID C.uint, out *unsafe.Pointer) C.int {
	return createInstance(h, profileID, nil, out)
}

//export simDeviceCreateGpuInstanceWithPlacement
func simDeviceCreateGpuInstanceWithPlacement(h C.uintptr_t, profileID C.uint, at *C.nvmlGpuInstancePlacement_t, out *unsafe.Pointer) C.int {
	if at == nil {
		return code(nvmlsim.InvalidArgument)
	}
	start := uint32(at.start)
	return createInstance(h, profileID, &start, out)
}

func createInstance(h C.uintptr_t, profileID C.uint, start *uint32, out *unsafe.Pointer) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	i, err := g.CreateInstance(uint32(profileID), start)
	return give(out, i, err)
}

//export simGpuInstanceDestroy
func simGpuInstanceDestroy(h C.uintptr_t) C.int {
	i, err := object[nvmlsim.Instance](h)
	if err == nil {
		if err = i.Destroy(); err == nil {
			lib.objects.forget(i)
		}
	}
	return code(err)
}

//export simDeviceGetGpuInstances
func simDeviceGetGpuInstances(h C.uintptr_t, profileID C.uint, out *unsafe.Pointer, count *C.uint) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	all, err := g.Instances(uint32(profileID))
	return giveAll(out, count, all, err)
}

//export simDeviceGetGpuInstanceById
func simDeviceGetGpuInstanceById(h C.uintptr_t, id C.uint, out *unsafe.Pointer) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	i, err := g.InstanceByID(uint32(id))
	return give(out, i, err)
}

//export simGpuInstanceGetInfo
func simGpuInstanceGetInfo(h C.uintptr_t, out *C.nvmlGpuInstanceInfo_t) C.int {
	i, err := object[nvmlsim.Instance](h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	info, err := i.Info()
	if err != nil {
		return code(err)
	}
	*(*unsafe.Pointer)(unsafe.Pointer(&out.device)) = C.gpu_handle(C.int(i.GPU().Position()))
	out.id, out.profileId = C.uint(info.ID), C.uint(info.Profile)
	out.placement = C.nvmlGpuInstancePlacement_t{start: C.uint(info.Start), size: C.uint(info.Size)}
	return ok
}

//export simGpuInstanceGetComputeInstanceProfileInfo
func simGpuInstanceGetComputeInstanceProfileInfo(h C.uintptr_t, profileEnum, engine C.uint, out *C.nvmlComputeInstanceProfileInfo_t) C.int {
	return computeProfile(h, profileEnum, engine, out != nil, func(p nvmlsim.ComputeProfile) C.int {
		*out = C.nvmlComputeInstanceProfileInfo_t{
			id: C.uint(p.ID), sliceCount: C.uint(p.SliceCount), instanceCount: C.uint(p.InstanceCount), multiprocessorCount: C.uint(p.MultiprocessorCount),
			sharedCopyEngineCount: C.uint(p.Parent.CopyEngineCount), sharedDecoderCount: C.uint(p.Parent.DecoderCount),
			sharedEncoderCount: C.uint(p.Parent.EncoderCount), sharedJpegCount: C.uint(p.Parent.JPEGCount), sharedOfaCount: C.uint(p.Parent.OFACount),
		}
		return ok
	})
}

//export simGpuInstanceGetComputeInstanceProfileInfoV
func simGpuInstanceGetComputeInstanceProfileInfoV(h C.uintptr_t, profileEnum, engine C.uint, out *C.nvmlComputeInstanceProfileInfo_v2_t) C.int {
	return computeProfile(h, profileEnum, engine, out != nil, func(p nvmlsim.ComputeProfile) C.int {
		// Versions 2 and 3 are laid out alike but for what 3 has at its end.
		if out.version != C.nvmlComputeInstanceProfileInfo_v2 && out.version != C.nvmlComputeInstanceProfileInfo_v3 {
			return code(nvmlsim.ArgumentVersion)
		}
		out.id, out.sliceCount, out.instanceCount, out.multiprocessorCount = C.uint(p.ID), C.uint(p.SliceCount), C.uint(p.InstanceCount), C.uint(p.MultiprocessorCount)
		out.sharedCopyEngineCount, out.sharedDecoderCount = C.uint(p.Parent.CopyEngineCount), C.uint(p.Parent.DecoderCount)
		out.sharedEncoderCount, out.sharedJpegCount, out.sharedOfaCount = C.uint(p.Parent.EncoderCount), C.uint(p.Parent.JPEGCount), C.uint(p.Parent.OFACount)
		put(out.name[:], p.Name())
		if out.version == C.nvmlComputeInstanceProfileInfo_v3 {
			v3 := (*C.nvmlComputeInstanceProfileInfo_v3_t)(unsafe.Pointer(out))
			v3.capabilities = C.uint(p.Parent.Capabilities() >> 1) // graphics is the lowest bit here
		}
		return ok
	})
}

func computeProfile(h C.uintptr_t, profileEnum, engine C.uint, wanted bool, fill func(nvmlsim.ComputeProfile) C.int) C.int {
	i, err := object[nvmlsim.Instance](h)
	if err != nil {
		return code(err)
	}
	if !wanted || engine != C.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED {
		return code(nvmlsim.InvalidArgument)
	}
	p, err := i.ComputeProfile(uint32(profileEnum))
	if err != nil {
		return code(err)
	}
	return fill(p)
}

//export simGpuInstanceGetComputeInstanceRemainingCapacity
func simGpuInstanceGetComputeInstanceRemainingCapacity(h C.uintptr_t, profileID C.uint, out *C.uint) C.int {
	i, err := object[nvmlsim.Instance](h)
	if err != nil {
		return code(err)
	}
	return put1(out, func() (int, error) { return i.ComputeCapacity(uint32(profileID)) })
}

//export simGpuInstanceGetComputeInstancePossiblePlacements
func simGpuInstanceGetComputeInstancePossiblePlacements(h C.uintptr_t, profileID C.uint, out *C.nvmlComputeInstancePlacement_t, count *C.uint) C.int {
	i, err := object[nvmlsim.Instance](h)
	if err != nil {
		return code(err)
	}
	if count == nil {
		return code(nvmlsim.InvalidArgument)
	}
	starts, size, err := i.ComputePlacements(uint32(profileID))
	if err != nil {
		return code(err)
	}
	*count = C.uint(len(starts))
	if out == nil {
		return ok
	}
	for n, start := range starts {
		unsafe.Slice(out, len(starts))[n] = C.nvmlComputeInstancePlacement_t{start: C.uint(start), size: C.uint(size)}
	}
	return ok
}

//export simGpuInstanceCreateComputeInstance
func simGpuInstanceCreateComputeInstance(h C.uintptr_t, profileID C.uint, out *unsafe.Pointer) C.int {
	return createCompute(h, profileID, nil, out)
}

//export simGpuInstanceCreateComputeInstanceWithPlacement
func simGpuInstanceCreateComputeInstanceWithPlacement(h C.uintptr_t, profileID C.uint, at *C.nvmlComputeInstancePlacement_t, out *unsafe.Pointer) C.int {
	if at == nil {
		return code(nvmlsim.InvalidArgument)
	}
	start := uint32(at.start)
	return createCompute(h, profileID, &start, out)
}

func createCompute(h C.uintptr_t, profileID C.uint, start *uint32, out *unsafe.Pointer) C.int {
	i, err := object[nvmlsim.Instance](h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	c, err := i.CreateCompute(uint32(profileID), start)
	return give(out, c, err)
}

//export simComputeInstanceDestroy
func simComputeInstanceDestroy(h C.uintptr_t) C.int {
	c, err := object[nvmlsim.Compute](h)
	if err == nil {
		if err = c.Destroy(); err == nil {
			lib.objects.forget(c)
			lib.objects.forget(device{c})
		}
	}
	return code(err)
}

//export simGpuInstanceGetComputeInstances
func simGpuInstanceGetComputeInstances(h C.uintptr_t, profileID C.uint, out *unsafe.Pointer, count *C.uint) C.int {
	i, err := object[nvmlsim.Instance](h)
	if err != nil {
		return code(err)
	}
	all, err := i.Computes(uint32(profileID))
	return giveAll(out, count, all, err)
}

//export simGpuInstanceGetComputeInstanceById
func simGpuInstanceGetComputeInstanceById(h C.uintptr_t, id C.uint, out *unsafe.Pointer) C.int {
	i, err := object[nvmlsim.Instance](h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	c, err := i.ComputeByID(uint32(id))
	return give(out, c, err)
}

//export simComputeInstanceGetInfo_v2
func simComputeInstanceGetInfo_v2(h C.uintptr_t, out *C.nvmlComputeInstanceInfo_t) C.int {
	c, err := object[nvmlsim.Compute](h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	info, err := c.Info()
	if err != nil {
		return code(err)
	}
	// The device is the parent GPU, as nvml.h says.
	*(*unsafe.Pointer)(unsafe.Pointer(&out.device)) = C.gpu_handle(C.int(c.Instance().GPU().Position()))
	*(*unsafe.Pointer)(unsafe.Pointer(&out.gpuInstance)) = lib.objects.handle(c.Instance())
	out.id, out.profileId = C.uint(info.ID), C.uint(info.Profile)
	out.placement = C.nvmlComputeInstancePlacement_t{start: C.uint(info.Start), size: C.uint(info.Size)}
	return ok
}
