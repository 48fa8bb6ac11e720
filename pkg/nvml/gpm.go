package nvml

import (
	"errors"
	"fmt"
	"sync"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	// gpmInterval is the least time between two samples of performance counters (nvml.h): an
	// H200 that is busy counts as idle between samples of the same moment.
	gpmInterval = 100 * time.Millisecond
	// gpmPeriods is how many times the asked time may lie between two samples.
	gpmPeriods = 3
)

// gpmSamples has a sample of the performance counters (GPM) of each GPU instance of a GPU,
// by the instance's ID, for the next reading to compare with.
type gpmSamples struct {
	// mu is held while instances are sampled or destroyed, so that no instance is sampled
	// while it is destroyed: a sample might hold it.
	mu  sync.Mutex
	all map[int]gpmSample
}

type gpmSample struct {
	device   gpu.UUID // of the instance's first MIG device: IDs are used again
	at       time.Time
	counters gonvml.GpmSample
}

func (s *Session) gpmOf(uuid gpu.UUID) *gpmSamples {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gpm[uuid] == nil {
		s.gpm[uuid] = &gpmSamples{all: map[int]gpmSample{}}
	}
	return s.gpm[uuid]
}

// free frees the sample of an instance, if there is one; needs the lock.
func (g *gpmSamples) free(instance int) {
	if sample, ok := g.all[instance]; ok {
		_ = sample.counters.Free() // it fails only for what isn't a sample
		delete(g.all, instance)
	}
}

// freeSamples frees all samples of all GPUs.
func (s *Session) freeSamples() {
	for _, uuid := range s.identified() {
		g := s.gpmOf(uuid)
		g.mu.Lock()
		for instance := range g.all {
			g.free(instance)
		}
		g.mu.Unlock()
	}
}

// readInstanceUtilization returns the utilization of GPU instances, by ID, between the
// reading before and this one. It has none of an instance that wasn't read before, or too
// long ago, and of GPUs before Hopper.
func (s *Session) readInstanceUtilization(handle gonvml.Device, uuid gpu.UUID, devices map[int][]migDevice, over time.Duration, object string) (map[int]float64, error) {
	read := map[int]float64{}
	if !s.has[callGPM] {
		return read, nil
	}
	support, ret := handle.GpmQueryDeviceSupport()
	if ret != gonvml.SUCCESS || support.IsSupportedDevice == 0 {
		return read, onlyLost(ret, "nvmlGpmQueryDeviceSupport", object)
	}
	g := s.gpmOf(uuid)
	g.mu.Lock()
	defer g.mu.Unlock()
	for instance := range g.all {
		if len(devices[instance]) == 0 {
			g.free(instance)
		}
	}
	for instance, some := range devices {
		used, err := s.sampleInstance(handle, g, instance, some[0].uuid, over, object)
		if err != nil {
			return nil, err
		}
		if used != nil {
			read[instance] = *used
		}
	}
	return read, nil
}

// sampleInstance replaces the sample of an instance and returns the utilization between
// the two; nil if it is unknown. It needs the lock.
func (s *Session) sampleInstance(handle gonvml.Device, g *gpmSamples, instance int, device gpu.UUID, over time.Duration, object string) (*float64, error) {
	before, now := g.all[instance], gpmSample{device: device, at: time.Now()}
	since := now.at.Sub(before.at)
	if before.device == device && since < gpmInterval {
		return nil, nil //nolint:nilnil // nil is the documented value for "unknown"
	}
	var ret gonvml.Return
	if now.counters, ret = s.lib.GpmSampleAlloc(); ret != gonvml.SUCCESS {
		return nil, onlyLost(ret, "nvmlGpmSampleAlloc", object)
	}
	if ret := handle.GpmMigSampleGet(instance, now.counters); ret != gonvml.SUCCESS { // destroyed in the meantime, or lost
		_ = now.counters.Free() // as above
		return nil, onlyLost(ret, callGPM, object)
	}
	defer func() {
		g.free(instance)
		g.all[instance] = now
	}()
	if before.device != device || since > gpmPeriods*over {
		return nil, nil //nolint:nilnil // as above
	}
	return s.compare(before.counters, now.counters, object)
}

// compare returns the fraction of the time between two samples in which any program ran,
// which is NVML's meaning of a GPU's utilization, too.
func (s *Session) compare(before, now gonvml.GpmSample, object string) (*float64, error) {
	get := gonvml.GpmMetricsGetType{NumMetrics: 1, Sample1: before, Sample2: now}
	get.Metrics[0].MetricId = uint32(gonvml.GPM_METRIC_GRAPHICS_UTIL)
	if ret := s.lib.GpmMetricsGet(&get); ret != gonvml.SUCCESS {
		return nil, onlyLost(ret, "nvmlGpmMetricsGet", object)
	}
	m := get.Metrics[0]
	if known := m.NvmlReturn == uint32(gonvml.SUCCESS) && m.Value >= 0 && m.Value <= 100; !known {
		return nil, nil //nolint:nilnil // as above
	}
	used := m.Value / 100
	return &used, nil
}

// onlyLost returns an error if the GPU is lost, and nil for all else: utilization by
// performance counters is something that GPUs may have.
func onlyLost(ret gonvml.Return, call, object string) error {
	if err := wrap(ret, call, object); errors.Is(err, ErrLost) {
		return fmt.Errorf("read performance counters: %w", err)
	}
	return nil
}
