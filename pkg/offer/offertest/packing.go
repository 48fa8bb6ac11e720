// Package offertest plays what a scheduler does with an offer, to judge the
// order of its devices: claims come and go at random, and each gets the first
// device that fits. Tests and benchmarks import it.
package offertest

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// Whole asks for a whole GPU in a Mix.
const Whole = "whole"

// Mix is the frequency of each requested profile, or Whole.
type Mix map[string]int

// Load is how claims come and go.
type Load struct {
	// Claims that come, one after the other.
	Claims int
	// Pressure is the memory that all claims would have at a time if none were
	// refused, over the memory there is: 1 just fits on the average.
	Pressure float64
	// Seed of the chance; equal seeds give equal claims.
	Seed uint64
}

// Play creates and deletes claims, and returns the number of claims that were
// allocated a device. A claim that finds none at once is dropped: the fraction
// of successful claims shows how well the devices before them were chosen. The
// claims' requests and lifetimes don't depend on the order of the offer.
func Play(gpus []offer.GPU, mix Mix, l Load) (given int) {
	s := newShop(gpus)
	random := rand.New(rand.NewPCG(l.Seed, uint64(l.Claims)))
	kinds, weights := mix.kinds()
	stay := l.Pressure * s.total / s.mean(kinds, weights)
	var held leaving
	for now := range l.Claims {
		for len(held) > 0 && held[0].when <= float64(now) {
			s.giveBack(heap.Pop(&held).(departure).device)
		}
		kind, leaves := pick(random, kinds, weights), float64(now)+random.ExpFloat64()*stay
		if d, ok := s.take(kind); ok {
			heap.Push(&held, departure{when: leaves, device: d})
			given++
		}
	}
	return given
}

// Lexical is the same offer with each GPU's devices in the order of their
// names.
func Lexical(gpus []offer.GPU) []offer.GPU {
	out := slices.Clone(gpus)
	for i := range out {
		out[i].Devices = slices.SortedFunc(slices.Values(out[i].Devices), func(a, b resourceapi.Device) int { return strings.Compare(a.Name, b.Name) })
	}
	return out
}

// Node is a node of n simulated GPUs of a model ("h100-80gb") with a driver
// that may switch their MIG mode, which is off.
func Node(model string, n int) (gpu.Node, error) {
	m, err := nvmlsim.FindModel(model)
	if err != nil {
		return gpu.Node{}, err
	}
	return NodeOf(m, n), nil
}

// NodeOf is such a node, of GPUs of any model.
func NodeOf(m *nvmlsim.Model, n int) gpu.Node {
	node := gpu.Node{Name: "node", DriverVersion: "580.159.04", CUDADriverVersion: "13.0"}
	for i := range n {
		node.GPUs = append(node.GPUs, gpu.GPU{
			UUID:        gpu.UUID(fmt.Sprintf("GPU-%08x-0000-0000-0000-000000000000", i+1)),
			Index:       i,
			Minor:       i,
			Model:       gpu.Model{ProductName: m.ProductName, Brand: m.Brand, Architecture: m.Architecture, CUDAComputeCapability: m.CUDAComputeCapability},
			MemoryBytes: int64(m.MemoryBytes()),
			MIG:         mig(m.MIG),
			NVLink:      nvlink(m, n),
			// As most hosts with these drivers say.
			AddressingMode: "None",
		})
	}
	return node
}

// Host returns a node with n GPUs of a model that reports all that a host does: besides
// the facts of Node, PCI addresses and roots, NUMA nodes and ECC.
func Host(model string, n int) (gpu.Node, error) {
	node, err := Node(model, n)
	for i := range node.GPUs {
		g := &node.GPUs[i]
		g.PCI, g.PCIeRoot = gpu.PCIAddress(fmt.Sprintf("0000:%02x:00.0", 16+i)), fmt.Sprintf("pci0000:%02x", 15+i)
		g.NUMANode, g.ECCEnabled = new(i/4), new(true)
	}
	return node, err
}

// nvlink is that of the model's boards with NVSwitches.
func nvlink(m *nvmlsim.Model, n int) *gpu.NVLink {
	if n < 2 || m.NVLink == nil || m.NVLink.Topology != "switch" {
		return nil
	}
	return &gpu.NVLink{Links: m.NVLink.Links, Domain: gpu.SwitchDomain}
}

func mig(m *nvmlsim.MIGModel) *gpu.MIG {
	if m == nil {
		return nil
	}
	out := &gpu.MIG{Switchable: true}
	for _, p := range m.Profiles {
		q := gpu.Profile{
			Name: p.Name, ID: int(p.ID), MaxInstances: int(p.InstanceCount), MemoryBytes: int64(p.MemorySizeMB) << 20,
			Engines: gpu.Engines{
				Multiprocessors: int(p.MultiprocessorCount), CopyEngines: int(p.CopyEngineCount), Decoders: int(p.DecoderCount),
				Encoders: int(p.EncoderCount), JPEGEngines: int(p.JPEGCount), OFAEngines: int(p.OFACount),
			},
		}
		for _, start := range p.Starts {
			q.Placements = append(q.Placements, gpu.Placement{Start: int(start), Size: int(p.Size)})
		}
		out.Profiles = append(out.Profiles, q)
	}
	return out
}

func (m Mix) kinds() ([]string, []int) {
	var kinds []string
	for kind := range m {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	var weights []int
	for _, kind := range kinds {
		weights = append(weights, m[kind])
	}
	return kinds, weights
}

func pick(random *rand.Rand, kinds []string, weights []int) string {
	sum := 0
	for _, w := range weights {
		sum += w
	}
	n := random.IntN(sum)
	for i, w := range weights {
		if n < w {
			return kinds[i]
		}
		n -= w
	}
	return ""
}

// departure is the time at which a claim ends, and the device that it releases.
type departure struct {
	when   float64
	device int
}

// leaving is a heap of departures, the next one first.
type leaving []departure

func (l leaving) Len() int           { return len(l) }
func (l leaving) Less(i, j int) bool { return l[i].when < l[j].when }
func (l leaving) Swap(i, j int)      { l[i], l[j] = l[j], l[i] }

// Push and Pop are heap.Interface's.
func (l *leaving) Push(x any) { *l = append(*l, x.(departure)) }

// Pop takes the last.
func (l *leaving) Pop() any {
	last := (*l)[len(*l)-1]
	*l = (*l)[:len(*l)-1]
	return last
}
