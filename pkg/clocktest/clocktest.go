// Package clocktest lets tests set the clock, as an admin or NTP does. That changes the wall
// clock of the times that are read, but not the time that passes between two of them, because
// Go's times also have a reading of the monotonic clock.
package clocktest

import (
	"sync/atomic"
	"time"
	"unsafe"

	"k8s.io/utils/clock"
)

// Shift returns t as if it had been read after the clock was set forwards or backwards by
// whole seconds. t must be from time.Now.
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
