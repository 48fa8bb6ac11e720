package engine

import "github.com/tessera-dra/tessera/sim/nvmlsim"

func (s *session) deviceGetNvLinkState(h handle, link uint32, out *uint32) nvmlsim.Return {
	return s.flag(h, out, func(g *nvmlsim.GPU) (bool, error) { return g.NVLinkState(int(link)) })
}

func (s *session) deviceGetNvLinkRemoteDeviceType(h handle, link uint32, out *uint32) nvmlsim.Return {
	return number(s, h, out, func(g *nvmlsim.GPU) (uint32, error) {
		l, err := g.NVLinkRemote(int(link))
		return l.DeviceType(), err
	})
}

func (s *session) deviceGetGpuFabricInfo(h handle, out *nvmlGpuFabricInfo) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	v, err := g.FabricInfo()
	if err != nil {
		return code(err)
	}
	*out = nvmlGpuFabricInfo{State: v.State, Status: uint32(v.Status)}
	return ok
}

func (s *session) deviceGetNvLinkRemotePciInfoV2(h handle, link uint32, out *nvmlPciInfo) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	l, err := g.NVLinkRemote(int(link))
	if err != nil {
		return code(err)
	}
	*out = nvmlPciInfo{Domain: l.Remote.Domain, Bus: l.Remote.Bus, Device: l.Remote.Device}
	put(out.BusId[:], l.Remote.BusID())
	put(out.BusIdLegacy[:], l.Remote.BusIDLegacy())
	return ok
}
