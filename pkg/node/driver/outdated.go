package driver

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
)

// Outdated returns an error if the facts may not be true any more: for longer than
// after, no look at the GPUs has ended, or a reading that something has requested.
// The error's text stays the same until they are known to be true again.
func (f *Follower) Outdated(after time.Duration) error {
	var oldest time.Time
	for _, i := range []*instant{&f.looked, &f.reading, &f.cfg.Signals.requested} {
		if at, ok := i.get(); ok && (oldest.IsZero() || at.Before(oldest)) {
			oldest = at
		}
	}
	if oldest.IsZero() || time.Since(oldest) <= after {
		return nil
	}
	return fmt.Errorf("the plugin has not been able to look at the GPUs since %s", oldest.UTC().Format(time.RFC3339))
}

// beginReading says that what is requested now will be answered by a reading that
// begins, or by the finding that there is no driver.
func (f *Follower) beginReading() {
	at, ok := f.cfg.Signals.requested.take()
	if !ok {
		at = time.Now()
	}
	f.reading.setIfNone(at)
}

// endReading says that the facts were set.
func (f *Follower) endReading() { f.reading.take() }

// probed says that GPUs were asked for an answer, beginning at a time, and which have
// given none. While the facts don't say so too, it counts as no look.
func (f *Follower) probed(began time.Time, silent []string) {
	state, _ := f.cfg.Facts.State()
	unknown := slices.ContainsFunc(state.Node.GPUs, func(g gpu.GPU) bool {
		return slices.Contains(silent, string(g.UUID)) && facts.Dead(g) == nil
	})
	if !unknown {
		f.looked.setIfLater(began)
	}
}

// instant is a time, or none. It may be used concurrently.
type instant struct{ at atomic.Pointer[time.Time] }

// setIfLater sets the time unless there is a later one.
func (i *instant) setIfLater(at time.Time) {
	for {
		before := i.at.Load()
		if before != nil && before.After(at) || i.at.CompareAndSwap(before, &at) {
			return
		}
	}
}

func (i *instant) set(at time.Time) { i.at.Store(&at) }

func (i *instant) setIfNone(at time.Time) { i.at.CompareAndSwap(nil, &at) }

func (i *instant) get() (_ time.Time, ok bool) { return valueOf(i.at.Load()) }

// take returns the time and leaves none.
func (i *instant) take() (_ time.Time, ok bool) { return valueOf(i.at.Swap(nil)) }

func valueOf(at *time.Time) (_ time.Time, ok bool) {
	if at == nil {
		return time.Time{}, false
	}
	return *at, true
}
