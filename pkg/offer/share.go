package offer

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// slot is a place on a GPU, or on a partition, that one of several claims can
// have, or, where it is a share without a number, several of them.
type slot struct {
	device   gpu.Device // a Share or a Replica
	leftover bool
}

// equalInstead is how many equal shares there are where claims can't say how
// large a share they want.
const equalInstead = 4

// planMPS carries out a plan for MPS shares of the whole GPU.
func (o *draft) planMPS(plan v1alpha1.MPSPlan) {
	switch err := gpu.CheckMPS(o.g.Model); {
	case err != nil:
		o.problem("It can't be divided into MPS shares (spec.plan.mps): %v. It is offered whole; to have several claims use it, plan it timeSliced with interval Default.", err)
	case !o.whole:
		o.problem("It can't be divided into MPS shares (spec.plan.mps), because others have put it into MIG mode; only the MIG devices that exist are offered. " +
			"Destroy them and switch MIG mode off (nvidia-smi -mig 0), or plan shares of partitions (spec.plan.partitioned.mps).")
	case o.g.MemoryBytes == 0:
		o.problem("It can't be divided into MPS shares (spec.plan.mps), because NVML doesn't say how much memory it has: it uses the computer's. " +
			"It is offered whole; to have several claims use it, plan it timeSliced.")
	case plan.Shares != nil:
		o.planEqualShares(int(*plan.Shares))
	case plan.Consumable != nil && !o.server.Multiple:
		o.reportNoMultiple(fmt.Sprintf("claims can't say how large a share they want; %d equal shares are offered. "+
			"Plan a number of them in spec.plan.mps.shares.", equalInstead))
		o.planEqualShares(equalInstead)
	case plan.Consumable != nil:
		o.planConsumable(*plan.Consumable)
	}
}

// planEqualShares offers shares of one size.
func (o *draft) planEqualShares(shares int) {
	whole := gpu.Whole{GPU: o.g.UUID}
	if _, err := gpu.EqualShare(o.g, gpu.Share{Of: whole, Count: shares}); err != nil {
		o.problem("It has too little memory for %d MPS shares, and is offered whole. Plan fewer (spec.plan.mps).", shares)
		return
	}
	for i := range shares {
		o.slots = append(o.slots, slot{device: gpu.Share{Of: whole, Count: shares, Number: i}})
	}
	o.dropWhole("MPS shares")
}

// planConsumable offers shares of the size that each claim asks for.
func (o *draft) planConsumable(plan v1alpha1.ConsumableMPS) {
	whole := gpu.Whole{GPU: o.g.UUID}
	all, err := gpu.ShareableMiB(o.g, whole)
	if err != nil {
		o.problem("It has too little memory for MPS shares, and is offered whole.")
		return
	}
	step, ok := mebibytes(*plan.MemoryStep, all)
	if !ok {
		o.problem("Its memory for MPS shares, %d MiB, is less than spec.plan.mps.consumable.memoryStep, %s, and it is offered whole. Plan smaller steps.",
			all, plan.MemoryStep.String())
		return
	}
	o.step, o.clients = step, int(*plan.MaxClients)
	o.slots = append(o.slots, slot{device: gpu.Share{Of: whole}})
	if plan.ServesGPUClass {
		o.servesGPUClass, o.whole = true, false
		return
	}
	o.dropWhole("MPS shares")
}

// mebibytes is a step of memory in whole mebibytes, rounded up: a limit is set
// in these. It says no if the step is more than all of it.
func mebibytes(step resource.Quantity, most int64) (int64, bool) {
	if step.CmpInt64(most<<20) > 0 || step.Sign() <= 0 {
		return 0, false
	}
	n := (step.Value() + 1<<20 - 1) >> 20
	return n, n <= most
}

// planTimeSliced carries out a plan for replicas.
func (o *draft) planTimeSliced(plan v1alpha1.TimeSlicedPlan) {
	if !o.whole {
		o.problem("It can't be time-sliced (spec.plan.timeSliced), because others have put it into MIG mode; only the MIG devices that exist are offered. " +
			"Destroy them and switch MIG mode off (nvidia-smi -mig 0), or plan it partitioned.")
		return
	}
	if i := plan.Interval; i != "" && i != v1alpha1.DefaultTimeSlice && !o.g.Model.FromVolta() {
		o.problem("Its time slices can't be made %s (spec.plan.timeSliced.interval): their length can be set only on GPUs of compute capability 7.0 (Volta) or later, and a %s has %s. "+
			"It is offered whole; plan interval Default.", i, o.g.Model.ProductName, o.g.Model.CUDAComputeCapability)
		return
	}
	for i := range int(plan.Replicas) {
		o.slots = append(o.slots, slot{device: gpu.Replica{GPU: o.g.UUID, Count: int(plan.Replicas), Number: i}})
	}
	o.dropWhole("replicas")
}

