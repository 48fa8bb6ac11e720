package smi

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// policyOptions holds the options of "nvidia-smi compute-policy".
type policyOptions struct {
	ids   []string
	list  bool
	slice string // argument of --set-timeslice, "" if not given
}

const policyUsage = `
    Compute Policy -- Control and list compute policies.

    Usage: nvidia-smi compute-policy [options]

    Options include:
    [-i | --id]: GPU device ID's. Provide comma
                 separated values for more than one device

    [-l | --list]: List all compute policies

    [ | --set-timeslice]: Set timeslice config for a GPU:
                          0=DEFAULT, 1=SHORT, 2=MEDIUM, 3=LONG

    [-h | --help]: Display help information

`

func parsePolicy(args []string) (policyOptions, error) {
	var o policyOptions
	for i := 0; i < len(args); i++ {
		name, value, inline := strings.Cut(args[i], "=")
		switch name {
		case "-l", "--list":
			o.list = true
			continue
		case "-i", "--id", "--set-timeslice":
		default:
			return o, fmt.Errorf("Option \"%s\" is not recognized. Please run 'nvidia-smi compute-policy -h' for help.", args[i]) //nolint:staticcheck // nvidia-smi's words
		}
		if !inline {
			if i++; i == len(args) {
				return o, fmt.Errorf("Option %s is missing its value. Please run 'nvidia-smi compute-policy -h' for help.", name) //nolint:staticcheck // nvidia-smi's words
			}
			value = args[i]
		}
		if name == "--set-timeslice" {
			o.slice = value
		} else {
			o.ids = strings.Split(value, ",")
		}
	}
	if !o.list && o.slice == "" {
		return o, errors.New(policyUsage) //nolint:staticcheck // nvidia-smi's words
	}
	return o, nil
}

// runPolicy is "nvidia-smi compute-policy".
func runPolicy(o policyOptions, m *nvmlsim.Machine, out io.Writer) (int, error) {
	gpus, err := pick(m, o.ids)
	if err == nil && len(gpus) == 0 {
		err = errors.New("No devices were found") //nolint:staticcheck // nvidia-smi's words
	}
	if err != nil {
		return exitNotFound, err
	}
	if o.slice != "" {
		return setTimeSlice(gpus, o.slice, out)
	}
	return listPolicies(gpus, out)
}

// timeSlice returns the name of a time slice.
func timeSlice(n uint32) string {
	names := []string{"Default", "Short", "Medium", "Long"}
	if int(n) >= len(names) {
		return "Unknown"
	}
	return names[n]
}

func setTimeSlice(gpus []*nvmlsim.GPU, value string, out io.Writer) (int, error) {
	n, err := strconv.ParseUint(value, 10, 31)
	if err != nil {
		n = 1 << 31 // no time slice
	}
	for _, g := range gpus {
		if err := g.SetTimeSlice(uint32(n)); err != nil {
			code := nvmlsim.Code(err)
			fmt.Fprintf(out, "Failed to set timeslice policy with value %s for GPU %d : %s\n", timeSlice(uint32(n)), index(g), code.Error())
			return int(code), fmt.Errorf("Failed to set timeslice for requested devices : %s", code.Error()) //nolint:staticcheck // nvidia-smi's words
		}
		if _, err := fmt.Fprintf(out, "Successfully set timeslice policy with value %s for GPU %d\n", timeSlice(uint32(n)), index(g)); err != nil {
			return exitUnknown, err
		}
	}
	return exitOK, nil
}

func listPolicies(gpus []*nvmlsim.GPU, out io.Writer) (int, error) {
	const rule = "+-------------------------------------+\n"
	var b strings.Builder
	b.WriteString(rule + "| GPU compute policies:               |\n| GPU     Name           Value        |\n|=====================================|\n")
	for _, g := range gpus {
		n, err := g.TimeSlice()
		if err != nil {
			code := nvmlsim.Code(err)
			return int(code), fmt.Errorf("Failed to list compute policies for GPU %d : %s", index(g), code.Error()) //nolint:staticcheck // nvidia-smi's words
		}
		fmt.Fprintf(&b, "|%4d   %-16s%-14s|\n", index(g), "Timeslice", timeSlice(n))
		b.WriteString(rule)
	}
	_, err := io.WriteString(out, b.String())
	return exitOK, err
}

// computeModes returns the arguments of -c, by value: the mode's number or
// name.
func computeModes() []string {
	return []string{"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"}
}

// parseComputeMode returns false for an unknown mode.
func parseComputeMode(value string) (uint32, bool) {
	if i := slices.Index(computeModes(), strings.ToUpper(value)); i >= 0 {
		return uint32(i), true
	}
	n, err := strconv.ParseUint(value, 10, 8)
	return uint32(n), err == nil && int(n) < len(computeModes())
}

// setComputeMode is "nvidia-smi -c".
func setComputeMode(gpus []*nvmlsim.GPU, mode uint32, out io.Writer) (int, error) {
	for _, g := range gpus {
		if before, err := g.ComputeMode(); err == nil && before == mode {
			fmt.Fprintf(out, "Compute mode is already set to %s for GPU %s.\n", computeModes()[mode], busID(g))
			continue
		}
		if err := g.SetComputeMode(mode); err != nil {
			code := nvmlsim.Code(err)
			return int(code), fmt.Errorf("Unable to set the compute mode for GPU %s: %s", busID(g), code.Error()) //nolint:staticcheck // nvidia-smi's words
		}
		fmt.Fprintf(out, "Set compute mode to %s for GPU %s.\n", computeModes()[mode], busID(g))
	}
	_, err := io.WriteString(out, "All done.\n")
	return exitOK, err
}

// queryApps is "nvidia-smi --query-compute-apps".
func queryApps(o options, gpus []*nvmlsim.GPU, out io.Writer) (int, error) {
	headers := make([]string, len(o.apps))
	for i, name := range o.apps {
		header, ok := map[string]string{
			"pid": "pid", "process_name": "process_name", "name": "process_name",
			"used_gpu_memory": "used_gpu_memory [MiB]", "used_memory": "used_gpu_memory [MiB]", "gpu_uuid": "gpu_uuid",
		}[name]
		if !ok {
			return exitBadArgument, fmt.Errorf("Field \"%s\" is not a valid field to query.\n", name) //nolint:staticcheck // nvidia-smi's words
		}
		headers[i] = header
	}
	var b strings.Builder
	if !o.noHeader {
		fmt.Fprintln(&b, strings.Join(headers, ", "))
	}
	for _, g := range gpus {
		for _, p := range g.AllProcesses() {
			cells := make([]string, len(headers))
			for i, header := range headers {
				cells[i] = appCell(header, g, p, o.noUnits)
			}
			fmt.Fprintln(&b, strings.Join(cells, ", "))
		}
	}
	_, err := io.WriteString(out, b.String())
	return exitOK, err
}

func appCell(header string, g *nvmlsim.GPU, p nvmlsim.Process, noUnits bool) string {
	switch header {
	case "pid":
		return strconv.FormatUint(uint64(p.PID), 10)
	case "process_name":
		return p.Name
	case "gpu_uuid":
		return g.Identity().UUID
	}
	s := strconv.FormatUint(p.UsedMemory/mib, 10)
	if !noUnits {
		s += " MiB"
	}
	return s
}
