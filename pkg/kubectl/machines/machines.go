// Package machines describes nodes that aren't there, from a catalogue of GPU models: the
// facts that a plugin reports of each model on the simulator.
package machines

import (
	"embed"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	sigsyaml "sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// files has a GPU of each model, as a plugin reports it on the simulator, without
// the fields that differ between machines. A test writes the files (-update).
//
//go:embed *.yaml
var files embed.FS

const (
	// nodeName is the name of a node that has none.
	nodeName = "new-node"
	// maxGPUs is how many GPUs a machine can have.
	maxGPUs = 128
	// wholePrefix begins the UUIDs of GPUs, except integrated ones.
	wholePrefix = "GPU-"
	// bareUUID stands in a file for a UUID without the prefix.
	bareUUID = "00000000-0000-0000-0000-000000000000"
)

// Inventory makes the GPUInventory of a machine such as 8xh100-80gb, or, of several
// models, 2xa100-80gb,4xl40s. UUIDs are made up; PCI addresses, NUMA nodes and the version
// of CUDA are left out, and so are NVLinks between boards.
func Inventory(machine string) (*v1alpha1.GPUInventory, error) {
	inv := &v1alpha1.GPUInventory{}
	inv.Name = nodeName
	form := regexp.MustCompile(`^(?:([1-9][0-9]{0,2})x)?([a-z0-9][a-z0-9-]*)$`)
	for part := range strings.SplitSeq(machine, ",") {
		found := form.FindStringSubmatch(part)
		if found == nil {
			return nil, fmt.Errorf("machine %s: want COUNTxMODEL such as 8xh100-80gb, several separated by commas", machine)
		}
		g, err := readGPU(found[2])
		if err != nil {
			return nil, fmt.Errorf("machine %s: %w", machine, err)
		}
		count := 1
		if found[1] != "" {
			count, _ = strconv.Atoi(found[1])
		}
		for range count {
			i := int32(len(inv.Status.GPUs))
			bare := g.UUID != ""
			one := g.DeepCopy()
			one.UUID, one.Index, one.Minor = fmt.Sprintf("%08x-0000-0000-0000-000000000000", i+1), i, i
			if !bare {
				one.UUID = wholePrefix + one.UUID
			}
			inv.Status.GPUs = append(inv.Status.GPUs, *one)
		}
	}
	if n := len(inv.Status.GPUs); n > maxGPUs {
		return nil, fmt.Errorf("machine %s: %d GPUs are more than %d", machine, n, maxGPUs)
	}
	unlinkSingle(inv.Status.GPUs)
	return inv, nil
}

// unlinkSingle removes the NVLinks of GPUs without another one of their model in the
// machine.
func unlinkSingle(gpus []v1alpha1.GPU) {
	count := make(map[string]int)
	for _, g := range gpus {
		count[g.ProductName]++
	}
	for i := range gpus {
		if count[gpus[i].ProductName] == 1 {
			gpus[i].NVLink = nil
		}
	}
}

// readGPU reads a GPU of the model.
func readGPU(model string) (*v1alpha1.GPU, error) {
	raw, err := files.ReadFile(model + ".yaml")
	if err != nil {
		return nil, fmt.Errorf("%s is not a known model; these are: %s", model, strings.Join(Models(), ", "))
	}
	g := new(v1alpha1.GPU)
	if err := sigsyaml.UnmarshalStrict(raw, g); err != nil {
		return nil, fmt.Errorf("model %s: %w", model, err)
	}
	return g, nil
}

// Models are the known ones.
func Models() []string {
	entries, err := files.ReadDir(".")
	if err != nil {
		return nil
	}
	var out []string
	for _, f := range entries {
		out = append(out, strings.TrimSuffix(f.Name(), ".yaml"))
	}
	return out
}

// common leaves out what differs between machines of GPUs of a model.
func common(g v1alpha1.GPU) v1alpha1.GPU {
	bare := !gpu.UUID(g.UUID).IsWhole()
	g.UUID, g.Index, g.Minor, g.PCIAddress, g.PCIeRoot, g.NUMANode, g.Fabric = "", 0, 0, "", "", nil, nil
	if bare {
		g.UUID = bareUUID
	}
	if g.NVLink != nil && g.NVLink.Domain != gpu.SwitchDomain {
		g.NVLink = nil
	}
	return g
}
