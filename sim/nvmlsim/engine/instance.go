package engine

import (
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

func (s *session) deviceSetMigMode(h handle, mode uint32, activation *uint32) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if activation == nil || mode > 1 {
		return nvmlsim.InvalidArgument
	}
	a, err := g.SetMIGMode(mode == 1)
	if err != nil {
		return code(err)
	}
	*activation = uint32(a)
	return ok
}

func (s *session) deviceIsMigDeviceHandle(h handle, out *uint32) nvmlsim.Return {
	if _, mig := s.migDevice(h); mig {
		return put1(out, func() (int, error) { return 1, nil })
	}
	return s.flag(h, out, func(*nvmlsim.GPU) (bool, error) { return false, nil })
}

func (s *session) deviceGetMigDeviceHandleByIndex(h handle, index uint32, out *handle) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	c, err := g.MIGDevice(int(index))
	return s.give(out, device{c}, err)
}

func (s *session) deviceGetDeviceHandleFromMigDeviceHandle(h handle, out *handle) nvmlsim.Return {
	d, err := object[device](s, h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	return giveGPU(out, d.Instance().GPU(), nil)
}

func (s *session) deviceGetGpuInstanceID(h handle, out *uint32) nvmlsim.Return {
	d, err := object[device](s, h)
	if err != nil {
		return code(err)
	}
	return put1(out, d.GPUInstanceID)
}

func (s *session) deviceGetComputeInstanceID(h handle, out *uint32) nvmlsim.Return {
	d, err := object[device](s, h)
	if err != nil {
		return code(err)
	}
	return put1(out, d.ComputeInstanceID)
}

func (s *session) deviceGetAttributesV2(h handle, out *nvmlDeviceAttributes) nvmlsim.Return {
	d, err := object[device](s, h)
	if err != nil {
		return code(err) // only MIG devices have attributes
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	p, c, err := d.Attributes()
	if err != nil {
		return code(err)
	}
	*out = nvmlDeviceAttributes{
		MultiprocessorCount: c.MultiprocessorCount, SharedCopyEngineCount: p.CopyEngineCount, SharedDecoderCount: p.DecoderCount,
		SharedEncoderCount: p.EncoderCount, SharedJpegCount: p.JPEGCount, SharedOfaCount: p.OFACount,
		GpuInstanceSliceCount: p.SliceCount, ComputeInstanceSliceCount: c.SliceCount, MemorySizeMB: p.MemorySizeMB,
	}
	return ok
}

func (s *session) deviceCreateGpuInstance(h handle, profileID uint32, out *handle) nvmlsim.Return {
	return s.createInstance(h, profileID, nil, out)
}

func (s *session) deviceCreateGpuInstanceWithPlacement(h handle, profileID uint32, at *nvmlGpuInstancePlacement, out *handle) nvmlsim.Return {
	if at == nil {
		return nvmlsim.InvalidArgument
	}
	start := uint32(at.Start)
	return s.createInstance(h, profileID, &start, out)
}

func (s *session) createInstance(h handle, profileID uint32, start *uint32, out *handle) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	i, err := g.CreateInstance(profileID, start)
	return s.give(out, i, err)
}

func (s *session) gpuInstanceDestroy(h handle) nvmlsim.Return {
	i, err := object[nvmlsim.Instance](s, h)
	if err == nil {
		if err = i.Destroy(); err == nil {
			s.objects.forget(i)
		}
	}
	return code(err)
}

func (s *session) deviceGetGpuInstances(h handle, profileID uint32, out *room[handle], count *uint32) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	all, err := g.Instances(profileID)
	return giveAll(s, out, count, all, err)
}

func (s *session) deviceGetGpuInstanceByID(h handle, id uint32, out *handle) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	i, err := g.InstanceByID(id)
	return s.give(out, i, err)
}

