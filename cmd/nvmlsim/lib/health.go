package main

/*
#include "door.h"
*/
import "C"

import (
	"context"
	"time"
	"unsafe"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

//export simDeviceGetEccMode
func simDeviceGetEccMode(h C.uintptr_t, current, pending *C.uint) C.int {
	if pending == nil {
		return code(nvmlsim.InvalidArgument)
	}
	r := flag(h, current, (*nvmlsim.GPU).ECCMode)
	if r == ok {
		*pending = *current
	}
	return r
}

//export simDeviceGetTotalEccErrors
func simDeviceGetTotalEccErrors(h C.uintptr_t, errorType, counter C.uint, out *C.ulonglong) C.int {
	return number(h, out, func(g *nvmlsim.GPU) (uint64, error) {
		_, err := g.ECCMode()
		return 0, err
	})
}

//export simDeviceGetTemperature
func simDeviceGetTemperature(h C.uintptr_t, sensor C.uint, out *C.uint) C.int {
	if sensor != C.NVML_TEMPERATURE_GPU {
		return code(nvmlsim.InvalidArgument)
	}
	return number(h, out, (*nvmlsim.GPU).Temperature)
}

//export simDeviceGetTemperatureV
func simDeviceGetTemperatureV(h C.uintptr_t, out *C.nvmlTemperature_v1_t) C.int {
	if out == nil || out.sensorType != C.NVML_TEMPERATURE_GPU {
		return code(nvmlsim.InvalidArgument)
	}
	if out.version != C.nvmlTemperature_v1 {
		return code(nvmlsim.ArgumentVersion)
	}
	return number(h, &out.temperature, (*nvmlsim.GPU).Temperature)
}

//export simDeviceGetPowerUsage
func simDeviceGetPowerUsage(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).PowerUsage)
}

//export simDeviceGetEnforcedPowerLimit
func simDeviceGetEnforcedPowerLimit(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).PowerLimit)
}

//export simDeviceGetPowerManagementLimit
func simDeviceGetPowerManagementLimit(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, (*nvmlsim.GPU).PowerLimit)
}

//export simDeviceGetPerformanceState
func simDeviceGetPerformanceState(h C.uintptr_t, out *C.uint) C.int {
	return number(h, out, func(g *nvmlsim.GPU) (uint32, error) {
		_, err := g.PowerUsage()
		return 0, err
	})
}

//export simDeviceGetUtilizationRates
func simDeviceGetUtilizationRates(h C.uintptr_t, out *C.nvmlUtilization_t) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	if _, err := g.PowerUsage(); err != nil {
		return code(err)
	}
	*out = C.nvmlUtilization_t{}
	return ok
}

//export simDeviceGetRemappedRows
func simDeviceGetRemappedRows(h C.uintptr_t, correctable, uncorrectable, pending, failed *C.uint) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if correctable == nil || uncorrectable == nil || pending == nil || failed == nil {
		return code(nvmlsim.InvalidArgument)
	}
	r, err := g.RemappedRows()
	if err != nil {
		return code(err)
	}
	*correctable, *uncorrectable = C.uint(r.Correctable), C.uint(r.Uncorrectable)
	*pending, *failed = C.uint(enabled(r.Pending)), C.uint(enabled(r.Failed))
	return ok
}

//export simDeviceGetFieldValues
func simDeviceGetFieldValues(h C.uintptr_t, n C.int, values *C.nvmlFieldValue_t) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if n <= 0 || values == nil {
		return code(nvmlsim.InvalidArgument)
	}
	now := C.longlong(time.Now().UnixMicro())
	for i := range unsafe.Slice(values, n) {
		v := &unsafe.Slice(values, n)[i]
		x, err := field(g, uint32(v.fieldId))
		v.timestamp, v.latencyUsec = now, 0
		v.valueType = C.NVML_VALUE_TYPE_UNSIGNED_INT
		v.nvmlReturn = C.nvmlReturn_t(nvmlsim.Code(err))
		*(*C.ulonglong)(unsafe.Pointer(&v.value)) = C.ulonglong(x)
		if nvmlsim.Code(err) == nvmlsim.GPUIsLost {
			return code(err)
		}
	}
	return ok
}

// field is one NVML_FI_* value.
func field(g *nvmlsim.GPU, id uint32) (uint32, error) {
	switch id {
	case C.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
		return g.RecoveryAction()
	case C.NVML_FI_DEV_ECC_CURRENT, C.NVML_FI_DEV_ECC_PENDING:
		on, err := g.ECCMode()
		return enabled(on), err
	case C.NVML_FI_DEV_REMAPPED_COR, C.NVML_FI_DEV_REMAPPED_UNC, C.NVML_FI_DEV_REMAPPED_PENDING, C.NVML_FI_DEV_REMAPPED_FAILURE:
		r, err := g.RemappedRows()
		all := [...]uint32{r.Correctable, r.Uncorrectable, enabled(r.Pending), enabled(r.Failed)}
		return all[id-C.NVML_FI_DEV_REMAPPED_COR], err
	case C.NVML_FI_DEV_MEMORY_TEMP:
		return g.Temperature()
	}
	return 0, nvmlsim.NotSupported
}

