package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/notify"
)

// lockWhenFree waits until no other claim holds any of the devices and there is memory for
// the claim's shares, and locks the claim and its GPUs. It returns one function that
// unlocks the claim and one that unlocks the GPUs.
func (p *Preparer) lockWhenFree(ctx context.Context, want holding.Record) (unlock, unlockGPUs func(), _ error) {
	gpus := want.GPUs() // with admin access, too: they may be reset now
	var w *wait         // from the first wait on
	defer func() {
		if w != nil {
			w.cancel()
		}
	}()
	for {
		released := p.calls.nextRelease()
		unlock, err := p.claimLocks.Lock(ctx, want.ClaimUID)
		if err != nil {
			return nil, nil, fmt.Errorf("wait for another operation on the claim: %w", err)
		}
		unlockGPUs, err := p.gpuLocks.Lock(ctx, gpus...)
		if err != nil {
			unlock()
			return nil, nil, fmt.Errorf("wait for another operation on the claim's GPUs%s: %w", p.excludedOf(gpus), err)
		}
		holders := p.holders(want)
		short := p.findShortage(want)
		if len(holders) == 0 && short == nil {
			return unlock, unlockGPUs, nil
		}
		unlockGPUs()
		unlock()
		if w == nil {
			w = newWait(ctx, want)
		}
		if len(holders) > 0 {
			err = p.waitForHolders(ctx, w, holders, released)
		} else {
			err = p.waitForMemory(ctx, w, short, released)
		}
		if err != nil {
			return nil, nil, err
		}
	}
}

// held returns the devices that the record holds.
func held(r holding.Record) []gpu.Device {
	var devices []gpu.Device
	for _, g := range r.Holdings {
		if !g.Admin {
			devices = append(devices, g.Of())
		}
	}
	return devices
}

// holders returns the other claims that hold what the claim is to hold,
// ordered by claim UID.
func (p *Preparer) holders(want holding.Record) []holding.Record {
	var holders []holding.Record
	for _, d := range held(want) {
		holders = append(holders, p.cfg.Journal.ClaimsOn(d.Parent()).Holders(d, want.ClaimUID).Records()...)
	}
	byUID := func(a, b holding.Record) int { return strings.Compare(a.ClaimUID, b.ClaimUID) }
	slices.SortFunc(holders, byUID)
	return slices.CompactFunc(holders, func(a, b holding.Record) bool { return a.ClaimUID == b.ClaimUID })
}

// shortage is of memory: the MPS shares of a GPU, or of a partition, would have more
// together than there is.
type shortage struct {
	// of is the shared device.
	of gpu.Device
	// wanted by the claim, taken by the sharers, and there, in MiB.
	wanted, taken, there int64
	// sharers are the other claims with shares of it, ordered by claim UID.
	sharers []holding.Record
}

// findShortage returns the first device without enough memory for the claim's shares; nil
// if all have enough. The scheduler counts the same, so memory is missing only where
// claims are allocated faster than others are unprepared, or where facts have
// changed since.
func (p *Preparer) findShortage(want holding.Record) *shortage {
	if have, _ := p.cfg.Journal.Claim(want.ClaimUID); have.IsOf(p.cfg.BootID) {
		return nil // its devices are already recorded
	}
	for _, g := range want.Holdings {
		if g.Admin || g.Share == nil {
			continue
		}
		s := shortage{of: g.Base(), wanted: want.SharedMiB(g.Base())}
		for _, c := range p.cfg.Journal.ClaimsOn(g.GPU).Readable() {
			if mib := c.SharedMiB(s.of); mib > 0 && c.ClaimUID != want.ClaimUID {
				s.taken += mib
				s.sharers = append(s.sharers, c.Record)
			}
		}
		_, facts, err := p.cfg.Facts.Device(g.Device)
		if err != nil {
			continue // the devices were found before; a change since then fails later
		}
		if s.there, err = gpu.ShareableMiB(facts, s.of); err == nil && s.wanted+s.taken > s.there {
			return &s
		}
	}
	return nil
}