// dropWhole stops offering the whole GPU where no counter would exclude it while
// slots are allocated.
func (o *draft) dropWhole(what string) {
	noWhole := "the whole GPU can't be offered beside its " + what + "; only these are. Leave GPUs that should be given whole to another policy."
	advice := "The whole GPU isn't offered beside its " + what + "; leave GPUs that should be given whole to another policy."
	switch {
	// A scheduler that isn't trusted needs somebody to act.
	case !o.server.Counters && o.server.Distrust != "":
		o.reportNoCounters(noWhole)
	case !o.server.Counters:
		o.withoutWhole = o.explainNoCounters(noWhole)
	case o.step > 0 && !o.charged():
		o.withoutWhole = o.explainUncharged(advice)
	case len(o.slots) >= maxCounted:
		o.withoutWhole = fmt.Sprintf("The whole GPU isn't offered beside %d %s, because a ResourceSlice has room for %d devices; plan one less.",
			len(o.slots), what, maxCounted)
	default:
		return
	}
	o.whole = false
}

// divide makes MPS shares of all partitions.
func (o *draft) divide(shares int) {
	var small []string
	o.parts = slices.DeleteFunc(o.parts, func(p part) bool {
		_, err := gpu.EqualShare(o.g, gpu.Share{Of: p.Partition, Count: shares})
		if err != nil && !slices.Contains(small, p.Profile) {
			small = append(small, p.Profile)
		}
		return err != nil
	})
	for _, profile := range small {
		o.problem("Profile %s has too little memory for %d MPS shares (spec.plan.partitioned.mps.shares), and isn't offered; plan fewer.", profile, shares)
	}
	for i := range o.parts {
		o.parts[i].shared, o.parts[i].shares = true, shares
	}
	if !o.server.Multiple || !o.charged() {
		o.splitShares(shares)
	}
}

// splitShares offers each share of each partition as a device of its own, which only
// partitions that don't overlap can have.
func (o *draft) splitShares(shares int) {
	parts := inOrder(o.mig, o.parts)
	if n := len(parts) * shares; n > maxUncounted {
		parts = parts[:maxUncounted/shares]
		o.problem("It would have %d MPS shares, and a ResourceSlice has room for %d devices; only %d of its partitions are offered. Plan fewer shares (spec.plan.partitioned.mps.shares).",
			n, maxUncounted, len(parts))
	}
	for _, p := range parts {
		for i := range shares {
			o.slots = append(o.slots, slot{device: gpu.Share{Of: p.Partition, Count: shares, Number: i}})
		}
	}
	o.parts = nil
}

// countSlots lets either slots be given or the whole GPU.
func (o *draft) countSlots() counters {
	if !o.entire() {
		return nil
	}
	memory, sum := counter{name: memoryCounter}, 0
	for _, x := range o.slots {
		n := o.memoryOfSlot(x.device)
		memory.takes, sum = append(memory.takes, n), sum+n
	}
	memory.limit = max(bytes(o.g.MemoryBytes), sum)
	memory.takes = append(memory.takes, memory.limit) // the whole GPU
	return counters{memory}
}

// memoryOfSlot is how much memory a claim gets that is allocated the share, and its part of
// the memory that all replicas use; of a share whose size claims choose it is all, because
// a counter is consumed once, however often the device is allocated.
func (o *draft) memoryOfSlot(d gpu.Device) int {
	switch d := d.(type) {
	case gpu.Replica:
		return bytes(o.g.MemoryBytes / int64(max(1, d.Count)))
	case gpu.Share:
		if l, err := gpu.EqualShare(o.g, d); err == nil {
			return bytes(l.MemoryMiB << 20)
		}
	case gpu.Whole, gpu.Partition:
	}
	return bytes(o.g.MemoryBytes)
}

// describeSlot describes an MPS share or a replica.
func (o *draft) describeSlot(n gpu.Node, d gpu.Device, name gpu.DeviceName) resourceapi.Device {
	share, ok := d.(gpu.Share)
	switch {
	case !ok:
		return o.describeReplica(n, d, name)
	case share.Count == 0:
		return o.describeBySize(n, o.describeShare(n, share, name))
	}
	out := o.describeShare(n, share, name)
	attributes(out.Attributes).int("shares", share.Count)
	if l, err := gpu.EqualShare(o.g, share); err == nil {
		out.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			gpu.MemoryCapacity: {Value: *memory(l.MemoryMiB)},
			gpu.ThreadCapacity: {Value: *quantity(l.ThreadPercentage)},
		}
	}
	return out
}

// describeShare describes the attributes that all MPS shares have. Both limits are
// ceilings for each process, because MPS doesn't know claims.
func (o *draft) describeShare(n gpu.Node, share gpu.Share, name gpu.DeviceName) resourceapi.Device {
	a := o.slotAttributes(n, gpu.TypeMPS)
	if p, ok := share.Of.(gpu.Partition); ok {
		a.string("profile", p.Profile)
	}
	a.string("memoryEnforcement", gpu.EnforcementPerProcess)
	a.string("computeEnforcement", gpu.EnforcementCeiling)
	return resourceapi.Device{Name: string(name), Attributes: a}
}

