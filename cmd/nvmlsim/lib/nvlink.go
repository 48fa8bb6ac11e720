package main

// #include "door.h"
import "C"

import (
	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

//export simDeviceGetNvLinkState
func simDeviceGetNvLinkState(h C.uintptr_t, link C.uint, out *C.uint) C.int {
	return flag(h, out, func(g *nvmlsim.GPU) (bool, error) { return g.NVLinkState(int(link)) })
}

//export simDeviceGetNvLinkRemoteDeviceType
func simDeviceGetNvLinkRemoteDeviceType(h C.uintptr_t, link C.uint, out *C.uint) C.int {
	return number(h, out, func(g *nvmlsim.GPU) (uint32, error) {
		l, err := g.NVLinkRemote(int(link))
		return l.DeviceType(), err
	})
}

//export simDeviceGetNvLinkRemotePciInfo_v2
func simDeviceGetNvLinkRemotePciInfo_v2(h C.uintptr_t, link C.uint, out *C.nvmlPciInfo_t) C.int {
	g, err := gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return code(nvmlsim.InvalidArgument)
	}
	l, err := g.NVLinkRemote(int(link))
	if err != nil {
		return code(err)
	}
	*out = C.nvmlPciInfo_t{domain: C.uint(l.Remote.Domain), bus: C.uint(l.Remote.Bus), device: C.uint(l.Remote.Device)}
	put(out.busId[:], l.Remote.BusID())
	put(out.busIdLegacy[:], l.Remote.BusIDLegacy())
	return ok
}
