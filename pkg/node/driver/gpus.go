package driver

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// devDir is the directory of the driver's device nodes, as this process sees it.
func devDir(host driverroot.Host, root driverroot.Root) string {
	return host.Path(filepath.Join(root.DevRoot, "dev"))
}

// Reading is the result of one reading of a node.
type Reading struct {
	Node    gpu.Node
	Listing facts.Listing
	// Unread are the GPUs that were being changed. Node has them as they were last read.
	Unread []gpu.UUID
}

// ReadNode reads the node's driver and GPUs. A GPU with a problem is in the list with a
// condition that says so, and one that can't be identified is counted; the error is about
// the node as a whole.
func ReadNode(nodeName string, host driverroot.Host, root driverroot.Root, session *nvml.Session) (Reading, error) {
	driver, err := session.Driver()
	if err != nil {
		return Reading{}, err
	}
	list, err := session.List()
	if err != nil {
		return Reading{}, err
	}
	sys, dev := host.Path(filepath.Join(root.SysRoot, "sys")), devDir(host, root)
	names := gpu.NameAll(list.GPUs)
	for i := range list.GPUs {
		g := &list.GPUs[i]
		placeInHost(g, sys)
		g.Conditions = append(g.Conditions, unusable(*g, names, dev)...)
	}
	node := gpu.Node{
		Name:              nodeName,
		DriverVersion:     driver.Version,
		CUDADriverVersion: driver.CUDAVersion,
		GPUs:              list.GPUs,
	}
	return Reading{Node: node, Listing: counted(list), Unread: list.Unread}, nil
}

// unusable returns the conditions of a GPU that follow from its UUID and its device node.
func unusable(g gpu.GPU, names *gpu.Names, dev string) []gpu.Condition {
	var all []gpu.Condition
	switch _, ok := names.Name(gpu.Whole{GPU: g.UUID}); {
	case ok:
	case !g.UUID.IsWhole():
		all = append(all, gpu.Condition{Type: gpu.UnusableUUID, Message: fmt.Sprintf(
			"the GPU's UUID %s doesn't begin with GPU-: it is an integrated GPU (Orin, Thor), and Tessera doesn't serve these", g.UUID)})
	default:
		all = append(all, gpu.Condition{Type: gpu.UnusableUUID, Message: fmt.Sprintf(
			"no device can be named after the GPU's UUID %s: it doesn't have the form GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, or another GPU has it too", g.UUID)})
	}
	switch {
	case facts.Dead(g) != nil: // it may never have been read
	case g.Minor < 0 && missingNode(dev, dxg) == "":
		all = append(all, gpu.Condition{Type: gpu.DeviceNodeMissing, Message: "the GPU has no device node: this is Windows Subsystem for Linux, " +
			"where programs use GPUs through /dev/" + dxg + ", and Tessera doesn't serve GPUs there"})
	case g.Minor < 0:
		all = append(all, gpu.Condition{Type: gpu.DeviceNodeMissing, Message: "NVML doesn't say which device node is the GPU's (nvmlDeviceGetMinorNumber: not supported)"})
	default:
		if missing := missingNode(dev, append(controlNodes(), fmt.Sprintf("nvidia%d", g.Minor))...); missing != "" {
			all = append(all, gpu.Condition{
				Type: gpu.DeviceNodeMissing, Message: fmt.Sprintf("device node /dev/%s isn't there (nvidia-modprobe -u -c0 makes it)", missing),
			})
		}
	}
	return all
}

// counted returns how many of the GPUs that NVML lists are identified.
func counted(list nvml.Listing) facts.Listing {
	l := facts.Listing{Listed: list.Count, Identified: list.Count - len(list.Unidentified)}
	var why []string
	for _, index := range slices.Sorted(maps.Keys(list.Unidentified)) {
		why = append(why, list.Unidentified[index].Error())
	}
	l.Message = strings.Join(why, "; ")
	return l
}

// placeInHost sets the GPU's PCIe root and NUMA node from sysfs; in virtual machines they
// are often unknown. The functions of package deviceattribute accept no PCI domain of more
// than four digits, which Azure and Intel's VMD have.
func placeInHost(g *gpu.GPU, sys string) {
	device := filepath.Join(sys, "bus/pci/devices", string(g.PCI))
	if g.PCI == "" {
		return
	}
	if target, err := os.Readlink(device); err == nil { // ../../../devices/pci0000:00/…/0000:07:00.0
		_, path, _ := strings.Cut(target, "devices/")
		if root, _, _ := strings.Cut(path, "/"); strings.HasPrefix(root, "pci") {
			g.PCIeRoot = root
		}
	}
	if text, err := os.ReadFile(filepath.Join(device, "numa_node")); err == nil {
		if node, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && node >= 0 {
			g.NUMANode = &node
		}
	}
}

// controlNodes are the device nodes that all containers with a GPU need.
func controlNodes() []string { return []string{"nvidiactl", "nvidia-uvm"} }

// dxg is the device node of all GPUs in Windows Subsystem for Linux.
const dxg = "dxg"

// missingControlNode returns the first of controlNodes that isn't in a directory
// of device nodes, "" where all are.
func missingControlNode(dev string) string { return missingNode(dev, controlNodes()...) }

// missingNode returns the first of the device nodes that isn't there.
func missingNode(dev string, names ...string) string {
	for _, name := range names {
		info, err := os.Stat(filepath.Join(dev, name))
		if err != nil || info.Mode()&fs.ModeCharDevice == 0 {
			return name
		}
	}
	return ""
}
