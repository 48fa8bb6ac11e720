package facts

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Outdated returns an error if the facts may not be true any more: for longer than
// after, no look at the GPUs has ended, or a reading that something has requested.
// The error's text stays the same until they are known to be true again.
func (f *Facts) Outdated(after time.Duration) error {
	var oldest time.Time
	for _, i := range []*instant{&f.requests.looked, &f.requests.reading, &f.requests.requested} {
		if at, ok := i.get(); ok && (oldest.IsZero() || at.Before(oldest)) {
			oldest = at
		}
	}
	if oldest.IsZero() || time.Since(oldest) <= after {
		return nil
	}
	return fmt.Errorf("the plugin has not been able to look at the GPUs since %s", oldest.UTC().Format(time.RFC3339))
}

// Looked says that GPUs were asked for an answer, beginning at a time, and which have
// given none. While the facts don't say so too, it counts as no look.
func (f *Facts) Looked(began time.Time, silent []string) {
	state, _ := f.State()
	unknown := slices.ContainsFunc(state.Node.GPUs, func(g gpu.GPU) bool {
		return slices.Contains(silent, string(g.UUID)) && Dead(g) == nil
	})
	if !unknown {
		f.requests.looked.setIfLater(began)
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