func (o *draft) describeReplica(n gpu.Node, d gpu.Device, name gpu.DeviceName) resourceapi.Device {
	a := o.slotAttributes(n, gpu.TypeTimeSlice)
	if r, ok := d.(gpu.Replica); ok {
		a.int("replicas", r.Count)
	}
	a.string("memoryEnforcement", gpu.EnforcementNone)
	a.string("computeEnforcement", gpu.EnforcementNone)
	return resourceapi.Device{Name: string(name), Attributes: a, Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		gpu.MemoryCapacity: {Value: *resource.NewQuantity(o.g.MemoryBytes, resource.BinarySI)},
	}}
}

func (o *draft) slotAttributes(n gpu.Node, kind string) attributes {
	a := make(attributes)
	a.model(n, o.g)
	a.place(o.g)
	a.string("type", kind)
	a.string("parentUUID", string(o.g.UUID))
	return a
}

// describeBySize returns a device of which claims choose the amount of memory, in
// steps, and the ceiling of multiprocessors, each up to all of them. Memory and
// clients are consumed.
//
// If the plan serves claims for GPUs, the device looks like a GPU, and a claim
// without a request gets all of its memory. Prepare then gives the claim the
// whole GPU.
func (o *draft) describeBySize(n gpu.Node, d resourceapi.Device) resourceapi.Device {
	d.AllowMultipleAllocations = o.multiple()
	if o.step == 0 {
		return d // only a claim keeps it on offer
	}
	all, err := gpu.ShareableMiB(o.g, gpu.Whole{GPU: o.g.UUID})
	if err != nil {
		return d
	}
	sizes := fixedAmount(memory(o.step)) // the server wants room for two steps in a range
	if all/o.step > 1 {
		sizes = &resourceapi.CapacityRequestPolicy{Default: memory(o.step), ValidRange: &resourceapi.CapacityRequestPolicyRange{
			Min: memory(o.step), Step: memory(o.step),
		}}
	}
	most := all / o.step * o.step
	if o.servesGPUClass {
		most, sizes = all, o.sizesOfAll(all)
		a := attributes(describeWhole(n, o.g, "").Attributes)
		a.string("parentUUID", string(o.g.UUID))
		a.string("memoryEnforcement", gpu.EnforcementPerProcess)
		a.string("computeEnforcement", gpu.EnforcementCeiling)
		d.Attributes = a
	}
	d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		gpu.MemoryCapacity: {Value: *memory(most), RequestPolicy: sizes},
		gpu.ThreadCapacity: {Value: *quantity(100 * o.clients), RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default: quantity(100), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity(1), Max: quantity(100), Step: quantity(1)},
		}},
		gpu.ClientCapacity: {Value: *quantity(o.clients), RequestPolicy: fixedAmount(quantity(1))},
	}
	return d
}

// sizesOfAll lets claims have all memory, or a part of it that is at least a step, in
// whole mebibytes. Multiples of the step aren't possible: the default has to be the least
// amount plus a multiple of the policy's step, and all memory is none.
func (o *draft) sizesOfAll(all int64) *resourceapi.CapacityRequestPolicy {
	if all/o.step < 2 {
		return fixedAmount(memory(all))
	}
	return &resourceapi.CapacityRequestPolicy{Default: memory(all), ValidRange: &resourceapi.CapacityRequestPolicyRange{
		Min: memory(o.step), Step: memory(1),
	}}
}

// describeShared describes a partition that several claims get an equal share of.
func (o *draft) describeShared(n gpu.Node, p part, name gpu.DeviceName) resourceapi.Device {
	d := o.describeShare(n, gpu.Share{Of: p.Partition}, name)
	d.AllowMultipleAllocations = o.multiple()
	if p.shares == 0 {
		return d // only a claim keeps it on offer
	}
	attributes(d.Attributes).int("shares", p.shares)
	if l, err := gpu.EqualShare(o.g, gpu.Share{Of: p.Partition, Count: p.shares}); err == nil {
		d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			gpu.MemoryCapacity: {Value: *memory(l.MemoryMiB * int64(p.shares)), RequestPolicy: fixedAmount(memory(l.MemoryMiB))},
			gpu.ThreadCapacity: {Value: *quantity(l.ThreadPercentage * p.shares), RequestPolicy: fixedAmount(quantity(l.ThreadPercentage))},
		}
	}
	return d
}

// multiple marks a device that can be allocated several times, where the server
// stores that.
func (o *draft) multiple() *bool {
	if !o.server.Multiple {
		return nil
	}
	return new(true)
}

// fixedAmount is the policy of a capacity that claims can have only as a whole.
func fixedAmount(q *resource.Quantity) *resourceapi.CapacityRequestPolicy {
	return &resourceapi.CapacityRequestPolicy{Default: q, ValidValues: []resource.Quantity{*q}}
}

func memory(mib int64) *resource.Quantity { return resource.NewQuantity(mib<<20, resource.BinarySI) }

func quantity(n int) *resource.Quantity { return resource.NewQuantity(int64(n), resource.DecimalSI) }
