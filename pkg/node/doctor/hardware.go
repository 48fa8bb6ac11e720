package doctor

import (
	"fmt"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

const recreate = "delete the pods of the claim; when they are created again, so is the partition"

// checkHardware compares the partitions in the journal with the hardware.
func (l *look) checkHardware() {
	for _, u := range l.journal.UnreadableGPUs {
		l.add(Finding{
			Level: Trouble, Check: "gpu-record-unreadable", GPU: u.GPU, Path: u.Path,
			What: fmt.Sprintf("the journal file of the GPU can't be read (%v): it is unknown which MIG instances this driver has created on it, so none is destroyed", u.Err),
			Do: fmt.Sprintf("delete the pods that use the GPU, then destroy its instances and switch MIG mode off (nvidia-smi mig -i %s -dci; nvidia-smi mig -i %s -dgi; nvidia-smi -i %s -mig 0), which resolves this; a reboot of the node does the same",
				u.GPU, u.GPU, u.GPU),
		})
	}
	if l.Hardware == nil {
		l.checkUnseen()
		return
	}
	for _, g := range l.gpus {
		if g.MIG != nil {
			l.checkGPU(g)
		}
	}
	l.checkGone()
}

// checkUnseen reports that the hardware can't be read.
func (l *look) checkUnseen() {
	if l.NoHardware == nil {
		return
	}
	f := Finding{Level: Note, Check: "no-driver", What: fmt.Sprintf("the GPUs could not be checked: %v", l.NoHardware)}
	if len(l.journal.Claims)+len(l.journal.GPUs) > 0 {
		f.Level, f.Do = Trouble, "claims are prepared on this node: install or repair the driver, or reboot the node"
	}
	l.add(f)
}

// checkGone reports GPUs in the journal that don't answer.
func (l *look) checkGone() {
	there := func(uuid gpu.UUID) bool {
		return slices.ContainsFunc(l.gpus, func(g gpu.GPU) bool { return g.UUID == uuid })
	}
	for _, r := range l.journal.Claims {
		for _, uuid := range r.GPUs() {
			if !there(uuid) {
				l.add(Finding{
					Level: Trouble, Check: "gpu-gone", GPU: uuid, Claim: claimName(r), What: "a claim holds a device of a GPU that doesn't answer",
					Do: "delete the claim's pods, and reset the GPU or reboot the node",
				})
			}
		}
	}
	for _, r := range l.journal.GPUs {
		if !there(r.GPU) && r.BootID == l.BootID {
			l.add(Finding{
				Level: Note, Check: "gpu-gone", GPU: r.GPU, Path: l.gpuFile(r),
				What: "partitions were created on a GPU that doesn't answer; they will be checked when it answers",
			})
		}
	}
}

// gpuFile returns the path of the GPU's record.
func (l *look) gpuFile(r holding.GPURecord) string { return journal.GPUFile(l.Journal, r.GPU) }

// gpuLook is the check of one GPU.
type gpuLook struct {
	*look
	gpu    gpu.GPU
	mig    gpu.MIG
	record holding.GPURecord // empty if there is none of this boot
	file   string            // path of the record
	own    map[int]bool      // GPU instance ids in the record
}

func (l *look) checkGPU(g gpu.GPU) {
	mig, ok := l.migs[g.UUID]
	if !ok {
		return
	}
	p := gpuLook{look: l, gpu: g, mig: mig, own: map[int]bool{}}
	if i := slices.IndexFunc(l.journal.GPUs, func(r holding.GPURecord) bool { return r.GPU == g.UUID }); i >= 0 {
		p.takeRecord(l.journal.GPUs[i])
	}
	for _, m := range p.record.Partitions {
		p.checkMade(m)
	}
	for _, i := range mig.Instances {
		if !p.own[i.GPUInstanceID] {
			p.checkForeign(i)
		}
	}
	p.checkClaims()
	p.checkMode()
}

// takeRecord uses the record if it is of this boot.
func (p *gpuLook) takeRecord(r holding.GPURecord) {
	file := p.gpuFile(r)
	if r.BootID == p.BootID {
		p.record, p.file = r, file
		return
	}
	p.add(Finding{
		Level: Leftover, Check: "gpu-record-of-earlier-boot", GPU: r.GPU, Path: file,
		What: "the journal lists partitions from before the last reboot, which are gone; the plugin removes this record when it starts",
	})
}

// checkMade compares one partition of the record with the hardware.
func (p *gpuLook) checkMade(m holding.MadePartition) {
	want := partitionOf(p.gpu.UUID, m.Partition)
	holder, held := p.claimOn(want)
	base := Finding{Level: Trouble, GPU: p.gpu.UUID, Device: p.name(want), Path: p.file, Claim: holder}
	at := slices.IndexFunc(p.mig.Instances, func(i gpu.Instance) bool { return sits(i, want) })
	if m.Made == nil {
		base.Check, base.Do = "partition-half-made", "retry the pod, or restart the plugin's pod on this node: it finishes or undoes the creation"
		base.What = fmt.Sprintf("the creation of %s has started and not finished; no instance exists yet", describe(want))
		if at >= 0 {
			p.own[p.mig.Instances[at].GPUInstanceID] = true
			base.What = fmt.Sprintf("the creation of %s has started and not finished; %s exists", describe(want), describeInstance(p.mig.Instances[at]))
		}
		p.add(base)
		return
	}
	if at < 0 {
		base.Check = "instance-missing"
		base.What = fmt.Sprintf("%s was created as GPU instance %d and no longer exists: somebody else has destroyed it", describe(want), m.Made.GPUInstanceID)
		base.Do = "restart the plugin's pod on this node: it updates its journal"
		if held {
			base.Do = recreate
		}
		p.add(base)
		return
	}
	p.checkInstance(base, want, *m.Made, p.mig.Instances[at], held)
}

// checkInstance compares an instance at the placement with the recorded one.
func (p *gpuLook) checkInstance(base Finding, want gpu.Partition, made holding.MadeInstance, i gpu.Instance, held bool) {
	switch {
	case i.GPUInstanceID != made.GPUInstanceID || i.UUID != "" && (i.UUID != made.UUID || i.ComputeInstanceID != made.ComputeInstanceID):
		base.Check = "instance-differs"
		base.What = fmt.Sprintf("%s was created as %s; now %s exists there, created by somebody else", describe(want),
			describeInstance(gpu.Instance{GPUInstanceID: made.GPUInstanceID, ComputeInstanceID: made.ComputeInstanceID, UUID: made.UUID}), describeInstance(i))
		base.Do = "Tessera won't destroy it. If it isn't used, destroy it; " + recreate
		if !held {
			base.Do = "Tessera won't destroy it. Restart the plugin's pod on this node: it updates its journal"
		}
		p.add(base)
		return
	case i.UUID == "":
		base.Check = "instance-without-compute"
		base.What = fmt.Sprintf("%s is GPU instance %d without the compute instance that makes it usable", describe(want), i.GPUInstanceID)
		base.Do = "restart the plugin's pod on this node: it removes the instance, or creates the partition again if a claim holds it"
		p.add(base)
	case !held:
		base.Level, base.Check = Leftover, "instance-idle"
		base.What = fmt.Sprintf("%s (%s) is held by no claim: it is kept warm for the next one, or about to be destroyed", describe(want), describeInstance(i))
		p.add(base)
	}
	p.own[i.GPUInstanceID] = true
}

// checkForeign reports an instance that this driver didn't create.
func (p *gpuLook) checkForeign(i gpu.Instance) {
	f := Finding{Level: Note, Check: "instance-of-others", GPU: p.gpu.UUID}
	at := gpu.Partition{GPU: p.gpu.UUID, Profile: i.Profile, Placement: i.Placement}
	f.Device = p.name(at)
	f.What = fmt.Sprintf("%s, profile %s at memory slice %d, was created by somebody else; it is offered unchanged and never destroyed", describeInstance(i), i.Profile, i.Placement.Start)
	if i.UUID == "" {
		f.What = fmt.Sprintf("%s, profile %s at memory slice %d, was created by somebody else; it isn't offered, because no compute instance takes all of it", describeInstance(i), i.Profile, i.Placement.Start)
	}
	f.Claim, _ = p.claimOn(at)
	p.add(f)
}

// checkClaims reports devices of claims that don't exist.
func (p *gpuLook) checkClaims() {
	for _, r := range p.journal.Claims {
		if !p.holds(r) || r.GivenUp != nil {
			continue
		}
		for _, g := range r.Holdings {
			if g.GPU != p.gpu.UUID {
				continue
			}
			base := Finding{Level: Trouble, GPU: g.GPU, Claim: claimName(r), Device: string(g.Device)}
			if want, ok := g.Base().(gpu.Partition); ok {
				p.checkHeld(base, r, g, want)
			} else if p.mig.Enabled && !g.Admin {
				base.Check, base.What = "whole-gpu-in-mig-mode", "a claim holds the whole GPU, which is in MIG mode: CUDA doesn't work on it"
				base.Do = "delete the claim's pods; destroy the instances that somebody else has created, and switch the mode off"
				p.add(base)
			}
		}
	}
}

// checkHeld reports a held partition that doesn't exist, or that the claim's
// containers can't access.
func (p *gpuLook) checkHeld(base Finding, r holding.Record, g holding.Holding, want gpu.Partition) {
	at := slices.IndexFunc(p.mig.Instances, func(i gpu.Instance) bool { return sits(i, want) })
	if at < 0 {
		recorded := slices.ContainsFunc(p.record.Partitions, func(m holding.MadePartition) bool { return partitionOf(p.gpu.UUID, m.Partition) == want })
		if !recorded && !g.Admin { // a recorded one is already reported
			base.Check, base.Do = "partition-missing", recreate
			base.What = fmt.Sprintf("the claim holds %s, and no such instance exists", describe(want))
			p.add(base)
		}
		return
	}
	if d, ok := p.specs[r.ClaimUID+"-"+string(g.CDIName())]; ok && p.mig.Instances[at].UUID != "" {
		p.checkCapabilities(base, d, p.mig.Instances[at])
	}
}

// checkMode reports a MIG mode that is on without need.
func (p *gpuLook) checkMode() {
	if p.file == "" {
		return
	}
	f := Finding{Level: Leftover, GPU: p.gpu.UUID, Path: p.file}
	switch {
	case len(p.record.Partitions) > 0 || len(p.mig.Instances) > 0:
		return
	case p.record.ModeSwitched && p.mig.Enabled:
		f.Check, f.What = "mode-on-for-nothing", "MIG mode was switched on for a claim, and the GPU has no partitions any more; the mode is switched off some seconds after the last partition is destroyed"
	default:
		f.Check, f.What = "gpu-record-empty", "the journal has a file for the GPU, but no partition exists on it"
	}
	p.add(f)
}

// claimOn returns a claim that has exactly this partition now, or a share of it.
func (p *gpuLook) claimOn(d gpu.Partition) (string, bool) {
	for _, r := range p.journal.Claims {
		for _, g := range r.Holdings {
			if !g.Admin && g.Base() == gpu.Device(d) && p.holds(r) {
				return claimName(r), true
			}
		}
	}
	return "", false
}

func (p *gpuLook) name(d gpu.Device) string {
	name, _ := p.names.Name(d)
	return string(name)
}

func partitionOf(uuid gpu.UUID, p holding.Partition) gpu.Partition {
	return gpu.Partition{GPU: uuid, Profile: p.Profile, Placement: gpu.Placement{Start: p.Start, Size: p.Size}}
}

// sits reports whether the instance has the profile and the placement of the
// partition.
func sits(i gpu.Instance, p gpu.Partition) bool {
	return i.Profile == p.Profile && i.Placement == p.Placement
}

func describe(p gpu.Partition) string {
	return fmt.Sprintf("the partition %s at memory slice %d", p.Profile, p.Placement.Start)
}

func describeInstance(i gpu.Instance) string {
	if i.ComputeInstanceID == gpu.NoComputeInstance {
		return fmt.Sprintf("GPU instance %d (no MIG device)", i.GPUInstanceID)
	}
	return fmt.Sprintf("GPU instance %d, compute instance %d (%s)", i.GPUInstanceID, i.ComputeInstanceID, i.UUID)
}
