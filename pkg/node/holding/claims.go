package holding

import (
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// State says how far a claim's record is to be trusted.
type State int

const (
	// Recorded: the record is on disk as it is here.
	Recorded State = iota
	// Doubtful: the last write or removal of the record failed after it had begun to change
	// the file's name, so the disk may have this record, the one before, or none. Another
	// write or removal settles it. Until then the record counts.
	Doubtful
	// Unreadable: the record's file has another content. The record here has what is left of
	// it: the claim's UID, by the file's name, and what else could be made out. A holding
	// then has no partition, and so stands for the whole GPU.
	Unreadable
)

// Phase says how far the unprepare of a claim has come in this process. It isn't stored:
// after a crash each claim is as it was before.
type Phase int

const (
	// Prepared: no unprepare has begun since the last prepare.
	Prepared Phase = iota
	// Unpreparing: the unprepare has begun; containers may still run.
	Unpreparing
	// Leaving: no container uses the claim any more. Daemons and settings aren't kept for it;
	// MPS daemons may still run for it.
	Leaving
	// Left: the MPS daemons on the claim's partitions have stopped, except those that other
	// claims need, so nothing of the claim keeps its partitions from being destroyed.
	Left
)

// Claim is what is known of a claim that has devices on this node, or may have some.
//
// A record that can't be read blocks this: no other claim is given a device that it still
// names (Holds). On the GPUs of these devices, or on every GPU if it names none, nothing is
// taken away that the claim may need: no partition is destroyed, no daemon stopped, no
// setting restored (MayHave, MayNeed, MayNeedSettings), and the GPU isn't reset (MayUse).
type Claim struct {
	Record
	State State
	Phase Phase
	// File is the one that can't be read, and Err why; only of an unreadable record.
	File string
	Err  error
}

// IsUnreadable reports whether the claim's record can't be read.
func (c Claim) IsUnreadable() bool { return c.State == Unreadable }

// mayHaveAll reports whether nothing is known of the claim's devices.
func (c Claim) mayHaveAll() bool { return c.IsUnreadable() && len(c.Holdings) == 0 }

// MayHave reports whether the claim holds the device, or something that overlaps it, or
// may do so.
func (c Claim) MayHave(d gpu.Device) bool { return c.mayHaveAll() || c.Holds(d) }

// MayUse reports whether the claim has, or may have, anything of the GPU; with admin access,
// too.
func (c Claim) MayUse(uuid gpu.UUID) bool {
	return c.mayHaveAll() || slices.Contains(c.GPUs(), uuid)
}

// MayNeed reports whether the claim needs, or may need, the MPS daemon of that name.
func (c Claim) MayNeed(daemon string) bool {
	if !c.IsUnreadable() {
		return slices.ContainsFunc(c.Holdings, func(g Holding) bool { return c.Daemon(g) == daemon })
	}
	return c.mayHaveAll() || c.OwnDaemonName() == daemon ||
		slices.ContainsFunc(c.Holdings, func(g Holding) bool { return g.SharedDaemonName() == daemon })
}

// MayNeedSettings reports whether the claim needs, or may need, settings of the GPU that
// were changed. A claim of a partition needs none.
func (c Claim) MayNeedSettings(uuid gpu.UUID) bool {
	if c.IsUnreadable() {
		return c.MayUse(uuid)
	}
	return slices.ContainsFunc(c.Holdings, func(g Holding) bool { return g.GPU == uuid && g.IsShared() && g.Partition == Partition{} })
}

// IsOf reports whether the claim has a readable record of that boot.
func (c Claim) IsOf(bootID string) bool { return !c.IsUnreadable() && c.BootID == bootID }

// MayBeOf reports whether the claim was prepared in that boot, or may have been. No
// container of another runs.
func (c Claim) MayBeOf(bootID string) bool {
	return c.BootID == bootID || c.IsUnreadable() && c.BootID == ""
}

// Claims are those that have devices on this node, or may have some, at one moment.
type Claims []Claim

// Holders returns the other claims that keep the device from being prepared.
func (all Claims) Holders(d gpu.Device, exceptClaimUID string) Claims {
	var holders Claims
	for _, c := range all {
		if c.ClaimUID != exceptClaimUID && c.Holds(d) {
			holders = append(holders, c)
		}
	}
	return holders
}

// InUse reports whether a claim uses, or may use, the GPU or partition, or a share or
// replica of it: until it has Left. Callers advance their claim to Left before they ask,
// so of several claims that leave at the same time the last to ask gets false.
func (all Claims) InUse(base gpu.Device) bool {
	return slices.ContainsFunc(all, func(c Claim) bool { return c.Phase < Left && c.MayHave(base) })
}

// Unreadable returns those whose records can't be read.
func (all Claims) Unreadable() Claims {
	return slices.DeleteFunc(slices.Clone(all), func(c Claim) bool { return !c.IsUnreadable() })
}

// Readable returns those whose records can be read.
func (all Claims) Readable() Claims {
	return slices.DeleteFunc(slices.Clone(all), Claim.IsUnreadable)
}

// Records returns what is known of all claims.
func (all Claims) Records() []Record {
	records := make([]Record, len(all))
	for i, c := range all {
		records[i] = c.Record
	}
	return records
}
