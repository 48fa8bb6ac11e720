package engine

import (
	"context"
	"encoding/binary"
	"time"
	"unsafe"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

func (s *session) deviceGetEccMode(h handle, current, pending *uint32) nvmlsim.Return {
	if pending == nil {
		return nvmlsim.InvalidArgument
	}
	r := s.flag(h, current, (*nvmlsim.GPU).ECCMode)
	if r == ok {
		*pending = *current
	}
	return r
}

// deviceGetTotalEccErrors counts no corrected errors; the totals since the GPU
// was made are those since the driver was loaded.
func (s *session) deviceGetTotalEccErrors(h handle, errorType, _ uint32, out *uint64) nvmlsim.Return {
	return number(s, h, out, func(g *nvmlsim.GPU) (uint64, error) {
		n, err := g.UncorrectableErrors()
		if errorType != NVML_MEMORY_ERROR_TYPE_UNCORRECTED {
			n = 0
		}
		return n, err
	})
}

func (s *session) deviceGetSramEccErrorStatus(h handle, out *nvmlEccSramErrorStatusV1) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	if out.Version != nvmlEccSramErrorStatus_v1 {
		return nvmlsim.ArgumentVersion
	}
	exceeded, err := g.SRAMThresholdExceeded()
	if err != nil {
		return code(err)
	}
	out.BThresholdExceeded = enabled(exceeded)
	return ok
}

func (s *session) deviceGetTemperature(h handle, sensor uint32, out *uint32) nvmlsim.Return {
	if sensor != NVML_TEMPERATURE_GPU {
		return nvmlsim.InvalidArgument
	}
	return number(s, h, out, (*nvmlsim.GPU).Temperature)
}

func (s *session) deviceGetTemperatureV(h handle, out *nvmlTemperatureV1) nvmlsim.Return {
	if out == nil || out.SensorType != NVML_TEMPERATURE_GPU {
		return nvmlsim.InvalidArgument
	}
	if out.Version != nvmlTemperature_v1 {
		return nvmlsim.ArgumentVersion
	}
	return number(s, h, &out.Temperature, (*nvmlsim.GPU).Temperature)
}

func (s *session) deviceGetPowerUsage(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).PowerUsage)
}

func (s *session) deviceGetEnforcedPowerLimit(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).PowerLimit)
}

func (s *session) deviceGetPowerManagementLimit(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).PowerLimit)
}

func (s *session) deviceGetPerformanceState(h handle, out *uint32) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).PerformanceState)
}

func (s *session) deviceGetRemappedRows(h handle, correctable, uncorrectable, pending, failed *uint32) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if correctable == nil || uncorrectable == nil || pending == nil || failed == nil {
		return nvmlsim.InvalidArgument
	}
	r, err := g.RemappedRows()
	if err != nil {
		return code(err)
	}
	*correctable, *uncorrectable = r.Correctable, r.Uncorrectable
	*pending, *failed = enabled(r.Pending), enabled(r.Failed)
	return ok
}

func (s *session) deviceGetFieldValues(h handle, n int32, values *room[nvmlFieldValue]) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if n <= 0 || values == nil || len(values.in) != int(n)*int(unsafe.Sizeof(nvmlFieldValue{})) {
		return nvmlsim.InvalidArgument
	}
	now := time.Now().UnixMicro()
	values.out = make([]nvmlFieldValue, n)
	copy(bytesOfAll(values.out), values.in)
	for i := range values.out {
		v := &values.out[i]
		x, err := field(g, v.FieldId)
		v.Timestamp, v.LatencyUsec = now, 0
		v.ValueType = NVML_VALUE_TYPE_UNSIGNED_INT
		v.NvmlReturn = uint32(nvmlsim.Code(err))
		v.Value = [8]byte{}
		binary.NativeEndian.PutUint32(v.Value[:], x)
		if c := nvmlsim.Code(err); c == nvmlsim.GPUIsLost || c == nvmlsim.ResetRequired {
			return c
		}
	}
	return ok
}

// field returns one NVML_FI_* value.
func field(g *nvmlsim.GPU, id uint32) (uint32, error) {
	switch id {
	case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
		action, err := g.RecoveryAction()
		return uint32(action), err
	case NVML_FI_DEV_ECC_CURRENT, NVML_FI_DEV_ECC_PENDING:
		on, err := g.ECCMode()
		return enabled(on), err
	case NVML_FI_DEV_REMAPPED_COR, NVML_FI_DEV_REMAPPED_UNC, NVML_FI_DEV_REMAPPED_PENDING, NVML_FI_DEV_REMAPPED_FAILURE:
		r, err := g.RemappedRows()
		all := [...]uint32{r.Correctable, r.Uncorrectable, enabled(r.Pending), enabled(r.Failed)}
		return all[id-NVML_FI_DEV_REMAPPED_COR], err
	case NVML_FI_DEV_MEMORY_TEMP:
		return g.Temperature()
	}
	return 0, nvmlsim.NotSupported
}

func (s *session) deviceGetSupportedEventTypes(h handle, out *uint64) nvmlsim.Return {
	return number(s, h, out, (*nvmlsim.GPU).SupportedEventTypes)
}

func (s *session) eventSetCreate(out *handle) nvmlsim.Return {
	if out == nil {
		return nvmlsim.InvalidArgument
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
			*out = newHandle(kindSet, s.number, i)
			return ok
		}
	}
	return nvmlsim.Memory
}

// eventSet returns the event set of a handle; with take it removes the set.
func (s *session) eventSet(h handle, take bool) (*nvmlsim.EventSet, error) {
	slot := h.slot(kindSet, s.number)
	if slot < 0 || slot >= len(s.sets) {
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

func (s *session) eventSetFree(h handle) nvmlsim.Return {
	set, err := s.eventSet(h, true)
	if err != nil {
		return code(err)
	}
	set.Close()
	return ok
}

func (s *session) deviceRegisterEvents(h handle, types uint64, set handle) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	found, err := s.eventSet(set, false)
	if err != nil {
		return code(err)
	}
	return code(found.Register(g, nvmlsim.EventType(types)))
}

func (s *session) eventSetWaitV2(h handle, out *nvmlEventData, timeoutMS uint32) nvmlsim.Return {
	set, err := s.eventSet(h, false)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	e, err := set.Wait(context.Background(), time.Duration(timeoutMS)*time.Millisecond)
	if err != nil {
		return code(err)
	}
	out.Device.Handle = newHandle(kindGPU, 0, e.GPU)
	out.EventType, out.EventData = uint64(e.Type), uint64(e.Data)
	out.GpuInstanceId, out.ComputeInstanceId = uint32(e.GPUInstance), uint32(e.ComputeInstance)
	return ok
}
