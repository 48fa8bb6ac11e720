package smi

import (
	"fmt"
	"slices"
	"strings"
)

const usage = `NVIDIA System Management Interface, stand-in of a simulated machine

    nvidia-smi [OPTION1 [ARG1]] [OPTION2 [ARG2]] ...

    -h,   --help                Print usage information and exit.
    -L,   --list-gpus           Display a list of GPUs connected to the system.
    -i,   --id=                 Target a specific GPU: index, UUID, PCI bus id or serial.
    -mig 0|1                    Disable or enable MIG mode.
    -c,   --compute-mode=       Set MODE for compute applications: 0/DEFAULT, 2/PROHIBITED, 3/EXCLUSIVE_PROCESS.
    -r,   --gpu-reset           Reset GPUs: a pending MIG mode is taken, instances are gone.
    -q,   --query               Display GPU info.
    -x,   --xml-format          Produce XML output (with -q).
          --query-gpu=          Information about GPU, as a list of fields.
          --format=             csv[,noheader][,nounits] (with --query-gpu).
          --query-compute-apps= List of the processes that compute, as a list of fields.
          --help-query-gpu      The fields of --query-gpu.
`

type options struct {
	list, query, xml  bool
	reset             bool
	mig               string // "0" or "1"
	mode              *uint32
	apps              []string
	ids               []string
	fields            []string
	noHeader, noUnits bool
	format            bool
}

// parse accepts "-i 0", "--id=0" and "--id 0"; like nvidia-smi it refuses
// "-i0".
func parse(args []string) (options, error) {
	var o options
	for i := 0; i < len(args); i++ {
		name, value, inline := strings.Cut(args[i], "=")
		if o.flag(name) {
			if inline {
				return o, fmt.Errorf("Option %s takes no argument.", name) //nolint:staticcheck // nvidia-smi's words
			}
			continue
		}
		if !takesValue(name) {
			return o, fmt.Errorf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n\nOption \"%s\" is not recognized.", args[i]) //nolint:staticcheck // nvidia-smi's words
		}
		if !inline {
			if i++; i == len(args) {
				return o, fmt.Errorf("Option %s is missing its value. Please run 'nvidia-smi -h' for help.", name) //nolint:staticcheck // nvidia-smi's words
			}
			value = args[i]
		}
		if err := o.set(name, value); err != nil {
			return o, err
		}
	}
	return o, o.check()
}

func (o *options) flag(name string) bool {
	switch name {
	case "-L", "--list-gpus":
		o.list = true
	case "-r", "--gpu-reset":
		o.reset = true
	case "-q", "--query":
		o.query = true
	case "-x", "--xml-format":
		o.xml = true
	default:
		return false
	}
	return true
}

func takesValue(name string) bool {
	return slices.Contains([]string{"-mig", "-i", "--id", "--query-gpu", "--format", "-c", "--compute-mode", "--query-compute-apps"}, name)
}

func (o *options) set(name, value string) error {
	parts := strings.Split(value, ",")
	switch name {
	case "-mig":
		if value != "0" && value != "1" {
			return fmt.Errorf("\"%s\" is not a valid value for -mig", value)
		}
		o.mig = value
	case "-c", "--compute-mode":
		mode, ok := parseComputeMode(value)
		if !ok {
			return fmt.Errorf("Invalid value for Compute Mode: %s", value) //nolint:staticcheck // nvidia-smi's words
		}
		o.mode = &mode
	case "--query-compute-apps":
		for _, p := range parts {
			o.apps = append(o.apps, strings.TrimSpace(p))
		}
	case "-i", "--id":
		o.ids = parts
	case "--query-gpu":
		for _, p := range parts {
			o.fields = append(o.fields, strings.TrimSpace(p))
		}
	case "--format":
		for _, p := range parts {
			switch strings.TrimSpace(p) {
			case "csv":
				o.format = true
			case "noheader":
				o.noHeader = true
			case "nounits":
				o.noUnits = true
			default:
				return fmt.Errorf("\"%s\" is not a valid value for --format", p)
			}
		}
	}
	return nil
}

func (o *options) check() error {
	if len(o.fields)+len(o.apps) > 0 && !o.format {
		return fmt.Errorf("Must specify format. Please run 'nvidia-smi -h' for help.") //nolint:staticcheck // nvidia-smi's words
	}
	if o.xml && !o.query {
		return fmt.Errorf("Option -x needs -q. Please run 'nvidia-smi -h' for help.") //nolint:staticcheck // nvidia-smi's words
	}
	return nil
}
