package nvml

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/notify"
)

// access is the effect of a call on its subject, which decides which calls it excludes.
type access int

const (
	// reads: the call waits while a change of the subject is under way.
	reads access = iota
	// readsUnlessChanged: the call isn't made then, and fails with errBeingChanged.
	readsUnlessChanged
	// changes: the call waits until no other call for the subject is under way.
	changes
)

// errBeingChanged means that a call was not made because a change of its subject is under way.
var errBeingChanged = errors.New("the GPU is being changed")

// guard keeps a call into the driver that never returns from blocking others: the
// caller stops waiting after a while, and as long as the call is under way,
// further calls for the same subject fail at once. So each subject has at most
// the calls that began before the first one was late, and no new goroutines or
// threads after that.
//
// It also keeps other calls out of the driver while a call changes their subject. The driver
// may let them wait for the change, which takes longer than they may, or may answer that the
// GPU is lost, because it unbinds the GPU meanwhile (nvml.h, nvmlDeviceSetMigMode). So a
// GPU that is being changed counts neither as late nor as lost.
type guard struct {
	mu    notify.Mutex
	calls map[subject]map[*call]bool
	// waiting is how many changes wait until no other call is under way.
	waiting map[subject]int
	// identified is when the last call that identifies a GPU returned.
	identified time.Time
}

// identifying is the text in errors for a call that identifies a GPU.
const identifying = "identify it"

// call is a call under way.
type call struct {
	about subject
	as    access
	what  string
	since time.Time
	late  bool
	ended chan struct{} // closed when it has returned
}

func newGuard() *guard {
	return &guard{calls: map[subject]map[*call]bool{}, waiting: map[subject]int{}}
}

// ask runs f when its access to the subject allows that. It returns ErrNotResponding if f
// takes longer than within; f goes on then, and its result is dropped. If another call for
// the subject is late, it returns ErrNotResponding at once, without f.
func ask[T any](g *guard, about subject, as access, what string, within time.Duration, f func() (T, error)) (T, error) {
	var none, value T
	c, err := g.begin(about, as, what)
	if err != nil {
		return none, err
	}
	go func() {
		defer g.end(c)
		value, err = f()
	}()
	if late := g.await(c, within); late != nil {
		return none, late // value and err are still f's
	}
	return value, err
}

// await returns nil when the call has ended, and ErrNotResponding if it doesn't in its time.
func (g *guard) await(c *call, within time.Duration) error {
	timer := time.NewTimer(within)
	defer timer.Stop()
	for {
		select {
		case <-c.ended:
			return nil
		case <-timer.C:
			left := g.isLate(c, within)
			if left <= 0 {
				return c.err()
			}
			timer.Reset(left)
		}
	}
}

// isLate marks a call as late whose time is over. It returns the time that is left for a
// call that may have been waiting for others.
func (g *guard) isLate(c *call, within time.Duration) (left time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.what == identifying {
		left = within - time.Since(g.identified)
	}
	c.late = left <= 0
	g.mu.Wake()
	return left
}

// begin adds a call, when its access allows that. The wait ends in any case: each call that
// it waits for returns, or is late.
func (g *guard) begin(about subject, as access, what string) (c *call, err error) {
	if as == changes {
		g.announce(about, 1)
		defer g.announce(about, -1)
	}
	g.mu.Await(func() bool {
		switch late := g.oldestLate(about); {
		case late != nil:
			err = late.err()
		case g.mayBegin(about, as):
			c = g.add(about, as, what)
		case as == readsUnlessChanged:
			err = errBeingChanged
		default:
			return false
		}
		return true
	})
	return c, err
}

// announce adds n to the changes that wait. Calls that read let them go first.
func (g *guard) announce(about subject, n int) {
	g.mu.Change(func() {
		g.waiting[about] += n
		if g.waiting[about] == 0 {
			delete(g.waiting, about)
		}
	})
}

// mayBegin reports whether no other call keeps one with this access waiting; needs the lock.
func (g *guard) mayBegin(about subject, as access) bool {
	if as == changes {
		return len(g.calls[about]) == 0
	}
	for c := range g.calls[about] {
		if c.as == changes {
			return false
		}
	}
	return g.waiting[about] == 0
}

// add stores a call that begins; needs the lock.
func (g *guard) add(about subject, as access, what string) *call {
	c := &call{about: about, as: as, what: what, since: time.Now(), ended: make(chan struct{})}
	if g.calls[about] == nil {
		g.calls[about] = map[*call]bool{}
	}
	g.calls[about][c] = true
	return c
}

// end removes a call that has returned.
func (g *guard) end(c *call) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.what == identifying {
		g.identified = time.Now()
	}
	delete(g.calls[c.about], c)
	if len(g.calls[c.about]) == 0 {
		delete(g.calls, c.about)
	}
	g.mu.Wake()
	close(c.ended)
}

// allLate returns the subjects that have a late call, in order.
func (g *guard) allLate() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []string
	for _, about := range slices.Sorted(maps.Keys(g.calls)) {
		if g.oldestLate(about) != nil {
			all = append(all, string(about))
		}
	}
	return all
}

// oldestLate returns the late call that began first, nil where none is late;
// needs the lock.
func (g *guard) oldestLate(about subject) *call {
	var oldest *call
	for c := range g.calls[about] {
		if c.late && (oldest == nil || c.since.Before(oldest.since)) {
			oldest = c
		}
	}
	return oldest
}

// err names the call and when it began, and so stays the same as long as the
// call is under way.
func (c *call) err() error {
	return fmt.Errorf("%s: a call into the driver (%s) that began at %s has not returned: %w",
		c.about, c.what, c.since.UTC().Format(time.RFC3339), ErrNotResponding)
}
