package engine

import (
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

func (s *session) deviceGetMigMode(h handle, current, pending *uint32) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if current == nil || pending == nil {
		return nvmlsim.InvalidArgument
	}
	now, next, err := g.MIGMode()
	if err != nil {
		return code(err)
	}
	*current, *pending = enabled(now), enabled(next)
	return ok
}

func (s *session) deviceGetMaxMigDeviceCount(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).MaxMIGDeviceCount)
}

func (s *session) deviceGetGpuInstanceProfileInfo(h handle, profileEnum uint32, out *nvmlGpuInstanceProfileInfo) nvmlsim.Return {
	find := func(g *nvmlsim.GPU) (nvmlsim.Profile, error) { return g.ProfileByEnum(profileEnum) }
	return s.profile(h, out != nil, find, func(p nvmlsim.Profile) nvmlsim.Return {
		*out = nvmlGpuInstanceProfileInfo{
			Id: p.ID, IsP2pSupported: enabled(p.P2P), SliceCount: p.SliceCount, InstanceCount: p.InstanceCount,
			MultiprocessorCount: p.MultiprocessorCount, CopyEngineCount: p.CopyEngineCount, DecoderCount: p.DecoderCount,
			EncoderCount: p.EncoderCount, JpegCount: p.JPEGCount, OfaCount: p.OFACount, MemorySizeMB: p.MemorySizeMB,
		}
		return ok
	})
}

func (s *session) deviceGetGpuInstanceProfileInfoV(h handle, profileEnum uint32, out *room[byte]) nvmlsim.Return {
	find := func(g *nvmlsim.GPU) (nvmlsim.Profile, error) { return g.ProfileByEnumV(profileEnum) }
	return s.profile(h, out != nil, find, func(p nvmlsim.Profile) nvmlsim.Return { return versioned(out, p) })
}

func (s *session) deviceGetGpuInstanceProfileInfoByIDV(h handle, id uint32, out *room[byte]) nvmlsim.Return {
	find := func(g *nvmlsim.GPU) (nvmlsim.Profile, error) { return g.ProfileByID(id) }
	return s.profile(h, out != nil, find, func(p nvmlsim.Profile) nvmlsim.Return { return versioned(out, p) })
}

func (s *session) profile(h handle, wanted bool, find func(*nvmlsim.GPU) (nvmlsim.Profile, error), put func(nvmlsim.Profile) nvmlsim.Return) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if !wanted {
		return nvmlsim.InvalidArgument
	}
	p, err := find(g)
	if err != nil {
		return code(err)
	}
	return put(p)
}

// versioned fills the struct in the version that the caller requested.
func versioned(out *room[byte], p nvmlsim.Profile) nvmlsim.Return {
	switch out.version() {
	case nvmlGpuInstanceProfileInfo_v2:
		v2 := nvmlGpuInstanceProfileInfoV2{
			Version: out.version(),
			Id:      p.ID, IsP2pSupported: enabled(p.P2P), SliceCount: p.SliceCount, InstanceCount: p.InstanceCount,
			MultiprocessorCount: p.MultiprocessorCount, CopyEngineCount: p.CopyEngineCount, DecoderCount: p.DecoderCount,
			EncoderCount: p.EncoderCount, JpegCount: p.JPEGCount, OfaCount: p.OFACount, MemorySizeMB: p.MemorySizeMB,
		}
		put(v2.Name[:], p.Name)
		out.out = bytesOf(&v2)
	case nvmlGpuInstanceProfileInfo_v3:
		v3 := nvmlGpuInstanceProfileInfoV3{
			Version: out.version(),
			Id:      p.ID, SliceCount: p.SliceCount, InstanceCount: p.InstanceCount,
			MultiprocessorCount: p.MultiprocessorCount, CopyEngineCount: p.CopyEngineCount, DecoderCount: p.DecoderCount,
			EncoderCount: p.EncoderCount, JpegCount: p.JPEGCount, OfaCount: p.OFACount, MemorySizeMB: p.MemorySizeMB,
			Capabilities: p.Capabilities(),
		}
		put(v3.Name[:], p.Name)
		out.out = bytesOf(&v3)
	default:
		return nvmlsim.ArgumentVersion
	}
	return ok
}

func (s *session) deviceGetGpuInstancePossiblePlacementsV2(h handle, id uint32, out *room[nvmlGpuInstancePlacement], count *uint32) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if count == nil {
		return nvmlsim.InvalidArgument
	}
	starts, size, err := g.PossiblePlacements(id)
	if err != nil {
		return code(err)
	}
	// The caller's count isn't read: by NVML's contract the array, if there is
	// one, has room for all.
	*count = uint32(len(starts))
	if out == nil {
		return ok
	}
	for _, start := range starts {
		out.out = append(out.out, nvmlGpuInstancePlacement{Start: start, Size: size})
	}
	return ok
}

func (s *session) deviceGetGpuInstancePossiblePlacements(h handle, id uint32, out *room[nvmlGpuInstancePlacement], count *uint32) nvmlsim.Return {
	return s.deviceGetGpuInstancePossiblePlacementsV2(h, id, out, count)
}

func (s *session) deviceGetGpuInstanceRemainingCapacity(h handle, id uint32, out *uint32) nvmlsim.Return {
	return number(s, h, out, func(g *nvmlsim.GPU) (int, error) { return g.RemainingCapacity(id) })
}
