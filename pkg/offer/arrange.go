package offer

import (
	"reflect"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// arrangement has the order of a GPU's parts, and the counters of its devices.
type arrangement struct {
	basis arrangementBasis
	// order has positions among the draft's parts.
	order    []int
	counters counters
}

// arrangementBasis is everything that an arrangement follows from, besides the server. It
// is the same for GPUs of one model with the same plan.
type arrangementBasis struct {
	gpu     gpu.GPU
	mig     gpu.MIG
	room    room
	parts   []part
	entire  bool
	counted bool // the devices need counters of parts
}

// arrange orders and counts a draft's parts. It returns the arrangement before, that of
// another GPU of the node, if that has the same basis: to find one takes longer than to
// describe all devices.
func (o *draft) arrange(before *arrangement) *arrangement {
	basis := o.arrangementBasis()
	if before != nil && reflect.DeepEqual(before.basis, basis) {
		return before
	}
	a := &arrangement{basis: basis, order: order(o.mig, o.parts)}
	if basis.counted {
		a.counters = o.count(inThatOrder(o.parts, a.order))
	}
	return a
}

// arrangementBasis leaves out of the GPU what says which one it is, where, and how it is.
func (o *draft) arrangementBasis() arrangementBasis {
	b := arrangementBasis{
		gpu: o.g, mig: o.mig, room: o.room, parts: make([]part, len(o.parts)), entire: o.entire(),
		counted: o.server.Counters && !o.frozen && len(o.slots) == 0,
	}
	b.gpu.UUID, b.gpu.Index, b.gpu.Minor, b.gpu.PCI, b.gpu.PCIeRoot, b.gpu.NUMANode = "", 0, 0, "", "", nil
	b.gpu.NVLink, b.gpu.Fabric, b.gpu.Conditions = nil, nil, nil
	for i, p := range o.parts {
		p.GPU, p.uuid = "", ""
		b.parts[i] = p
	}
	return b
}
