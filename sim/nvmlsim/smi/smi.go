// Package smi simulates nvidia-smi: the options that people and programs use
// most, with the real program's wording and exit codes. It reads the machine in
// process (nvmlsim.OpenInstalled selects the visible GPUs) and needs neither a
// C library nor libnvidia-ml.so.1. Like the real program it refuses unknown
// options.
package smi

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// Exit codes of nvidia-smi.
const (
	exitOK          = 0
	exitBadArgument = 2
	exitNotFound    = 6
	exitNoDriver    = 9
	exitUnknown     = 255
)

// Run runs nvidia-smi with args, without the program's name, and returns the
// exit code.
func Run(args []string, out io.Writer, open func() (*nvmlsim.Machine, error)) int {
	if len(args) > 0 && args[0] == "compute-policy" && (slices.Contains(args, "-h") || slices.Contains(args, "--help")) {
		fmt.Fprint(out, policyUsage)
		return exitOK
	}
	if slices.Contains(args, "-h") || slices.Contains(args, "--help") || slices.Contains(args, "--help-query-gpu") {
		fmt.Fprint(out, usage+migUsage)
		return exitOK
	}
	act, err := command(args)
	if err != nil {
		fmt.Fprintf(out, "%s\n\n", err)
		return exitBadArgument
	}
	m, err := open()
	if err == nil {
		err = m.Init()
	}
	if err != nil {
		return noDriver(out, err)
	}
	defer m.Close()
	code, err := act(m, out)
	if err != nil {
		fmt.Fprintln(out, err)
	}
	return code
}

// action is the operation of a command line; its result is the exit code.
type action func(*nvmlsim.Machine, io.Writer) (int, error)

func command(args []string) (action, error) {
	if len(args) > 0 && args[0] == "mig" {
		o, err := parseMIG(args[1:])
		return func(m *nvmlsim.Machine, out io.Writer) (int, error) { return runMIG(o, m, out) }, err
	}
	if len(args) > 0 && args[0] == "compute-policy" {
		o, err := parsePolicy(args[1:])
		return func(m *nvmlsim.Machine, out io.Writer) (int, error) { return runPolicy(o, m, out) }, err
	}
	o, err := parse(args)
	return func(m *nvmlsim.Machine, out io.Writer) (int, error) { return run(o, m, out) }, err
}

func noDriver(out io.Writer, err error) int {
	if errors.Is(err, nvmlsim.DriverNotLoaded) {
		fmt.Fprint(out, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n\n")
		return exitNoDriver
	}
	fmt.Fprintf(out, "Failed to initialize NVML: %s\n", nvmlsim.Code(err).Error())
	return exitUnknown
}

func run(o options, m *nvmlsim.Machine, out io.Writer) (int, error) {
	gpus, err := pick(m, o.ids)
	if err != nil {
		return exitNotFound, err
	}
	if len(gpus) == 0 && !o.list {
		return exitNotFound, errors.New("No devices were found") //nolint:staticcheck // nvidia-smi's words
	}
	for _, g := range gpus {
		if _, err := m.ByIndex(index(g)); err != nil && (!o.reset || !errors.Is(err, nvmlsim.ResetRequired)) {
			return int(nvmlsim.Code(err)), fmt.Errorf("Unable to determine the device handle for GPU%d: %s: %w", index(g), busID(g), err) //nolint:staticcheck // nvidia-smi's words
		}
	}
	switch {
	case o.mig != "":
		return setMIGMode(gpus, o.mig == "1", out)
	case o.mode != nil:
		return setComputeMode(gpus, *o.mode, out)
	case len(o.apps) > 0:
		return queryApps(o, gpus, out)
	case o.reset:
		return reset(gpus, out)
	case o.list:
		return exitOK, list(gpus, out)
	case o.query && o.xml:
		return exitOK, queryXML(m, gpus, out)
	case o.query:
		return exitOK, queryText(m, gpus, out)
	case len(o.fields) > 0:
		return queryFields(o, m, gpus, out)
	}
	return exitOK, summary(m, gpus, out)
}

const resetInUse = `
%d device is currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, graphics application such as an X server, or a monitoring application such as another instance of nvidia-smi). Please first kill all processes using this device and all compute applications running in the system.
`

// reset is "nvidia-smi --gpu-reset". Each failure exits with 255, as the refusal of a GPU
// in use does (NVIDIA/NVSentinel#1690); the form of the others is assumed.
func reset(gpus []*nvmlsim.GPU, out io.Writer) (int, error) {
	var done, failed strings.Builder
	used := 0
	for _, g := range gpus {
		if err := g.ResetIdle(); err != nil {
			fmt.Fprintf(&failed, "  GPU %s: %s\n", busID(g), nvmlsim.Code(err))
			if errors.Is(err, nvmlsim.InUse) {
				used++
			}
			continue
		}
		fmt.Fprintf(&done, "GPU %s was successfully reset.\n", busID(g))
	}
	code := exitOK
	switch {
	case failed.Len() == 0:
		done.WriteString("All done.\n")
	case used > 0:
		fmt.Fprintf(&failed, resetInUse, used)
		fallthrough
	default:
		code = exitUnknown
		fmt.Fprintf(&done, "The following GPUs could not be reset:\n%s", failed.String())
	}
	_, err := io.WriteString(out, done.String())
	return code, err
}

// pick returns the GPUs named by -i, or all.
func pick(m *nvmlsim.Machine, ids []string) ([]*nvmlsim.GPU, error) {
	if len(ids) == 0 {
		return m.GPUs(), nil
	}
	var gpus []*nvmlsim.GPU
	for _, id := range ids {
		i := slices.IndexFunc(m.GPUs(), func(g *nvmlsim.GPU) bool {
			want := strings.ToLower(id)
			return want == fmt.Sprint(index(g)) || id == g.Identity().UUID || id == g.Identity().Serial ||
				want == g.Identity().BusID || want == strings.ToLower(busID(g))
		})
		if i < 0 {
			return nil, fmt.Errorf("No devices were found") //nolint:staticcheck // nvidia-smi's words
		}
		gpus = append(gpus, m.GPUs()[i])
	}
	return gpus, nil
}

// index and busID make no call, which a GPU that is lost would refuse.
func index(g *nvmlsim.GPU) int { return g.VisibleIndex() }

func busID(g *nvmlsim.GPU) string {
	if !g.Model().OnPCI() {
		return "N/A"
	}
	return g.Identity().PCI().BusID()
}

func list(gpus []*nvmlsim.GPU, out io.Writer) error {
	var b strings.Builder
	for _, g := range gpus {
		fmt.Fprintf(&b, "GPU %d: %s (UUID: %s)\n", index(g), g.Model().ProductName, g.Identity().UUID)
		devices, err := g.MIGDevices()
		if err != nil {
			continue // no MIG, or not on
		}
		for i, d := range devices {
			name, err := d.ProfileName()
			if err != nil {
				continue // destroyed in the meantime
			}
			uuid, _ := d.UUID()
			fmt.Fprintf(&b, "  MIG %-11s Device %2d: (UUID: %s)\n", name, i, uuid)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}
