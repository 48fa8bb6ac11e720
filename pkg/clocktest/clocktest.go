// Package clocktest lets tests set the clock, as an admin or NTP does: times that were read
// before and after differ by what they show, but not in how much later they were read,
// because Go's times also have a reading of the monotonic clock.
package clocktest

import (
	"sync/atomic"
	"time"
	"unsafe"

	"k8s.io/utils/clock"
)

// Shift returns t as it would have been read if the clock had been set by whole seconds
// before. t must be from time.Now.
func Shift(t time.Time, by time.Duration) time.Time {
	// The first word has seconds above 30 bits of nanoseconds, the second one the monotonic
	// reading; see the type's definition.
	*(*uint64)(unsafe.Pointer(&t)) += uint64(by/time.Second) << 30
	return t
}

// Clock is a real clock that can be set.
type Clock struct {
	clock.RealClock
	by atomic.Int64
}

// Shift sets the clock forwards or backwards by whole seconds.
func (c *Clock) Shift(by time.Duration) { c.by.Add(int64(by)) }

// Now implements clock.PassiveClock.
func (c *Clock) Now() time.Time { return Shift(c.RealClock.Now(), time.Duration(c.by.Load())) }

// Since implements clock.PassiveClock.
func (c *Clock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }
