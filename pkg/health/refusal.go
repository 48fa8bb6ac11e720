package health

import (
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	// firstRetry and maxRetry are the shortest and the longest time for which a device that
	// a claim could not be given is kept from others.
	firstRetry = time.Minute
	maxRetry   = 30 * time.Minute
)

// Refusal says that a claim could not be given its device, because of the device.
type Refusal struct {
	Device gpu.DeviceName
	// Message is a clause that names the device and the reason.
	Message string
	At      time.Time
	Load    Load
}

// ObserveRefusal returns the state after a claim could not be given its device. The GPU then
// has the condition PrepareFailed: for a minute, and twice as long each time that the device is
// tried again in vain, for half an hour at most. A refusal in that time, of a claim that was
// allocated its device before, adds its device and changes nothing else. A condition that comes
// back within ten minutes begins with a longer time.
func (s State) ObserveRefusal(r Refusal) State {
	s.Causes = slices.Clone(s.Causes)
	i := slices.IndexFunc(s.Causes, isRefusal)
	if i < 0 {
		c := Cause{Type: gpu.PrepareFailed, Source: FromPrepare, Since: r.At, Tries: s.flapsOf(gpu.PrepareFailed, FromPrepare)}
		s.Causes = append(s.Causes, c.refusedAgain(r))
		return s
	}
	c := s.Causes[i]
	isBefore := r.At.Before(c.RetryAt) && c.RetryAt.Sub(r.At) <= maxRetry // the clock may be set back
	switch {
	case !isBefore:
		s.Causes[i] = c.refusedAgain(r)
	case !slices.Contains(c.Refused, r.Device):
		c.Refused = append(slices.Clone(c.Refused), r.Device)
		s.Causes[i] = c
	}
	return s
}

// refusedAgain returns the cause after its device was tried in vain. What was tried is tried
// next when all others have been.
func (c Cause) refusedAgain(r Refusal) Cause {
	others := slices.DeleteFunc(slices.Clone(c.Refused), func(d gpu.DeviceName) bool { return d == r.Device })
	c.Refused = append(others, r.Device)
	pause := firstRetry
	for range c.Tries {
		pause = min(2*pause, maxRetry)
	}
	c.Tries = min(c.Tries+1, maxFlaps)
	c.Message, c.Load, c.RetryAt = r.Message, r.Load, r.At.Add(pause)
	return c
}

// ObservePrepared returns the state after a claim was given a device that others could not be
// given: they may try again.
func (s State) ObservePrepared(at time.Time) State {
	i := slices.IndexFunc(s.Causes, isRefusal)
	if i < 0 {
		return s
	}
	s.Flaps = recordEnd(slices.Clone(s.Flaps), s.Causes[i], at)
	s.Causes = slices.Delete(slices.Clone(s.Causes), i, i+1)
	return s
}

func isRefusal(c Cause) bool { return c.isOf(gpu.PrepareFailed, FromPrepare) }
