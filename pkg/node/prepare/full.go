package prepare

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// full is a GPU, or a partition, whose MPS shares would have more memory together
// than there is.
type full struct {
	// of is the shared device.
	of gpu.Device
	// wanted by the claim, taken by the sharers, and there, in MiB.
	wanted, taken, there int64
	// sharers are the other claims with shares of it, ordered by claim UID.
	sharers []holding.Record
}

// full returns the first device without enough memory for the claim's shares; nil if
// all have enough. The scheduler counts the same, so memory is missing only where
// claims are allocated faster than others are unprepared, or where facts have
// changed since.
func (p *Preparer) full(want holding.Record) *full {
	if have, again := p.Journal.Get(want.ClaimUID); again && have.BootID == p.BootID {
		return nil // its devices are already recorded
	}
	for _, g := range want.Holdings {
		if g.Admin || g.Share == nil {
			continue
		}
		f := full{of: g.Base(), wanted: want.SharedMiB(g.Base())}
		for _, r := range p.Journal.All() {
			if mib := r.SharedMiB(f.of); mib > 0 && r.ClaimUID != want.ClaimUID {
				f.taken += mib
				f.sharers = append(f.sharers, r)
			}
		}
		_, facts, err := p.Inventory.Device(g.Device)
		if err != nil {
			continue // the devices were found before; a change since then fails later
		}
		if f.there, err = gpu.ShareableMiB(facts, f.of); err == nil && f.wanted+f.taken > f.there {
			return &f
		}
	}
	return nil
}

// waitForRoom returns nil when it is worth looking again whether there is room by
// now. It returns an error at once if none of the sharers is on its way out, or the
// claim couldn't have as much if they all were, and when the time is up.
func (p *Preparer) waitForRoom(ctx context.Context, w *wait, f *full, released <-chan struct{}) error {
	var unknown error
	var leaving []holding.Record
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
		have = append(have, fmt.Sprintf("claim %s/%s %dMi", r.Namespace, r.Name, r.SharedMiB(f.of)))
	}
	slices.Sort(have)
	if have == nil {
		have = []string{"no other claim has any"}
	}
	return fmt.Errorf("%w: the claim's MPS shares of GPU %s have %dMi of memory, and of the %dMi there is for shares %dMi are taken (%s): delete one of those claims' pods, or delete this pod so that its claim is allocated again",
		ErrHeld, f.of.Parent(), f.wanted, f.there, f.taken, strings.Join(have, ", "))
}