// errUnprepared stops a prepare that an unprepare has overtaken.
var errUnprepared = errors.New("the claim was unprepared while it was being prepared")

// calls has the prepares in progress, by claim. An unprepare stops those that began before it; a
// released claim wakes those that wait for devices. Nothing is remembered beyond that: a claim may
// be prepared again after its unprepare.
type calls struct {
	mu      notify.Mutex
	byClaim map[types.UID]map[*call]bool
}

// call is one prepare of one claim; calls.mu guards it.
type call struct {
	stopped bool
	// cancel ends the contexts that were made for the call.
	cancel []context.CancelCauseFunc
}

// callsKey is the context's key for the calls that begin has registered.
type callsKey struct{}

func newCalls() *calls { return &calls{byClaim: map[types.UID]map[*call]bool{}} }

// begin registers a call for each claim; done takes them out again.
func (c *calls) begin(ctx context.Context, uids []types.UID) (_ context.Context, done func()) {
	begun := make(map[types.UID]*call, len(uids))
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, uid := range uids {
		begun[uid] = &call{}
		if c.byClaim[uid] == nil {
			c.byClaim[uid] = map[*call]bool{}
		}
		c.byClaim[uid][begun[uid]] = true
	}
	return context.WithValue(ctx, callsKey{}, begun), func() { c.end(begun) }
}

func (c *calls) end(begun map[types.UID]*call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for uid, one := range begun {
		delete(c.byClaim[uid], one)
		if len(c.byClaim[uid]) == 0 {
			delete(c.byClaim, uid)
		}
	}
}

// join returns a context that ends when the claim's call is stopped: the call
// that was begun with this context, or else a new one.
func (c *calls) join(ctx context.Context, uid types.UID) (_ context.Context, done func()) {
	end := func() {}
	begun, _ := ctx.Value(callsKey{}).(map[types.UID]*call)
	if begun[uid] == nil {
		ctx, end = c.begin(ctx, []types.UID{uid})
		begun, _ = ctx.Value(callsKey{}).(map[types.UID]*call)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	c.attach(begun[uid], cancel)
	return ctx, func() {
		cancel(nil)
		end()
	}
}

// attach has the call's stop, which may have come already, end a context.
func (c *calls) attach(one *call, cancel context.CancelCauseFunc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if one.stopped {
		cancel(errUnprepared)
	}
	one.cancel = append(one.cancel, cancel)
}

// stop stops the calls of the claim that have begun; their contexts have ended
// when it returns.
func (c *calls) stop(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for one := range c.byClaim[uid] {
		one.stopped = true
		for _, cancel := range one.cancel {
			cancel(errUnprepared)
		}
	}
	delete(c.byClaim, uid)
}

// released wakes the prepares that wait until a claim has released its devices.
func (c *calls) released() { c.mu.Change(func() {}) }

// nextRelease returns a channel that is closed at the next call of released.
func (c *calls) nextRelease() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.Changed()
}

// Exclude keeps prepares from giving the GPU, or a part of it, to claims until include
// is called: they wait. It doesn't look for claims that have the GPU already. why
// explains the wait: "it is being reset".
func (p *Preparer) Exclude(ctx context.Context, uuid gpu.UUID, why string) (include func(), _ error) {
	unlock, err := p.gpuLocks.Lock(ctx, uuid)
	if err != nil {
		return nil, fmt.Errorf("wait for a prepare on GPU %s: %w", uuid, err)
	}
	p.excluded.Store(uuid, why)
	return func() {
		p.excluded.Delete(uuid)
		unlock()
	}, nil
}

// excludedOf returns why one of the GPUs is excluded, for an error; empty if none is.
func (p *Preparer) excludedOf(uuids []gpu.UUID) string {
	for _, uuid := range uuids {
		if why, ok := p.excluded.Load(uuid); ok {
			return fmt.Sprintf(" (GPU %s: %s)", uuid, why)
		}
	}
	return ""
}
