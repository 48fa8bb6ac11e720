package smi

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// field is one column of --query-gpu.
type field struct {
	header, unit string
	get          func(*nvmlsim.Machine, *nvmlsim.GPU) (any, error)
}

const mib = 1 << 20

func plain[T any](header string, get func(*nvmlsim.GPU) (T, error)) field {
	return field{header: header, get: func(_ *nvmlsim.Machine, g *nvmlsim.GPU) (any, error) { return get(g) }}
}

func measured[T any](header, unit string, get func(*nvmlsim.GPU) (T, error)) field {
	f := plain(header, get)
	f.unit = unit
	return f
}

func memory(header string, part func(nvmlsim.MemoryInfo) uint64) field {
	return measured(header, "MiB", func(g *nvmlsim.GPU) (uint64, error) {
		i, err := g.MemoryInfo()
		return part(i) / mib, err
	})
}

func state(header string, get func(*nvmlsim.GPU) (bool, error)) field {
	return plain(header, func(g *nvmlsim.GPU) (string, error) {
		on, err := get(g)
		return enabled(on), err
	})
}

func enabled(on bool) string {
	if on {
		return "Enabled"
	}
	return "Disabled"
}

// idle returns zero, for values that are zero on an idle GPU.
func idle(g *nvmlsim.GPU) (uint32, error) {
	_, err := g.Index()
	return 0, err
}

// column finds a field by one of its names.
func column(name string) (field, bool) {
	switch name {
	case "index":
		return plain("index", (*nvmlsim.GPU).Index), true
	case "name", "gpu_name":
		return plain("name", (*nvmlsim.GPU).Name), true
	case "uuid", "gpu_uuid":
		return plain("uuid", (*nvmlsim.GPU).UUID), true
	case "serial", "gpu_serial":
		return plain("serial", (*nvmlsim.GPU).Serial), true
	case "count":
		return field{header: "count", get: func(m *nvmlsim.Machine, _ *nvmlsim.GPU) (any, error) { return m.Count() }}, true
	case "timestamp":
		return plain("timestamp", func(*nvmlsim.GPU) (string, error) { return time.Now().Format("2006/01/02 15:04:05.000"), nil }), true
	case "driver_version":
		return field{header: "driver_version", get: func(m *nvmlsim.Machine, _ *nvmlsim.GPU) (any, error) { return m.DriverVersion() }}, true
	case "pci.bus_id", "gpu_bus_id":
		return plain("pci.bus_id", func(g *nvmlsim.GPU) (string, error) {
			p, err := g.PCIInfo()
			return p.BusID(), err
		}), true
	case "pci.device_id":
		return plain("pci.device_id", func(g *nvmlsim.GPU) (string, error) { return fmt.Sprintf("0x%08X", g.Model().PCIDeviceID), nil }), true
	case "pci.sub_device_id":
		return plain("pci.sub_device_id", func(g *nvmlsim.GPU) (string, error) { return fmt.Sprintf("0x%08X", g.Model().PCISubSystemID), nil }), true
	case "compute_cap":
		return plain("compute_cap", func(g *nvmlsim.GPU) (string, error) { return g.Model().CUDAComputeCapability, nil }), true
	case "vbios_version":
		return plain("vbios_version", (*nvmlsim.GPU).VBIOSVersion), true
	}
	return changing(name)
}

// changing returns the fields for changeable state.
func changing(name string) (field, bool) {
	switch name {
	case "memory.total":
		return memory("memory.total", func(i nvmlsim.MemoryInfo) uint64 { return i.Total }), true
	case "memory.used":
		return memory("memory.used", func(i nvmlsim.MemoryInfo) uint64 { return i.Used }), true
	case "memory.free":
		return memory("memory.free", func(i nvmlsim.MemoryInfo) uint64 { return i.Free }), true
	case "memory.reserved":
		return memory("memory.reserved", func(i nvmlsim.MemoryInfo) uint64 { return i.Reserved }), true
	case "mig.mode.current":
		return state("mig.mode.current", migMode(false)), true
	case "mig.mode.pending":
		return state("mig.mode.pending", migMode(true)), true
	case "persistence_mode":
		return state("persistence_mode", (*nvmlsim.GPU).PersistenceMode), true
	case "ecc.mode.current", "ecc.mode.pending":
		return state(name, (*nvmlsim.GPU).ECCMode), true
	case "compute_mode":
		return plain("compute_mode", computeMode), true
	case "utilization.gpu":
		return measured(name, "%", (*nvmlsim.GPU).Utilization), true
	case "utilization.memory":
		return measured(name, "%", idle), true
	case "temperature.gpu":
		return plain("temperature.gpu", (*nvmlsim.GPU).Temperature), true
	case "power.draw":
		return measured("power.draw", "W", watts((*nvmlsim.GPU).PowerUsage)), true
	case "power.limit":
		return measured("power.limit", "W", watts((*nvmlsim.GPU).PowerLimit)), true
	case "pstate":
		return plain("pstate", func(g *nvmlsim.GPU) (string, error) {
			state, err := g.PerformanceState()
			return fmt.Sprintf("P%d", state), err
		}), true
	}
	return field{}, false
}

func migMode(pending bool) func(*nvmlsim.GPU) (bool, error) {
	return func(g *nvmlsim.GPU) (bool, error) {
		now, next, err := g.MIGMode()
		return now && !pending || next && pending, err
	}
}

func watts(get func(*nvmlsim.GPU) (uint32, error)) func(*nvmlsim.GPU) (string, error) {
	return func(g *nvmlsim.GPU) (string, error) {
		mw, err := get(g)
		return fmt.Sprintf("%.2f", float64(mw)/1000), err
	}
}

func computeMode(g *nvmlsim.GPU) (string, error) {
	mode, err := g.ComputeMode()
	switch mode {
	case 2:
		return "Prohibited", err
	case 3:
		return "Exclusive_Process", err
	}
	return "Default", err
}

// cell formats a value or an error as nvidia-smi prints it.
func cell(v any, err error, unit string) string {
	switch {
	case errors.Is(err, nvmlsim.NotSupported):
		return "[N/A]"
	case errors.Is(err, nvmlsim.GPUIsLost):
		return "[GPU is lost]"
	case err != nil:
		return "[Unknown Error]"
	}
	s := fmt.Sprint(v)
	if unit != "" {
		s += " " + unit
	}
	return s
}

func queryFields(o options, m *nvmlsim.Machine, gpus []*nvmlsim.GPU, out io.Writer) (int, error) {
	columns := make([]field, len(o.fields))
	headers := make([]string, len(o.fields))
	for i, name := range o.fields {
		f, ok := column(name)
		if !ok {
			return exitBadArgument, fmt.Errorf("Field \"%s\" is not a valid field to query.\n", name) //nolint:staticcheck // nvidia-smi's words
		}
		headers[i] = f.header
		if o.noUnits {
			if f.unit != "" {
				headers[i] += " [" + f.unit + "]"
			}
			f.unit = ""
		} else if f.unit != "" {
			headers[i] += " [" + f.unit + "]"
		}
		columns[i] = f
	}
	if !o.noHeader {
		if _, err := fmt.Fprintln(out, strings.Join(headers, ", ")); err != nil {
			return exitUnknown, err
		}
	}
	for _, g := range gpus {
		cells := make([]string, len(columns))
		for i, f := range columns {
			v, err := f.get(m, g)
			cells[i] = cell(v, err, f.unit)
		}
		if _, err := fmt.Fprintln(out, strings.Join(cells, ", ")); err != nil {
			return exitUnknown, err
		}
	}
	return exitOK, nil
}
