package engine

import (
	"strings"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

func (s *session) systemGetDriverVersion(buf *room[byte], n uint32) nvmlsim.Return {
	v, err := s.machine.DriverVersion()
	return fill(buf, n, v, err)
}

func (s *session) systemGetNVMLVersion(buf *room[byte], n uint32) nvmlsim.Return {
	v, err := s.machine.NVMLVersion()
	return fill(buf, n, v, err)
}

// systemGetCudaDriverVersion has an additional argument: whether the caller's loader
// finds libcuda.
func (s *session) systemGetCudaDriverVersion(out *int32, found uint32) nvmlsim.Return {
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	if found == 0 {
		return nvmlsim.NotFound // as driver 580 answers
	}
	return put1(out, s.machine.CUDADriverVersion)
}

func (s *session) deviceGetCountV2(out *uint32) nvmlsim.Return {
	return put1(out, s.machine.Count)
}

func (s *session) deviceGetHandleByIndexV2(index uint32, out *handle) nvmlsim.Return {
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	g, err := s.machine.ByIndex(int(index))
	return giveGPU(out, g, err)
}

func (s *session) byText(key *string, out *handle, find func(*nvmlsim.Machine, string) (*nvmlsim.GPU, error)) nvmlsim.Return {
	if key == nil || out == nil {
		return nvmlsim.InvalidArgument
	}
	g, err := find(s.machine, *key)
	return giveGPU(out, g, err)
}

// deviceGetHandleByUUID finds GPUs and MIG devices.
func (s *session) deviceGetHandleByUUID(uuid *string, out *handle) nvmlsim.Return {
	if uuid == nil || out == nil {
		return nvmlsim.InvalidArgument
	}
	if nvmlsim.IsMIG(*uuid) {
		c, err := s.machine.MIGDeviceByUUID(*uuid)
		return s.give(out, device{c}, err)
	}
	g, err := s.machine.ByUUID(*uuid)
	return giveGPU(out, g, err)
}

func (s *session) deviceGetHandleByUUIDV(uuid *nvmlUUIDV1, out *handle) nvmlsim.Return {
	if uuid == nil {
		return nvmlsim.InvalidArgument
	}
	if uuid.Version != nvmlUUID_v1 {
		return nvmlsim.ArgumentVersion
	}
	if uuid.Type != NVML_UUID_TYPE_ASCII {
		return nvmlsim.NotSupported
	}
	text, _, _ := strings.Cut(string(uuid.Value[:]), "\x00")
	return s.deviceGetHandleByUUID(&text, out)
}

func (s *session) deviceGetHandleBySerial(serial *string, out *handle) nvmlsim.Return {
	return s.byText(serial, out, (*nvmlsim.Machine).BySerial)
}

func (s *session) deviceGetHandleByPciBusIDV2(busID *string, out *handle) nvmlsim.Return {
	return s.byText(busID, out, (*nvmlsim.Machine).ByPCIBusID)
}
