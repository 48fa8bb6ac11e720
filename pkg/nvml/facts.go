package nvml

import (
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Facts returns go-nvml for libraries that describe GPUs (nvcdi): it answers
// from facts that were read before and doesn't call the driver, so that a GPU
// that doesn't respond can't block the description of another. It has only the
// calls that describe whole GPUs; any other call panics.
func Facts(driverVersion string, gpus []gpu.GPU) gonvml.Interface {
	return facts{version: driverVersion, gpus: gpus}
}

type facts struct {
	gonvml.Interface
	version string
	gpus    []gpu.GPU
}

func (facts) Init() gonvml.Return     { return gonvml.SUCCESS }
func (facts) Shutdown() gonvml.Return { return gonvml.SUCCESS }

func (f facts) SystemGetDriverVersion() (string, gonvml.Return) { return f.version, gonvml.SUCCESS }

func (f facts) DeviceGetHandleByUUID(uuid string) (gonvml.Device, gonvml.Return) {
	i := slices.IndexFunc(f.gpus, func(g gpu.GPU) bool { return string(g.UUID) == uuid })
	if i < 0 {
		return nil, gonvml.ERROR_NOT_FOUND
	}
	return factsDevice{g: f.gpus[i]}, gonvml.SUCCESS
}

type factsDevice struct {
	gonvml.Device
	g gpu.GPU
}

func (d factsDevice) GetUUID() (string, gonvml.Return)         { return string(d.g.UUID), gonvml.SUCCESS }
func (d factsDevice) GetIndex() (int, gonvml.Return)           { return d.g.Index, gonvml.SUCCESS }
func (d factsDevice) GetMinorNumber() (int, gonvml.Return)     { return d.g.Minor, gonvml.SUCCESS }
func (d factsDevice) IsMigDeviceHandle() (bool, gonvml.Return) { return false, gonvml.SUCCESS }

func (d factsDevice) GetPciInfo() (gonvml.PciInfo, gonvml.Return) {
	var info gonvml.PciInfo
	for i := range min(len(d.g.PCI), len(info.BusId)-1) {
		info.BusId[i] = int8(d.g.PCI[i]) // ASCII
	}
	return info, gonvml.SUCCESS
}
