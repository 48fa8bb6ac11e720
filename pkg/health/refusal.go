package health

import (
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	// minPause and maxPause are the shortest and the longest time for which a device that
	// a claim could not be given is kept from others.
	minPause = time.Minute
	maxPause = 30 * time.Minute
	// maxRefused is how many refused devices are kept, the last ones. A GPU has no more at
	// once; while plans change, there are others.
	maxRefused = 128
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
// has the condition PrepareFailed, and the device is kept from other claims: for a minute, and
// twice as long each time that it is tried again in vain, for half an hour at most. A refusal in
// that time, of a claim that was allocated its device before, adds its device and changes
// nothing else. A condition that comes back within ten minutes begins with a longer time.
func (s State) ObserveRefusal(r Refusal) State {
	s.Causes = slices.Clone(s.Causes)
	i := slices.IndexFunc(s.Causes, isRefusal)
	if i < 0 {
		s.Flaps = s.recentFlaps(r.At)
		c := Cause{Type: gpu.PrepareFailed, Source: FromPrepare, Since: r.At, Tries: s.flapsOf(gpu.PrepareFailed, FromPrepare)}
		s.Causes = append(s.Causes, c.triedInVain(r))
		return s
	}
	c := s.Causes[i].withPause(r.At)
	if r.At.Before(c.RetryAt) {
		c = c.refuse(r, slices.Contains(c.Refused, r.Device))
	} else {
		c = c.triedInVain(r)
	}
	s.Causes[i] = c
	return s
}

// refuse returns the cause after another refusal. The device is the last to be tried again,
// unless it keeps its place.
func (c Cause) refuse(r Refusal, keepsPlace bool) Cause {
	c.Load = r.Load // it outlived an earlier load of the driver
	if keepsPlace {
		return c
	}
	others := slices.DeleteFunc(slices.Clone(c.Refused), func(d gpu.DeviceName) bool { return d == r.Device })
	c.Refused = slices.Concat(others[max(0, len(others)+1-maxRefused):], []gpu.DeviceName{r.Device})
	return c
}

// triedInVain returns the cause after its device was tried in vain, for the first time or
// again. The pause ends with a second, because the inventory has no fractions of one, and both
// the plugin and the controller compare their clocks with it.
func (c Cause) triedInVain(r Refusal) Cause {
	pause := minPause
	for range c.Tries {
		pause = min(2*pause, maxPause)
	}
	c.Tries = min(c.Tries+1, maxFlaps)
	c.Message, c.RetryAt = r.Message, r.At.Add(pause).Truncate(time.Second)
	return c.refuse(r, false)
}

// withPause returns the cause with a pause that ends within maxPause: one that seems to be
// longer began before the clock was set back.
func (c Cause) withPause(now time.Time) Cause {
	if c.RetryAt.Sub(now) > maxPause {
		c.RetryAt = now.Add(maxPause).Truncate(time.Second)
	}
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
