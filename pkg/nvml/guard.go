package nvml

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// limits say how long a call may take before its GPU counts as one that does
// not respond. Together with the pause between two Probes, each leaves room
// within the 30 seconds in which a node reports such a GPU.
type limits struct {
	// initialize bounds nvmlInit, which may initialize all GPUs.
	initialize time.Duration
	// identify bounds the first call for a GPU: without the persistence daemon, the
	// driver initializes the GPU then, which takes seconds.
	identify time.Duration
	// read bounds what only reads.
	read time.Duration
	// change bounds what changes the GPU: MIG mode and instances take seconds.
	change time.Duration
}

func defaultLimits() limits {
	return limits{initialize: 30 * time.Second, identify: 15 * time.Second, read: 10 * time.Second, change: 30 * time.Second}
}

// subject is what calls are for: a GPU by UUID or, as long as it has not been
// identified, by index; or the driver.
type subject string

const theDriver subject = "the driver"

func theIndex(i int) subject { return subject(fmt.Sprintf("GPU %d", i)) }

// guard keeps a call into the driver that never returns from blocking anybody
// else: the caller stops waiting after a while, and as long as the call is
// under way, further calls for the same subject fail at once. So each subject
// has at most the calls that began before the first one was late, and then no
// new goroutine or thread.
type guard struct {
	mu    sync.Mutex
	calls map[subject]map[*call]bool
}

// call is a call under way.
type call struct {
	what  string
	since time.Time
	late  bool
}

func newGuard() *guard { return &guard{calls: map[subject]map[*call]bool{}} }

// ask runs f. It returns ErrNotResponding if f takes longer than within; f goes on
// then, and its result is dropped. If another call for the subject is late, ask
// returns ErrNotResponding at once, without f.
func ask[T any](g *guard, about subject, what string, within time.Duration, f func() (T, error)) (T, error) {
	var none T
	c, err := g.begin(about, what)
	if err != nil {
		return none, err
	}
	type answer struct {
		value T
		err   error
	}
	answered := make(chan answer, 1)
	go func() {
		value, err := f()
		g.end(about, c)
		answered <- answer{value, err}
	}()
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case a := <-answered:
		return a.value, a.err
	case <-timer.C:
		g.mu.Lock()
		c.late = true
		g.mu.Unlock()
		return none, c.err(about)
	}
}

// do is ask for a call without a result.
func do(g *guard, about subject, what string, within time.Duration, f func() error) error {
	_, err := ask(g, about, what, within, func() (struct{}, error) { return struct{}{}, f() })
	return err
}

func (g *guard) begin(about subject, what string) (*call, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if late := g.oldestLate(about); late != nil {
		return nil, late.err(about)
	}
	c := &call{what: what, since: time.Now()}
	if g.calls[about] == nil {
		g.calls[about] = map[*call]bool{}
	}
	g.calls[about][c] = true
	return c, nil
}

func (g *guard) end(about subject, c *call) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.calls[about], c)
	if len(g.calls[about]) == 0 {
		delete(g.calls, about)
	}
}

// late returns an error if a call for the subject is late.
func (g *guard) late(about subject) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c := g.oldestLate(about); c != nil {
		return c.err(about)
	}
	return nil
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
func (c *call) err(about subject) error {
	return fmt.Errorf("%s: a call into the driver (%s) that began at %s has not returned: %w",
		about, c.what, c.since.UTC().Format(time.RFC3339), ErrNotResponding)
}
