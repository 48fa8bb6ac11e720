package engine

import (
	"runtime"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

func (s *session) deviceGetName(h handle, buf *room[byte], n uint32) nvmlsim.Return {
	return s.text(h, buf, n, (*nvmlsim.GPU).Name, nvmlsim.Compute.Name)
}

func (s *session) deviceGetUUID(h handle, buf *room[byte], n uint32) nvmlsim.Return {
	return s.text(h, buf, n, (*nvmlsim.GPU).UUID, nvmlsim.Compute.UUID)
}

func (s *session) deviceGetSerial(h handle, buf *room[byte], n uint32) nvmlsim.Return {
	return s.text(h, buf, n, (*nvmlsim.GPU).Serial, nil)
}

func (s *session) deviceGetVbiosVersion(h handle, buf *room[byte], n uint32) nvmlsim.Return {
	return s.text(h, buf, n, (*nvmlsim.GPU).VBIOSVersion, nil)
}

func (s *session) deviceGetIndex(h handle, out *uint32) nvmlsim.Return {
	if c, mig := s.migDevice(h); mig {
		return put1(out, c.Index)
	}
	return number(s, h, out, (*nvmlsim.GPU).Index)
}

func (s *session) deviceGetMinorNumber(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).MinorNumber)
}

func (s *session) deviceGetModuleID(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).ModuleID)
}

func (s *session) deviceGetBoardID(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).BoardID)
}

func (s *session) deviceGetBrand(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).Brand)
}

func (s *session) deviceGetArchitecture(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).Architecture)
}

func (s *session) deviceGetCudaComputeCapability(h handle, major, minor *int32) nvmlsim.Return {
	if minor == nil {
		return nvmlsim.InvalidArgument
	}
	return number(s, h, major, func(g *nvmlsim.GPU) (int, error) {
		v, err := g.CUDAComputeCapability()
		if err == nil {
			*minor = int32(v[1])
		}
		return v[0], err
	})
}

func (s *session) deviceGetPciInfoV2(h handle, out *nvmlPciInfo) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	p, err := g.PCIInfo()
	if err != nil {
		return code(err)
	}
	*out = nvmlPciInfo{
		Domain: p.Domain, Bus: p.Bus, Device: p.Device,
		PciDeviceId: g.Model().PCIDeviceID, PciSubSystemId: g.Model().PCISubSystemID,
	}
	put(out.BusId[:], p.BusID())
	put(out.BusIdLegacy[:], p.BusIDLegacy())
	return ok
}

func (s *session) deviceGetPciInfoV3(h handle, out *nvmlPciInfo) nvmlsim.Return {
	return s.deviceGetPciInfoV2(h, out)
}

func (s *session) deviceGetPciInfoExt(h handle, out *nvmlPciInfoExtV1) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	if out.Version != nvmlPciInfoExt_v1 {
		return nvmlsim.ArgumentVersion
	}
	p, err := g.PCIInfo()
	if err != nil {
		return code(err)
	}
	out.Domain, out.Bus, out.Device = p.Domain, p.Bus, p.Device
	out.PciDeviceId, out.PciSubSystemId = g.Model().PCIDeviceID, g.Model().PCISubSystemID
	out.BaseClass, out.SubClass = 3, 2 // display controller, 3D
	put(out.BusId[:], p.BusID())
	return ok
}

func (s *session) deviceGetMemoryInfo(h handle, out *nvmlMemory) nvmlsim.Return {
	return s.memory(h, out != nil, func(i nvmlsim.MemoryInfo) {
		// Unlike in the second version, used includes reserved memory.
		out.Total, out.Free, out.Used = i.Total, i.Free, uint64(i.Total-i.Free)
	})
}

func (s *session) deviceGetMemoryInfoV2(h handle, out *nvmlMemoryV2) nvmlsim.Return {
	if out != nil && out.Version != nvmlMemory_v2 {
		return nvmlsim.ArgumentVersion
	}
	return s.memory(h, out != nil, func(i nvmlsim.MemoryInfo) {
		out.Total, out.Free, out.Used = i.Total, i.Free, i.Used
		out.Reserved = i.Reserved
	})
}

