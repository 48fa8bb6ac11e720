package prepare

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// full is a GPU, or a partition, whose MPS shares would have more memory together
// than there is.
type full struct {
	// of is what is shared.
	of gpu.Device
	// wanted by the claim, taken by the sharers, and there, in MiB.
	wanted, taken, there int64
	// sharers are the other claims with shares of it, ordered by claim UID.
	sharers []journal.Record
}

// full returns the first of what the claim is to have shares of that hasn't the
// memory for them; nil where there is room for all. The scheduler counts the same,
// so this is only so where claims are allocated faster than they are unprepared, or
// where facts have changed since.
func (p *Preparer) full(want journal.Record) *full {
	if have, again := p.Journal.Get(want.ClaimUID); again && have.BootID == p.BootID {
		return nil // it has what it has
	}
	for _, g := range want.Grants {
		if g.Admin || g.Share == nil {
			continue
		}
		f := full{of: g.Base(), wanted: memoryOf(want, g.Base())}
		for _, r := range p.Journal.All() {
			if mib := memoryOf(r, f.of); mib > 0 && r.ClaimUID != want.ClaimUID {
				f.taken += mib
				f.sharers = append(f.sharers, r)
			}
		}
		_, facts, err := p.Inventory.Device(g.Device)
		if err != nil {
			continue // the devices were found before; what has come since fails later
		}
		if f.there, err = gpu.ShareableMiB(facts, f.of); err == nil && f.wanted+f.taken > f.there {
			return &f
		}
	}
	return nil
}

// memoryOf is how much memory the record's shares of a GPU or partition have, in
// MiB. Those of one request have it together.
func memoryOf(r journal.Record, of gpu.Device) int64 {
	requests := map[string]int64{}
	for _, g := range r.Grants {
		if !g.Admin && g.Share != nil && g.MPS != nil && g.Base() == of {
			requests[mainRequest(g)] = max(requests[mainRequest(g)], g.MPS.MemoryMiB)
		}
	}
	sum := int64(0)
	for _, mib := range requests {
		sum += mib
	}
	return sum
}

// waitForRoom returns nil when it is worth looking again whether there is room by
// now. It returns an error at once if none of the sharers is on its way out, or the
// claim couldn't have as much if they all were, and when the time is up.
func (p *Preparer) waitForRoom(ctx context.Context, w *wait, f *full, released <-chan struct{}) error {
	var unknown error
	var leaving []journal.Record
	for _, h := range f.sharers {
		standing, err := p.look(w, h)
		switch {
		case err != nil:
			unknown = err
			leaving = append(leaving, h)
		case standing.Leaving && h.BootID != p.BootID:
			return p.forget(ctx, h)
		case standing.Leaving:
			leaving = append(leaving, h)
		}
	}
	if len(leaving) == 0 || f.wanted > f.there {
		return f.refuse()
	}
	return w.sleep(leaving[0], unknown, released)
}

// refuse says who has how much.
func (f *full) refuse() error {
	var have []string
	for _, r := range f.sharers {
		have = append(have, fmt.Sprintf("claim %s/%s %dMi", r.Namespace, r.Name, memoryOf(r, f.of)))
	}
	slices.Sort(have)
	if have == nil {
		have = []string{"no other claim has any"}
	}
	return fmt.Errorf("%w: the claim's MPS shares of GPU %s have %dMi of memory, and of the %dMi there is for shares %dMi are taken (%s): delete one of those claims' pods, or delete this pod so that its claim is allocated anew",
		ErrHeld, f.of.Parent(), f.wanted, f.there, f.taken, strings.Join(have, ", "))
}