func (s *session) gpuInstanceGetInfo(h handle, out *nvmlGpuInstanceInfo) nvmlsim.Return {
	i, err := object[nvmlsim.Instance](s, h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	info, err := i.Info()
	if err != nil {
		return code(err)
	}
	out.Device.Handle = gpuHandle(i.GPU())
	out.Id, out.ProfileId = info.ID, info.Profile
	out.Placement = nvmlGpuInstancePlacement{Start: info.Start, Size: info.Size}
	return ok
}

func (s *session) gpuInstanceGetComputeInstanceProfileInfo(h handle, profileEnum, engineProfile uint32, out *nvmlComputeInstanceProfileInfo) nvmlsim.Return {
	return s.computeProfile(h, profileEnum, engineProfile, out != nil, func(p nvmlsim.ComputeProfile) nvmlsim.Return {
		*out = nvmlComputeInstanceProfileInfo{
			Id: p.ID, SliceCount: p.SliceCount, InstanceCount: p.InstanceCount, MultiprocessorCount: p.MultiprocessorCount,
			SharedCopyEngineCount: p.Parent.CopyEngineCount, SharedDecoderCount: p.Parent.DecoderCount,
			SharedEncoderCount: p.Parent.EncoderCount, SharedJpegCount: p.Parent.JPEGCount, SharedOfaCount: p.Parent.OFACount,
		}
		return ok
	})
}

func (s *session) gpuInstanceGetComputeInstanceProfileInfoV(h handle, profileEnum, engineProfile uint32, out *room[byte]) nvmlsim.Return {
	return s.computeProfile(h, profileEnum, engineProfile, out != nil, func(p nvmlsim.ComputeProfile) nvmlsim.Return {
		info := nvmlComputeInstanceProfileInfoV2{
			Version: out.version(),
			Id:      p.ID, SliceCount: p.SliceCount, InstanceCount: p.InstanceCount, MultiprocessorCount: p.MultiprocessorCount,
			SharedCopyEngineCount: p.Parent.CopyEngineCount, SharedDecoderCount: p.Parent.DecoderCount,
			SharedEncoderCount: p.Parent.EncoderCount, SharedJpegCount: p.Parent.JPEGCount, SharedOfaCount: p.Parent.OFACount,
		}
		put(info.Name[:], p.Name())
		switch out.version() {
		case nvmlComputeInstanceProfileInfo_v2:
			out.out = bytesOf(&info)
		case nvmlComputeInstanceProfileInfo_v3: // has the same fields, and more at its end
			var v3 nvmlComputeInstanceProfileInfoV3
			copy(bytesOf(&v3), bytesOf(&info))
			v3.Capabilities = p.Parent.Capabilities() >> 1 // graphics is the lowest bit here
			out.out = bytesOf(&v3)
		default:
			return nvmlsim.ArgumentVersion
		}
		return ok
	})
}

func (s *session) computeProfile(h handle, profileEnum, engineProfile uint32, wanted bool, fill func(nvmlsim.ComputeProfile) nvmlsim.Return) nvmlsim.Return {
	i, err := object[nvmlsim.Instance](s, h)
	if err != nil {
		return code(err)
	}
	if !wanted || engineProfile != NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED {
		return nvmlsim.InvalidArgument
	}
	p, err := i.ComputeProfile(profileEnum)
	if err != nil {
		return code(err)
	}
	return fill(p)
}

func (s *session) gpuInstanceGetComputeInstanceRemainingCapacity(h handle, profileID uint32, out *uint32) nvmlsim.Return {
	i, err := object[nvmlsim.Instance](s, h)
	if err != nil {
		return code(err)
	}
	return put1(out, func() (int, error) { return i.ComputeCapacity(profileID) })
}

func (s *session) gpuInstanceGetComputeInstancePossiblePlacements(h handle, profileID uint32, out *room[nvmlComputeInstancePlacement], count *uint32) nvmlsim.Return {
	i, err := object[nvmlsim.Instance](s, h)
	if err != nil {
		return code(err)
	}
	if count == nil {
		return nvmlsim.InvalidArgument
	}
	starts, size, err := i.ComputePlacements(profileID)
	if err != nil {
		return code(err)
	}
	*count = uint32(len(starts))
	if out == nil {
		return ok
	}
	for _, start := range starts {
		out.out = append(out.out, nvmlComputeInstancePlacement{Start: start, Size: size})
	}
	return ok
}

func (s *session) gpuInstanceCreateComputeInstance(h handle, profileID uint32, out *handle) nvmlsim.Return {
	return s.createCompute(h, profileID, nil, out)
}

func (s *session) gpuInstanceCreateComputeInstanceWithPlacement(h handle, profileID uint32, at *nvmlComputeInstancePlacement, out *handle) nvmlsim.Return {
	if at == nil {
		return nvmlsim.InvalidArgument
	}
	start := uint32(at.Start)
	return s.createCompute(h, profileID, &start, out)
}

func (s *session) createCompute(h handle, profileID uint32, start *uint32, out *handle) nvmlsim.Return {
	i, err := object[nvmlsim.Instance](s, h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	c, err := i.CreateCompute(profileID, start)
	return s.give(out, c, err)
}

func (s *session) computeInstanceDestroy(h handle) nvmlsim.Return {
	c, err := object[nvmlsim.Compute](s, h)
	if err == nil {
		if err = c.Destroy(); err == nil {
			s.objects.forget(c)
			s.objects.forget(device{c})
		}
	}
	return code(err)
}

func (s *session) gpuInstanceGetComputeInstances(h handle, profileID uint32, out *room[handle], count *uint32) nvmlsim.Return {
	i, err := object[nvmlsim.Instance](s, h)
	if err != nil {
		return code(err)
	}
	all, err := i.Computes(profileID)
	return giveAll(s, out, count, all, err)
}

func (s *session) gpuInstanceGetComputeInstanceByID(h handle, id uint32, out *handle) nvmlsim.Return {
	i, err := object[nvmlsim.Instance](s, h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	c, err := i.ComputeByID(id)
	return s.give(out, c, err)
}

func (s *session) computeInstanceGetInfoV2(h handle, out *nvmlComputeInstanceInfo) nvmlsim.Return {
	c, err := object[nvmlsim.Compute](s, h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	info, err := c.Info()
	if err != nil {
		return code(err)
	}
	// The device is the parent GPU, as nvml.h says.
	out.Device.Handle = gpuHandle(c.Instance().GPU())
	out.GpuInstance.Handle = s.objects.handle(c.Instance())
	out.Id, out.ProfileId = info.ID, info.Profile
	out.Placement = nvmlComputeInstancePlacement{Start: info.Start, Size: info.Size}
	return ok
}
