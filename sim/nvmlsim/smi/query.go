package smi

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// node is an element of -q: a heading with its children, or a value. The text
// and the XML form show the same tree.
type node struct {
	// Title in the text form, tag in the XML form.
	title, tag string
	value      string
	under      []node
	// attribute of the XML element.
	attribute xml.Attr
}

func leaf(title, tag, value string) node { return node{title: title, tag: tag, value: value} }

func tree(m *nvmlsim.Machine, gpus []*nvmlsim.GPU) node {
	d := m.Description()
	root := node{tag: "nvidia_smi_log", under: []node{
		leaf("Timestamp", "timestamp", time.Now().Format("Mon Jan _2 15:04:05 2006")),
		leaf("Driver Version", "driver_version", d.DriverVersion),
		leaf("CUDA Version", "cuda_version", d.CUDAVersion),
		leaf("Attached GPUs", "attached_gpus", fmt.Sprint(len(m.GPUs()))),
	}}
	for _, g := range gpus {
		root.under = append(root.under, gpuTree(g))
	}
	return root
}

func gpuTree(g *nvmlsim.GPU) node {
	model := g.Model()
	current, pending, migErr := g.MIGMode()
	return node{
		title: "GPU " + busID(g), tag: "gpu", attribute: xml.Attr{Name: xml.Name{Local: "id"}, Value: busID(g)},
		under: []node{
			leaf("Product Name", "product_name", show(g.Name())),
			leaf("Product Brand", "product_brand", model.Brand),
			leaf("Product Architecture", "product_architecture", model.Architecture),
			leaf("Persistence Mode", "persistence_mode", show(state("", (*nvmlsim.GPU).PersistenceMode).get(nil, g))),
			leaf("Addressing Mode", "addressing_mode", strings.Replace(model.AddressingMode, "none", "None", 1)),
			{title: "MIG Mode", tag: "mig_mode", under: []node{
				leaf("Current", "current_mig", show(enabled(current), migErr)),
				leaf("Pending", "pending_mig", show(enabled(pending), migErr)),
			}},
			leaf("Serial Number", "serial", show(g.Serial())),
			leaf("GPU UUID", "uuid", show(g.UUID())),
			leaf("Minor Number", "minor_number", show(g.MinorNumber())),
			leaf("VBIOS Version", "vbios_version", show(g.VBIOSVersion())),
			leaf("GPU Recovery Action", "gpu_recovery_action", show(g.RecoveryAction())),
			pciTree(g),
			memoryTree(g),
			leaf("Compute Mode", "compute_mode", show(computeMode(g))),
			{title: "Utilization", tag: "utilization", under: []node{leaf("GPU", "gpu_util", percent(g)), leaf("Memory", "memory_util", "0 %")}},
			{title: "ECC Mode", tag: "ecc_mode", under: []node{leaf("Current", "current_ecc", show(state("", (*nvmlsim.GPU).ECCMode).get(nil, g)))}},
			{title: "Temperature", tag: "temperature", under: []node{leaf("GPU Current Temp", "gpu_temp", degrees(g.Temperature()))}},
			{title: "GPU Power Readings", tag: "gpu_power_readings", under: []node{
				leaf("Average Power Draw", "average_power_draw", power(g, (*nvmlsim.GPU).PowerUsage)),
				leaf("Current Power Limit", "current_power_limit", power(g, (*nvmlsim.GPU).PowerLimit)),
			}},
			processTree(g),
		},
	}
}

func pciTree(g *nvmlsim.GPU) node {
	p, err := g.PCIInfo()
	hex := func(digits int, v uint32) string { return show(fmt.Sprintf("0x%0*X", digits, v), err) }
	return node{title: "PCI", tag: "pci", under: []node{
		leaf("Bus", "pci_bus", hex(2, p.Bus)),
		leaf("Device", "pci_device", hex(2, p.Device)),
		leaf("Domain", "pci_domain", hex(4, p.Domain)),
		leaf("Device Id", "pci_device_id", hex(8, g.Model().PCIDeviceID)),
		leaf("Bus Id", "pci_bus_id", show(p.BusID(), err)),
		leaf("Sub System Id", "pci_sub_system_id", hex(8, g.Model().PCISubSystemID)),
	}}
}

func degrees(celsius uint32, err error) string { return show(fmt.Sprintf("%d C", celsius), err) }

func power(g *nvmlsim.GPU, get func(*nvmlsim.GPU) (uint32, error)) string {
	w, err := watts(get)(g)
	return show(w+" W", err)
}

func memoryTree(g *nvmlsim.GPU) node {
	i, err := g.MemoryInfo()
	in := func(v uint64) string { return show(fmt.Sprintf("%d MiB", v/mib), err) }
	return node{title: "FB Memory Usage", tag: "fb_memory_usage", under: []node{
		leaf("Total", "total", in(i.Total)), leaf("Reserved", "reserved", in(i.Reserved)),
		leaf("Used", "used", in(i.Used)), leaf("Free", "free", in(i.Free)),
	}}
}

func processTree(g *nvmlsim.GPU) node {
	n := node{title: "Processes", tag: "processes", value: "None"}
	for _, p := range g.AllProcesses() {
		n.value = ""
		n.under = append(n.under, node{title: "Process ID " + fmt.Sprint(p.PID), tag: "process_info", under: []node{
			leaf("Process ID", "pid", fmt.Sprint(p.PID)), leaf("Name", "process_name", p.Name),
			leaf("Used GPU Memory", "used_memory", fmt.Sprintf("%d MiB", p.UsedMemory/mib)),
		}})
	}
	return n
}

func queryText(m *nvmlsim.Machine, gpus []*nvmlsim.GPU, out io.Writer) error {
	var b strings.Builder
	b.WriteString("\n==============NVSMI LOG==============\n\n")
	for _, n := range tree(m, gpus).under {
		if n.tag == "gpu" {
			b.WriteString("\n")
		}
		n.text(&b, 0)
	}
	b.WriteString("\n")
	_, err := io.WriteString(out, b.String())
	return err
}

func (n node) text(b *strings.Builder, depth int) {
	indent := strings.Repeat("    ", depth)
	if n.under == nil {
		fmt.Fprintf(b, "%-50s: %s\n", indent+n.title, n.value)
		return
	}
	b.WriteString(indent + n.title + "\n")
	for _, u := range n.under {
		u.text(b, depth+1)
	}
}

func queryXML(m *nvmlsim.Machine, gpus []*nvmlsim.GPU, out io.Writer) error {
	if _, err := io.WriteString(out, "<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">\n"); err != nil {
		return err
	}
	e := xml.NewEncoder(out)
	e.Indent("", "\t")
	if err := tree(m, gpus).xml(e); err != nil {
		return err
	}
	if err := e.Close(); err != nil {
		return err
	}
	_, err := io.WriteString(out, "\n")
	return err
}

func (n node) xml(e *xml.Encoder) error {
	start := xml.StartElement{Name: xml.Name{Local: n.tag}}
	if n.attribute.Value != "" {
		start.Attr = []xml.Attr{n.attribute}
	}
	if n.under == nil {
		return e.EncodeElement(n.value, start)
	}
	if err := e.EncodeToken(start); err != nil {
		return err
	}
	for _, u := range n.under {
		if err := u.xml(e); err != nil {
			return err
		}
	}
	return e.EncodeToken(start.End())
}
