package nvml

import (
	"errors"
	"fmt"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	// gpmMinInterval is the least time between two samples of performance counters (nvml.h): an
	// H200 that is busy counts as idle between samples of the same moment.
	gpmMinInterval = 100 * time.Millisecond
	// gpmMaxPeriods limits the time between two samples that are compared, in multiples of the
	// time that the utilization is asked for.
	gpmMaxPeriods = 3
)

// gpmSamples are the last samples of the performance counters (GPM) of a GPU's instances, by
// the instance's ID. The next reading compares with them. A sample may keep the driver from
// destroying its instance, so samples are made and freed only in calls for the GPU, which the
// guard keeps apart from changes of it.
type gpmSamples map[int]gpmSample

type gpmSample struct {
	device   gpu.UUID // the instance's first MIG device, because IDs are used again
	at       time.Time
	counters gonvml.GpmSample
}

// takeSamples removes the samples of a GPU from the session and returns them; the caller frees
// them or passes them to keepSamples.
func (s *Session) takeSamples(uuid gpu.UUID) gpmSamples {
	s.mu.Lock()
	defer s.mu.Unlock()
	taken := s.gpm[uuid]
	delete(s.gpm, uuid)
	if taken == nil {
		taken = gpmSamples{}
	}
	return taken
}

// keepSamples keeps the samples for the next call, instead of those that another call has kept
// since they were taken.
func (s *Session) keepSamples(uuid gpu.UUID, samples gpmSamples) {
	s.mu.Lock()
	others := s.gpm[uuid]
	s.gpm[uuid] = samples
	s.mu.Unlock()
	others.freeAll()
}

// free frees the sample of an instance, if there is one.
func (g gpmSamples) free(instance int) {
	if sample, ok := g[instance]; ok {
		_ = sample.counters.Free() // it fails only if this isn't a sample
		delete(g, instance)
	}
}

// freeAll frees the samples of all instances.
func (g gpmSamples) freeAll() {
	for instance := range g {
		g.free(instance)
	}
}

// EndUsage frees what Usage keeps in the driver for its next call for the GPU. Call it when Usage
// won't be called for a while, and once more later if it returns false: the GPU is being changed,
// or doesn't respond. It waits as long as Usage for a GPU that doesn't respond.
func (s *Session) EndUsage(uuid gpu.UUID) (freed bool) {
	_, err := ask(s.guard, subject(uuid), readsUnlessChanged, "free its samples", s.limits.read, func() (struct{}, error) {
		s.takeSamples(uuid).freeAll()
		return struct{}{}, nil
	})
	return err == nil
}

// readInstanceUtilization returns the utilization of GPU instances, by ID, since the last
// call. It has none of an instance that wasn't read then, or if that was too long ago, and
// of GPUs before Hopper.
func (s *Session) readInstanceUtilization(handle gonvml.Device, uuid gpu.UUID, devices map[int][]migDevice, over time.Duration, object string) (map[int]float64, error) {
	read := map[int]float64{}
	if !s.has[callGPM] {
		return read, nil
	}
	support, ret := handle.GpmQueryDeviceSupport()
	if ret != gonvml.SUCCESS || support.IsSupportedDevice == 0 {
		return read, onlyLost(ret, "nvmlGpmQueryDeviceSupport", object)
	}
	g := s.takeSamples(uuid)
	defer s.keepSamples(uuid, g)
	for instance := range g {
		if len(devices[instance]) == 0 {
			g.free(instance)
		}
	}
	for instance, inside := range devices {
		used, err := s.sampleInstance(handle, g, instance, inside[0].uuid, over, object)
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
// the two; nil if it is unknown.
func (s *Session) sampleInstance(handle gonvml.Device, g gpmSamples, instance int, device gpu.UUID, over time.Duration, object string) (*float64, error) {
	before, now := g[instance], gpmSample{device: device, at: time.Now()}
	since := now.at.Sub(before.at)
	if before.device == device && since < gpmMinInterval {
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
		g[instance] = now
	}()
	if before.device != device || since > gpmMaxPeriods*over {
		return nil, nil //nolint:nilnil // as above
	}
	return s.utilizationBetween(before.counters, now.counters, object)
}

// utilizationBetween returns the fraction of the time between two samples in which any
// program ran, which is NVML's definition of a GPU's utilization, too.
func (s *Session) utilizationBetween(before, now gonvml.GpmSample, object string) (*float64, error) {
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

// onlyLost returns an error if the GPU is lost. All other failures mean that the GPU doesn't
// have such counters.
func onlyLost(ret gonvml.Return, call, object string) error {
	if err := wrap(ret, call, object); errors.Is(err, ErrLost) {
		return fmt.Errorf("read performance counters: %w", err)
	}
	return nil
}
