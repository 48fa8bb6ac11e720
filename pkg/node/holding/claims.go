package holding

import (
	"slices"
	"sync"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Records are the stored records of claims (*journal.Journal).
type Records interface {
	// Get returns the claim's record.
	Get(claimUID string) (Record, bool)
	// IsUnreadable reports whether the claim has a record that can't be read.
	IsUnreadable(claimUID string) bool
	// Held returns the records of all claims, with what is known of those that can't
	// be read; in no order.
	Held() []Record
}

// Claims answers which claims hold a device. It also knows which of them are being
// unprepared: that is true of this process only and isn't stored, so that after a
// crash each claim is as it was before. Its methods may be called concurrently.
type Claims struct {
	records Records
	// unpreparing are the claims whose unprepare has begun, leaving those of them
	// that no container uses any more, by UID.
	unpreparing, leaving sync.Map
}

// NewClaims returns the claims that have records, none of them being unprepared.
func NewClaims(records Records) *Claims { return &Claims{records: records} }

// Holders returns the records of other claims that keep the device from being
// prepared, with what could be read of unreadable ones; in no order.
func (c *Claims) Holders(d gpu.Device, exceptClaimUID string) []Record {
	var holders []Record
	for _, r := range c.records.Held() {
		if r.ClaimUID != exceptClaimUID && r.Holds(d) {
			holders = append(holders, r)
		}
	}
	return holders
}

// SetUnpreparing says that the claim's unprepare has begun. Its containers may
// still run, so InUse counts it.
func (c *Claims) SetUnpreparing(claimUID string) { c.unpreparing.Store(claimUID, true) }

// IsUnpreparing reports whether the claim's unprepare has begun.
func (c *Claims) IsUnpreparing(claimUID string) bool {
	_, ok := c.unpreparing.Load(claimUID)
	return ok
}

// SetLeaving says that no container uses the claim any more: its record stays
// until its devices are released, but InUse doesn't count it. It follows
// SetUnpreparing.
func (c *Claims) SetLeaving(claimUID string) { c.leaving.Store(claimUID, true) }

// Reset clears SetUnpreparing and SetLeaving: the claim was prepared again, or its
// record was deleted.
func (c *Claims) Reset(claimUID string) {
	c.leaving.Delete(claimUID)
	c.unpreparing.Delete(claimUID)
}

// IsLeaving reports whether SetLeaving was called and Reset wasn't since.
func (c *Claims) IsLeaving(claimUID string) bool {
	_, ok := c.leaving.Load(claimUID)
	return ok
}

// IsStaying reports whether the claim has a record, readable or not, and isn't
// leaving.
func (c *Claims) IsStaying(claimUID string) bool {
	if c.IsLeaving(claimUID) {
		return false
	}
	// It may be gone since: the record is deleted before Reset is called.
	_, ok := c.records.Get(claimUID)
	return ok || c.records.IsUnreadable(claimUID)
}

// InUse reports whether a claim that isn't leaving holds the GPU or partition, or a
// share or replica of it. Callers call SetLeaving first, so of several claims that
// leave at the same time the last to ask gets false.
func (c *Claims) InUse(base gpu.Device) bool {
	return slices.ContainsFunc(c.records.Held(), func(r Record) bool { return r.Holds(base) && c.IsStaying(r.ClaimUID) })
}
