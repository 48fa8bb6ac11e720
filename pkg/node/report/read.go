package report

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// Hardware answers for the GPUs (*nvml.Session).
type Hardware interface {
	Driver() (nvml.Driver, error)
	GPUs() ([]gpu.GPU, error)
}

// Dirs are directories as this process sees them.
type Dirs struct {
	// Sys is where sysfs, or what stands for it, is mounted.
	Sys string
	// Dev has the nvidia* device nodes.
	Dev string
}

// Read gathers what the node has. A GPU that is in trouble is in the list with
// a condition that says so; the error is about the node as a whole.
func Read(nodeName string, hw Hardware, dirs Dirs) (gpu.Node, error) {
	driver, err := hw.Driver()
	if err != nil {
		return gpu.Node{}, err
	}
	gpus, err := hw.GPUs()
	if err != nil {
		return gpu.Node{}, err
	}
	for i := range gpus {
		placeInHost(&gpus[i], dirs.Sys)
		if facts.Dead(gpus[i]) != nil {
			continue // it may never have been identified
		}
		if missing := missingNode(dirs.Dev, append(ControlNodes(), fmt.Sprintf("nvidia%d", gpus[i].Minor))...); missing != "" {
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

// placeInHost adds what sysfs tells; virtual machines often tell nothing.
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

// ControlNodes are the device nodes that all containers with a GPU need.
func ControlNodes() []string { return []string{"nvidiactl", "nvidia-uvm"} }

// MissingControlNode returns the first of ControlNodes that isn't in a directory
// of device nodes, "" where all are.
func MissingControlNode(dev string) string { return missingNode(dev, ControlNodes()...) }

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
