package main

/*
#include "door.h"
*/
import "C"

import (
	"unsafe"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

//export simInit_v2
func simInit_v2() C.int { return code(lib.init()) }

//export simInitWithFlags
func simInitWithFlags(C.uint) C.int { return code(lib.init()) }

//export simShutdown
func simShutdown() C.int { return code(lib.shutdown()) }

//export simErrorString
func simErrorString(result C.int) *C.char {
	if s, ok := lib.texts.Load(result); ok {
		return s.(*C.char)
	}
	s := C.CString(nvmlsim.ErrorString(int32(result)))
	if old, loaded := lib.texts.LoadOrStore(result, s); loaded {
		C.free(unsafe.Pointer(s))
		return old.(*C.char)
	}
	return s
}

//export simSystemGetDriverVersion
func simSystemGetDriverVersion(buf *C.char, n C.uint) C.int {
	m, err := machine()
	if err != nil {
		return code(err)
	}
	v, err := m.DriverVersion()
	return fill(buf, n, v, err)
}

//export simSystemGetNVMLVersion
func simSystemGetNVMLVersion(buf *C.char, n C.uint) C.int {
	m, err := machine()
	if err != nil {
		return code(err)
	}
	v, err := m.NVMLVersion()
	return fill(buf, n, v, err)
}

//export simSystemGetCudaDriverVersion
func simSystemGetCudaDriverVersion(out *C.int) C.int {
	m, err := machine()
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	if C.cuda_found() == 0 {
		return code(nvmlsim.NotFound) // as driver 580 answers
	}
	v, err := m.CUDADriverVersion()
	if err != nil {
		return code(err)
	}
	*out = C.int(v)
	return ok
}

//export simDeviceGetCount_v2
func simDeviceGetCount_v2(out *C.uint) C.int {
	m, err := machine()
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	n, err := m.Count()
	if err != nil {
		return code(err)
	}
	*out = C.uint(n)
	return ok
}

//export simDeviceGetHandleByIndex_v2
func simDeviceGetHandleByIndex_v2(index C.uint, out *unsafe.Pointer) C.int {
	m, err := machine()
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	g, err := m.ByIndex(int(index))
	return handle(out, g, err)
}

func byText(key *C.char, out *unsafe.Pointer, find func(*nvmlsim.Machine, string) (*nvmlsim.GPU, error)) C.int {
	m, err := machine()
	if err != nil {
		return code(err)
	}
	if key == nil || out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	g, err := find(m, C.GoString(key))
	return handle(out, g, err)
}

//export simDeviceGetHandleByUUID
func simDeviceGetHandleByUUID(uuid *C.char, out *unsafe.Pointer) C.int {
	return byUUID(uuid, out)
}

// byUUID finds GPUs and MIG devices.
func byUUID(uuid *C.char, out *unsafe.Pointer) C.int {
	m, err := machine()
	if err != nil {
		return code(err)
	}
	if uuid == nil || out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	s := C.GoString(uuid)
	if nvmlsim.IsMIG(s) {
		c, err := m.MIGDeviceByUUID(s)
		return give(out, device{c}, err)
	}
	g, err := m.ByUUID(s)
	return handle(out, g, err)
}

//export simDeviceGetHandleByUUIDV
func simDeviceGetHandleByUUIDV(uuid *C.nvmlUUID_v1_t, out *unsafe.Pointer) C.int {
	if uuid == nil {
		return code(nvmlsim.InvalidArgument)
	}
	if uuid.version != C.nvmlUUID_v1 {
		return code(nvmlsim.ArgumentVersion)
	}
	if uuid._type != C.NVML_UUID_TYPE_ASCII {
		return code(nvmlsim.NotSupported)
	}
	return byUUID((*C.char)(unsafe.Pointer(&uuid.value)), out)
}

//export simDeviceGetHandleBySerial
func simDeviceGetHandleBySerial(serial *C.char, out *unsafe.Pointer) C.int {
	return byText(serial, out, (*nvmlsim.Machine).BySerial)
}

//export simDeviceGetHandleByPciBusId_v2
func simDeviceGetHandleByPciBusId_v2(busID *C.char, out *unsafe.Pointer) C.int {
	return byText(busID, out, (*nvmlsim.Machine).ByPCIBusID)
}
