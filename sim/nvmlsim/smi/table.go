package smi

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// show formats a value of a GPU, or an error as nvidia-smi prints it.
func show[T any](v T, err error) string {
	if err != nil {
		return strings.Trim(cell(nil, err, ""), "[]")
	}
	return fmt.Sprint(v)
}

const (
	ruler   = "+-----------------------------------------+------------------------+----------------------+"
	heading = "+-----------------------------------------------------------------------------------------+"
)

func summary(m *nvmlsim.Machine, gpus []*nvmlsim.GPU, out io.Writer) error {
	d := m.Description()
	var b strings.Builder
	b.WriteString(time.Now().Format("Mon Jan _2 15:04:05 2006") + "       \n")
	fmt.Fprintf(&b, "%s\n| NVIDIA-SMI %-22s Driver Version: %-14s CUDA Version: %-8s |\n%s\n", heading, d.DriverVersion, d.DriverVersion, d.CUDAVersion, ruler)
	b.WriteString("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n")
	b.WriteString("| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n")
	b.WriteString("|                                         |                        |               MIG M. |\n")
	b.WriteString("|=========================================+========================+======================|\n")
	for _, g := range gpus {
		row(&b, g)
	}
	migTable(&b, gpus)
	b.WriteString("\n" + heading + "\n")
	b.WriteString("| Processes:                                                                              |\n")
	b.WriteString("|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n")
	b.WriteString("|        ID   ID                                                               Usage      |\n")
	b.WriteString("|=========================================================================================|\n")
	if !processRows(&b, gpus) {
		b.WriteString("|  No running processes found                                                             |\n")
	}
	b.WriteString(heading + "\n")
	_, err := io.WriteString(out, b.String())
	return err
}

func row(b *strings.Builder, g *nvmlsim.GPU) {
	name := g.Model().ProductName
	if len(name) > 24 {
		name = name[:21] + "..."
	}
	persistence, err := g.PersistenceMode()
	onOff := "Off"
	if persistence {
		onOff = "On "
	}
	ecc := "N/A"
	if g.Model().ECC {
		ecc = "0"
	}
	display := "Off"
	if !g.Model().OnPCI() {
		display = "N/A"
	}
	celsius, celsiusErr := g.Temperature()
	performance, performanceErr := g.PerformanceState()
	mig := show(state("", migMode(false)).get(nil, g))
	fmt.Fprintf(b, "| %3d  %-24s %9s |   %-16s %3s | %20s |\n", index(g), name, wide(onOff, err), busID(g), display, ecc)
	fmt.Fprintf(b, "| N/A %5s  %4s %15s / %5s | %s | %7s %12s |\n", show(fmt.Sprintf("%dC", celsius), celsiusErr), wide(fmt.Sprintf("P%d", performance), performanceErr),
		wide(inWatts(g.PowerUsage())), wide(inWatts(g.PowerLimit())), memoryUsage(g), strings.Replace(percent(g), " %", "%", 1), shortMode(g))
	fmt.Fprintf(b, "| %39s | %22s | %20s |\n%s\n", "", "", mig, ruler)
}

// wide formats a value, or an error with a space after it as nvidia-smi prints "N/A " in
// some columns that are aligned to the right.
func wide(v string, err error) string {
	if err != nil {
		return show(v, err) + " "
	}
	return v
}

func inWatts(milliwatts uint32, err error) (string, error) {
	return fmt.Sprintf("%dW", milliwatts/1000), err
}

// memoryUsage is the column Memory-Usage, "Not Supported" for a GPU that uses the computer's.
func memoryUsage(g *nvmlsim.GPU) string {
	m, err := g.MemoryInfo()
	if errors.Is(err, nvmlsim.NotSupported) {
		return fmt.Sprintf("%-22s", "Not Supported")
	}
	return fmt.Sprintf("%7dMiB / %6dMiB", m.Used/mib, m.Total/mib)
}

// migTable prints the MIG devices of GPUs in MIG mode.
func migTable(b *strings.Builder, gpus []*nvmlsim.GPU) {
	const rule = "+------------------+----------------------------------+-----------+-----------------------+\n"
	rows, on := "", false
	for _, g := range gpus {
		devices, err := g.MIGDevices()
		if err != nil {
			continue // no MIG there, or not on
		}
		on = true
		for i, d := range devices {
			rows += migRow(g, i, d)
			rows += rule
		}
	}
	if !on {
		return
	}
	b.WriteString("\n" + heading + "\n")
	b.WriteString("| MIG devices:                                                                            |\n" + rule)
	b.WriteString("| GPU  GI  CI  MIG |                     Memory-Usage |        Vol|        Shared         |\n")
	b.WriteString("|      ID  ID  Dev |                       BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG |\n")
	b.WriteString("|                  |                                  |        ECC|                       |\n")
	b.WriteString("|==================+==================================+===========+=======================|\n")
	if rows == "" {
		rows = "|  No MIG devices found                                                                   |\n" + heading + "\n"
	}
	b.WriteString(rows)
}

func migRow(g *nvmlsim.GPU, i int, d nvmlsim.Compute) string {
	memory, memoryErr := d.MemoryInfo()
	p, c, err := d.Attributes()
	gi, giErr := d.GPUInstanceID()
	ci, ciErr := d.ComputeInstanceID()
	if errors.Join(memoryErr, err, giErr, ciErr) != nil {
		return "" // gone meanwhile
	}
	return fmt.Sprintf("| %2d  %3d  %2d  %2d  | %13dMiB / %5dMiB    | %3d %6d | %2d %3d %4d %4d %4d  |\n", index(g), gi, ci, i,
		memory.Used/mib, memory.Total/mib, c.MultiprocessorCount, 0, p.CopyEngineCount, p.EncoderCount, p.DecoderCount, p.OFACount, p.JPEGCount) +
		fmt.Sprintf("| %16s | %32s | %9s | %21s |\n", "", "", "", "")
}

// percent is the utilization as nvidia-smi prints it: "N/A" in MIG mode.
func percent(g *nvmlsim.GPU) string {
	n, err := g.Utilization()
	return show(fmt.Sprintf("%d %%", n), err)
}

func shortMode(g *nvmlsim.GPU) string {
	s := show(computeMode(g))
	if s == "Exclusive_Process" {
		return "E. Process"
	}
	return s
}

// processRows prints the processes and reports whether there were any.
func processRows(b *strings.Builder, gpus []*nvmlsim.GPU) bool {
	found := false
	for _, g := range gpus {
		for _, p := range g.AllProcesses() {
			found = true
			kind := "C"
			if p.MPSClient {
				kind = "M+C"
			}
			fmt.Fprintf(b, "| %4d  %4s %4s %16d %6s   %-32s %10dMiB |\n", index(g), instance(p.GPUInstance), instance(p.ComputeInstance), p.PID, kind, p.Name, p.UsedMemory/mib)
		}
	}
	return found
}

func instance(id uint32) string {
	if id == nvmlsim.NoInstance {
		return "N/A"
	}
	return fmt.Sprint(id)
}
