package smi

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

// show is a value of a GPU, or how nvidia-smi says that there is none.
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
		onOff = "On"
	}
	ecc := "N/A"
	if g.Model().ECC {
		ecc = "0"
	}
	mem, _ := g.MemoryInfo()
	draw, _ := g.PowerUsage()
	limit, _ := g.PowerLimit()
	temperature, _ := g.Temperature()
	mig := show(state("", migMode(false)).get(nil, g))
	fmt.Fprintf(b, "| %3d  %-24s %9s | %16s %5s | %20s |\n", index(g), name, show(onOff, err), busID(g), "Off", ecc)
	fmt.Fprintf(b, "| N/A  %3dC    P0 %14dW / %4dW | %7dMiB / %6dMiB | %7s %12s |\n",
		temperature, draw/1000, limit/1000, mem.Used/mib, mem.Total/mib, "0%", shortMode(g))
	fmt.Fprintf(b, "| %39s | %22s | %20s |\n%s\n", "", "", mig, ruler)
}

func shortMode(g *nvmlsim.GPU) string {
	s := show(computeMode(g))
	if s == "Exclusive_Process" {
		return "E. Process"
	}
	return s
}

// processRows says whether there were any.
func processRows(b *strings.Builder, gpus []*nvmlsim.GPU) bool {
	found := false
	for _, g := range gpus {
		all, _ := g.Processes()
		for _, p := range all {
			found = true
			fmt.Fprintf(b, "| %4d  %4s %4s %16d %6s   %-32s %10dMiB |\n", index(g), instance(p.GPUInstance), instance(p.ComputeInstance), p.PID, "C", p.Name, p.UsedMemory/mib)
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