//export simDeviceGetComputeRunningProcesses
func simDeviceGetComputeRunningProcesses(h C.uintptr_t, count *C.uint, infos *C.nvmlProcessInfo_v1_t) C.int {
	return processes(h, count, infos, func(p nvmlsim.Process) C.nvmlProcessInfo_v1_t {
		return C.nvmlProcessInfo_v1_t{pid: C.uint(p.PID), usedGpuMemory: C.ulonglong(p.UsedMemory)}
	})
}

//export simDeviceGetComputeRunningProcesses_v3
func simDeviceGetComputeRunningProcesses_v3(h C.uintptr_t, count *C.uint, infos *C.nvmlProcessInfo_t) C.int {
	return processes(h, count, infos, func(p nvmlsim.Process) C.nvmlProcessInfo_t {
		return C.nvmlProcessInfo_t{
			pid: C.uint(p.PID), usedGpuMemory: C.ulonglong(p.UsedMemory),
			gpuInstanceId: C.uint(p.GPUInstance), computeInstanceId: C.uint(p.ComputeInstance),
		}
	})
}

func processes[T any](h C.uintptr_t, count *C.uint, infos *T, convert func(nvmlsim.Process) T) C.int {
	list, err := processLister(h)
	if err != nil {
		return code(err)
	}
	if count == nil {
		return code(nvmlsim.InvalidArgument)
	}
	all, err := list()
	if err != nil {
		return code(err)
	}
	room := int(*count)
	*count = C.uint(len(all))
	if room < len(all) {
		return code(nvmlsim.InsufficientSize)
	}
	if infos == nil && len(all) > 0 {
		return code(nvmlsim.InvalidArgument)
	}
	for i, p := range all {
		unsafe.Slice(infos, room)[i] = convert(p)
	}
	return ok
}

// processLister is the GPU's list, or the MIG device's.
func processLister(h C.uintptr_t) (func() ([]nvmlsim.Process, error), error) {
	if c, ok := migDevice(h); ok {
		return c.Processes, nil
	}
	g, err := gpu(h)
	if err != nil {
		return nil, err
	}
	return g.Processes, nil
}

//export simDeviceGetGraphicsRunningProcesses_v3
func simDeviceGetGraphicsRunningProcesses_v3(h C.uintptr_t, count *C.uint, _ unsafe.Pointer) C.int {
	list, err := processLister(h)
	if err != nil {
		return code(err)
	}
	return put1(count, func() (int, error) {
		_, err := list()
		return 0, err
	})
}

//export simDeviceGetSupportedEventTypes
func simDeviceGetSupportedEventTypes(h C.uintptr_t, out *C.ulonglong) C.int {
	return number(h, out, (*nvmlsim.GPU).SupportedEventTypes)
}

//export simEventSetCreate
func simEventSetCreate(out *unsafe.Pointer) C.int {
	s := lib.open.Load()
	if s == nil {
		return code(nvmlsim.Uninitialized)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	set, err := s.machine.NewEventSet()
	if err != nil {
		return code(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.sets {
		if s.sets[i] == nil {
			s.sets[i] = set
			*out = C.set_handle(C.int(i))
			return ok
		}
	}
	return code(nvmlsim.Memory)
}

// eventSet finds what a handle stands for; take removes it.
func eventSet(h C.uintptr_t, take bool) (*nvmlsim.EventSet, error) {
	s := lib.open.Load()
	if s == nil {
		return nil, nvmlsim.Uninitialized
	}
	slot := int(C.set_slot(h))
	if slot < 0 {
		return nil, nvmlsim.InvalidArgument
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	set := s.sets[slot]
	if set == nil {
		return nil, nvmlsim.InvalidArgument
	}
	if take {
		s.sets[slot] = nil
	}
	return set, nil
}

//export simEventSetFree
func simEventSetFree(h C.uintptr_t) C.int {
	set, err := eventSet(h, true)
	if err != nil {
		return code(err)
	}
	set.Close()
	return ok
}

//export simDeviceRegisterEvents
func simDeviceRegisterEvents(h C.uintptr_t, types C.ulonglong, set C.uintptr_t) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	s, err := eventSet(set, false)
	if err != nil {
		return code(err)
	}
	return code(s.Register(g, nvmlsim.EventType(types)))
}

//export simEventSetWait_v2
func simEventSetWait_v2(h C.uintptr_t, out *C.nvmlEventData_t, timeoutMS C.uint) C.int {
	set, err := eventSet(h, false)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	e, err := set.Wait(context.Background(), time.Duration(timeoutMS)*time.Millisecond)
	if err != nil {
		return code(err)
	}
	*(*unsafe.Pointer)(unsafe.Pointer(&out.device)) = C.gpu_handle(C.int(e.GPU))
	out.eventType, out.eventData = C.ulonglong(e.Type), C.ulonglong(e.Data)
	out.gpuInstanceId, out.computeInstanceId = C.uint(e.GPUInstance), C.uint(e.ComputeInstance)
	return ok
}