func (s *session) memory(h handle, wanted bool, put func(nvmlsim.MemoryInfo)) nvmlsim.Return {
	var get func() (nvmlsim.MemoryInfo, error)
	if c, mig := s.migDevice(h); mig {
		get = c.MemoryInfo
	} else {
		g, err := s.gpu(h)
		if err != nil {
			return code(err)
		}
		get = g.MemoryInfo
	}
	if !wanted {
		return nvmlsim.InvalidArgument
	}
	info, err := get()
	if err != nil {
		return code(err)
	}
	put(info)
	return ok
}

func (s *session) deviceGetAddressingMode(h handle, out *nvmlDeviceAddressingModeV1) nvmlsim.Return {
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	if out.Version != nvmlDeviceAddressingMode_v1 {
		return nvmlsim.ArgumentVersion
	}
	return number(s, h, &out.Value, (*nvmlsim.GPU).AddressingMode)
}

func (s *session) deviceGetMemoryAffinity(h handle, n uint32, set *room[uint64], _ uint32) nvmlsim.Return {
	return s.bits(h, n, set, func(g *nvmlsim.GPU) ([]int, error) {
		node, err := g.NUMANode()
		return []int{node}, err
	})
}

func (s *session) deviceGetCPUAffinity(h handle, n uint32, set *room[uint64]) nvmlsim.Return {
	return s.bits(h, n, set, func(g *nvmlsim.GPU) ([]int, error) {
		_, err := g.NUMANode()
		cpus := make([]int, runtime.NumCPU())
		for i := range cpus {
			cpus[i] = i
		}
		return cpus, err
	})
}

func (s *session) deviceGetCPUAffinityWithinScope(h handle, n uint32, set *room[uint64], _ uint32) nvmlsim.Return {
	return s.deviceGetCPUAffinity(h, n, set)
}

// bits fills a bit set of n words; bits that don't fit are left out.
func (s *session) bits(h handle, n uint32, set *room[uint64], get func(*nvmlsim.GPU) ([]int, error)) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if set == nil || n == 0 || n > maxMessage/16 {
		return nvmlsim.InvalidArgument
	}
	on, err := get(g)
	if err != nil {
		return code(err)
	}
	words := make([]uint64, n)
	for _, b := range on {
		if b/64 < len(words) {
			words[b/64] |= 1 << (b % 64)
		}
	}
	set.out = words
	return ok
}

func (s *session) deviceGetTopologyCommonAncestor(h1, h2 handle, out *uint32) nvmlsim.Return {
	other, err := s.gpu(h2)
	if err != nil {
		return code(err)
	}
	return number(s, h1, out, func(g *nvmlsim.GPU) (uint32, error) { return g.CommonAncestor(other) })
}

func (s *session) deviceGetVirtualizationMode(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).VirtualizationMode)
}

func (s *session) deviceGetPersistenceMode(h handle, out *uint32) nvmlsim.Return {
	return s.flag(h, out, (*nvmlsim.GPU).PersistenceMode)
}

func (s *session) deviceSetPersistenceMode(h handle, mode uint32) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	return code(g.SetPersistenceMode(mode != 0))
}

func (s *session) deviceGetComputeMode(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).ComputeMode)
}

func (s *session) deviceSetComputeMode(h handle, mode uint32) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	return code(g.SetComputeMode(uint32(mode)))
}

func (s *session) deviceGetDisplayActive(h handle, out *uint32) nvmlsim.Return {
	return s.flag(h, out, func(g *nvmlsim.GPU) (bool, error) {
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

func (s *session) deviceGetMaxPcieLinkGeneration(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, pcieGeneration)
}

func (s *session) deviceGetCurrPcieLinkGeneration(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, pcieGeneration)
}

func (s *session) deviceGetMaxPcieLinkWidth(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, pcieWidth)
}

func (s *session) deviceGetCurrPcieLinkWidth(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, pcieWidth)
}
