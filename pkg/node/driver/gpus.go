package driver

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// devDir is the directory of the driver's device nodes, as this process sees it.
func devDir(host driverroot.Host, root driverroot.Root) string {
	return host.Path(filepath.Join(root.DevRoot, "dev"))
}

// ReadNode reads the node's driver and GPUs. A GPU with a problem is in the list with a
// condition that says so; the error is about the node as a whole.
func ReadNode(nodeName string, host driverroot.Host, root driverroot.Root, session *nvml.Session) (gpu.Node, error) {
	driver, err := session.Driver()
	if err != nil {
		return gpu.Node{}, err
	}
	gpus, err := session.GPUs()
	if err != nil {
		return gpu.Node{}, err
	}
	sys := host.Path(filepath.Join(root.SysRoot, "sys"))
	for i := range gpus {
		placeInHost(&gpus[i], sys)
		if facts.Dead(gpus[i]) != nil {
			continue // it may never have been identified
		}
		if missing := missingNode(devDir(host, root), append(controlNodes(), fmt.Sprintf("nvidia%d", gpus[i].Minor))...); missing != "" {
			gpus[i].Conditions = append(gpus[i].Conditions, gpu.Condition{
				Type: gpu.DeviceNodeMissing, Message: fmt.Sprintf("device node /dev/%s isn't there (nvidia-modprobe -u -c0 makes it)", missing),
			})
		}
	}
	return gpu.Node{
		Name:              nodeName,
		DriverVersion:     driver.Version,
		CUDADriverVersion: driver.CUDAVersion,
		GPUs:              gpus,
	}, nil
}

// placeInHost sets the GPU's PCIe root and NUMA node from sysfs; in virtual machines they
// are often unknown.
func placeInHost(g *gpu.GPU, sys string) {
	from := deviceattribute.WithFSFromRoot(sys)
	if root, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(string(g.PCI), from); err == nil {
		g.PCIeRoot = *root.Value.StringValue
	}
	numa, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(string(g.PCI), deviceattribute.ScalarAttribute, from)
	if err == nil {
		node := int(*numa.Value.IntValue)
		g.NUMANode = &node
	}
}

// controlNodes are the device nodes that all containers with a GPU need.
func controlNodes() []string { return []string{"nvidiactl", "nvidia-uvm"} }

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
