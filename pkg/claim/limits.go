package claim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// mainRequest is the request that a container can name: without the alternative
// that was chosen.
func (g Grant) mainRequest() string { return resourceclaim.BaseRequestRef(g.Request) }

// isConfigured reports whether a configuration asks for MPS.
func (g Grant) isConfigured() bool { return !g.Admin && g.MPS != nil }

// daemon is the MPS daemon of a grant: that of a GPU or partition, that of the
// claim, or none.
type daemon struct {
	of  gpu.Device
	own bool
}

func (g Grant) daemon() daemon {
	switch {
	case g.isShare():
		return daemon{of: g.base()}
	case g.MPS != nil:
		return daemon{own: true}
	default:
		return daemon{}
	}
}

// checkContainers refuses a request whose devices no container can use together:
// a process that is a client of an MPS daemon sees what the daemon has, and
// nothing else.
func checkContainers(all []Grant) error {
	for i, g := range all {
		for _, h := range all[:i] {
			if g.Admin || h.Admin || g.mainRequest() != h.mainRequest() || g.daemon() == h.daemon() {
				continue
			}
			return fmt.Errorf("%w: request %q was given %s and %s, but a container reaches one MPS daemon only, and sees no other GPU then: make a request for each and give each container its own (resources.claims[].request), or have all shares cut from one GPU (constraints: matchAttribute gpu.nvidia.com/parentUUID)",
				ErrPermanent, g.mainRequest(), h.Device, g.Device)
		}
	}
	return nil
}

// SetLimits sets the limits of all grants of a claim that have MPS. It is
// ErrPermanent if no container could use what a request was given, or a
// configuration asks for more than there is. The shares of one request on one daemon
// are added up: a container has them all, and is one client. A claim in which no grant
// UsesMPS needs no call.
func SetLimits(all []Grant) error {
	if err := checkContainers(all); err != nil {
		return err
	}
	if err := checkPerDevice(all); err != nil {
		return err
	}
	for i, g := range all {
		if !g.UsesMPS() {
			continue
		}
		l, err := limitsOf(all, i)
		if err != nil {
			return fmt.Errorf("request %q was given device %q: %w", g.Request, g.Device, err)
		}
		all[i].Limits = &l
	}
	return nil
}

// limitsOf returns the limits of a grant that is a share, or has a configuration for
// MPS.
func limitsOf(all []Grant, i int) (gpu.Limits, error) {
	g := all[i]
	err := gpu.CheckMPS(g.GPU.Model)
	switch {
	case err != nil && g.isShare():
		return gpu.Limits{}, fmt.Errorf("%w: %w; delete the claim, and have the GPU's SharingPolicy offer it otherwise", ErrPermanent, err)
	case err != nil:
		return gpu.Limits{}, g.MPS.Refuse(err)
	case g.isShare():
		return limitsOfShares(all, g)
	default:
		return gpu.Limits{ThreadPercentage: g.MPS.ThreadPercentage, MemoryMiB: memoryFor(all, i)}, nil
	}
}

// limitsOfShares returns the limits of a share together with the others that the
// same container has on the same daemon.
func limitsOfShares(all []Grant, share Grant) (gpu.Limits, error) {
	var sum gpu.Limits
	var together []int
	for i, g := range all {
		if g.Admin || !g.isShare() || g.base() != share.base() || g.mainRequest() != share.mainRequest() {
			continue
		}
		own, err := limitsOfShare(g)
		if err != nil {
			return gpu.Limits{}, err
		}
		sum = gpu.Limits{ThreadPercentage: min(sum.ThreadPercentage+own.ThreadPercentage, 100), MemoryMiB: sum.MemoryMiB + own.MemoryMiB}
		together = append(together, i)
	}
	limits := sum
	for _, i := range together {
		m := all[i].MPS
		if m == nil {
			continue
		}
		want := gpu.Limits{ThreadPercentage: m.ThreadPercentage, MemoryMiB: memoryFor(all, i)}
		if err := checkStricter(want, sum); err != nil {
			return gpu.Limits{}, m.Refuse(err)
		}
		limits.ThreadPercentage = stricter(limits.ThreadPercentage, want.ThreadPercentage)
		limits.MemoryMiB = stricter(limits.MemoryMiB, want.MemoryMiB)
	}
	return limits, nil
}

// limitsOfShare returns a share's own limits, both more than 0.
func limitsOfShare(g Grant) (gpu.Limits, error) {
	if s, ok := g.Of.(gpu.Share); ok && s.Count > 0 {
		return gpu.EqualShare(g.GPU, s)
	}
	l := g.Consumed
	if l.MemoryMiB == 0 {
		return l, fmt.Errorf("%w: the allocation doesn't say how much memory of it is the claim's (consumedCapacity): API server and scheduler have to have the feature gate DRAConsumableCapacity; delete the claim and let it be allocated again",
			ErrPermanent)
	}
	if l.ThreadPercentage == 0 {
		l.ThreadPercentage = 100
	}
	return l, nil
}

// stricter returns the lower of two limits, of which 0 is none.
func stricter[N int | int64](a, b N) N {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// checkStricter refuses a configuration that asks for more than shares have.
func checkStricter(want, have gpu.Limits) error {
	const never = "a configuration makes a share smaller, never larger: ask for less, or for a larger share"
	if want.ThreadPercentage > have.ThreadPercentage {
		return fmt.Errorf("sharing.mpsConfig.defaultActiveThreadPercentage is %d, and the MPS share has %d; %s", want.ThreadPercentage, have.ThreadPercentage, never)
	}
	if want.MemoryMiB > have.MemoryMiB {
		return fmt.Errorf("sharing.mpsConfig asks for %dMi of memory (defaultPinnedDeviceMemoryLimit, defaultPerDevicePinnedMemoryLimit), and the MPS share has %dMi; %s",
			want.MemoryMiB, have.MemoryMiB, never)
	}
	return nil
}

// memoryFor returns the memory limit in the configuration of the i-th grant, for its
// device; 0: none.
func memoryFor(all []Grant, i int) int64 {
	m := all[i].MPS
	limit := int64(0)
	for key, mib := range m.PerDevice {
		if namesDevice(all, key, i) {
			limit = stricter(limit, mib)
		}
	}
	if limit == 0 {
		return m.MemoryMiB
	}
	return limit
}

// namesDevice reports whether a key of defaultPerDevicePinnedMemoryLimit is for the
// i-th grant: it is the UUID of a GPU, or an index among the grants that have a
// configuration for MPS. A partition has no UUID before it is created.
func namesDevice(all []Grant, key string, i int) bool {
	if whole, ok := all[i].base().(gpu.Whole); ok && strings.EqualFold(key, string(whole.GPU)) {
		return true
	}
	index := 0
	for _, g := range all[:i] {
		if g.isConfigured() {
			index++
		}
	}
	return key == strconv.Itoa(index)
}

// checkPerDevice refuses a limit for a device that the claim doesn't have.
func checkPerDevice(all []Grant) error {
	var configured []int
	var names []string
	for i, g := range all {
		if g.isConfigured() {
			names = append(names, fmt.Sprintf("%d (%s of GPU %s)", len(names), g.Device, g.Of.Parent()))
			configured = append(configured, i)
		}
	}
	for _, i := range configured {
		for key := range all[i].MPS.PerDevice {
			if slices.ContainsFunc(configured, func(j int) bool { return namesDevice(all, key, j) }) {
				continue
			}
			return all[i].MPS.Refuse(fmt.Errorf("sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[%s]: the claim has no such device; name a whole GPU by its UUID, or a device by its index: %s", key, strings.Join(names, ", ")))
		}
	}
	return nil
}
