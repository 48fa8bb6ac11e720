package engine

import "github.com/tessera-dra/tessera/sim/nvmlsim"

func (s *session) gpmQueryDeviceSupport(h handle, out *nvmlGpmSupport) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	if out.Version != NVML_GPM_SUPPORT_VERSION {
		return nvmlsim.ArgumentVersion
	}
	supported, err := g.GPMSupported()
	if err != nil {
		return code(err)
	}
	out.IsSupportedDevice = enabled(supported)
	return ok
}

func (s *session) gpmSampleAlloc(out *handle) nvmlsim.Return {
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	sample, err := s.machine.NewGPMSample()
	if err != nil {
		return code(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.samples[s.nextSample] != nil {
		s.nextSample = (s.nextSample + 1) % (1 << slotBits)
	}
	s.samples[s.nextSample] = sample
	*out = newHandle(kindSample, s.number, s.nextSample)
	s.nextSample = (s.nextSample + 1) % (1 << slotBits)
	return ok
}

// sample returns the sample of a handle.
func (s *session) sample(h handle) (*nvmlsim.GPMSample, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sample := s.samples[h.slot(kindSample, s.number)]
	if sample == nil {
		return nil, nvmlsim.InvalidArgument
	}
	return sample, nil
}

func (s *session) gpmSampleFree(h handle) nvmlsim.Return {
	sample, err := s.sample(h)
	if err != nil {
		return code(err)
	}
	s.mu.Lock()
	delete(s.samples, h.slot(kindSample, s.number))
	s.mu.Unlock()
	return code(sample.Free())
}

func (s *session) gpmSampleGet(h, sample handle) nvmlsim.Return {
	return s.readSample(h, sample, (*nvmlsim.GPMSample).Get)
}

func (s *session) gpmMigSampleGet(h handle, gpuInstance uint32, sample handle) nvmlsim.Return {
	return s.readSample(h, sample, func(into *nvmlsim.GPMSample, g *nvmlsim.GPU) error { return into.GetInstance(g, gpuInstance) })
}

func (s *session) readSample(h, sample handle, read func(*nvmlsim.GPMSample, *nvmlsim.GPU) error) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	into, err := s.sample(sample)
	if err != nil {
		return code(err)
	}
	return code(read(into, g))
}

// gpmMetricsGet has the utilization of graphics engine and multiprocessors, which is the
// same here. The names of metrics stay unset, as nvml.h allows.
func (s *session) gpmMetricsGet(get *nvmlGpmMetricsGet) nvmlsim.Return {
	switch {
	case get == nil, int(get.NumMetrics) > len(get.Metrics):
		return nvmlsim.InvalidArgument
	case get.Version != NVML_GPM_METRICS_GET_VERSION:
		return nvmlsim.ArgumentVersion
	}
	first, err := s.sample(get.Sample1.Handle)
	if err != nil {
		return code(err)
	}
	second, err := s.sample(get.Sample2.Handle)
	if err != nil {
		return code(err)
	}
	busy, err := first.GPMUtilization(second)
	if err != nil {
		return code(err)
	}
	for i := range get.NumMetrics {
		m := &get.Metrics[i]
		m.NvmlReturn = uint32(nvmlsim.NotSupported)
		if m.MetricId == NVML_GPM_METRIC_GRAPHICS_UTIL || m.MetricId == NVML_GPM_METRIC_SM_UTIL {
			m.NvmlReturn, m.Value = uint32(ok), busy
		}
	}
	return ok
}
