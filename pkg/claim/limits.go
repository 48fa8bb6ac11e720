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
func (p Placed) mainRequest() string { return resourceclaim.BaseRequestRef(p.Request) }

// isConfigured reports whether a configuration asks for MPS.
func (p Placed) isConfigured() bool { return !p.Admin && p.MPS != nil }

// daemon is the MPS daemon of a grant: that of a GPU or partition, that of the
// claim, or none.
type daemon struct {
	of  gpu.Device
	own bool
}

func (p Placed) daemon() daemon {
	switch {
	case p.isShare():
		return daemon{of: p.base()}
	case p.MPS != nil:
		return daemon{own: true}
	default:
		return daemon{}
	}
}

// checkContainers refuses a request whose devices no container can use together:
// a process that is a client of an MPS daemon sees what the daemon has, and
// nothing else.
func checkContainers(all []Placed) error {
	for i, p := range all {
		for _, q := range all[:i] {
			if p.Admin || q.Admin || p.mainRequest() != q.mainRequest() || p.daemon() == q.daemon() {
				continue
			}
			return fmt.Errorf("%w: request %q was given %s and %s, but a container reaches one MPS daemon only, and sees no other GPU then: make a request for each and give each container its own (resources.claims[].request), or have all shares cut from one GPU (constraints: matchAttribute gpu.nvidia.com/parentUUID)",
				ErrPermanent, p.mainRequest(), q.Device, p.Device)
		}
	}
	return nil
}

// SetLimits sets the limits of all grants of a claim that have MPS. It is
// ErrPermanent if no container could use what a request was given, or a
// configuration asks for more than there is. The shares of one request on one daemon
// are added up: a container has them all, and is one client. A claim in which no grant
// UsesMPS needs no call.
func SetLimits(all []Placed) error {
	if err := checkContainers(all); err != nil {
		return err
	}
	if err := checkPerDevice(all); err != nil {
		return err
	}
	for i, p := range all {
		if !p.UsesMPS() {
			continue
		}
		l, err := limitsOf(all, i)
		if err != nil {
			return fmt.Errorf("request %q was given device %q: %w", p.Request, p.Device, err)
		}
		all[i].Limits = &l
	}
	return nil
}

// limitsOf returns the limits of a grant that is a share, or has a configuration for
// MPS.
func limitsOf(all []Placed, i int) (gpu.Limits, error) {
	p := all[i]
	err := gpu.CheckMPS(p.GPU.Model)
	switch {
	case err != nil && p.isShare():
		return gpu.Limits{}, fmt.Errorf("%w: %w; delete the claim, and have the GPU's SharingPolicy offer it otherwise", ErrPermanent, err)
	case err != nil:
		return gpu.Limits{}, p.MPS.Refuse(err)
	case p.isShare():
		return limitsOfShares(all, p)
	default:
		return gpu.Limits{ThreadPercentage: p.MPS.ThreadPercentage, MemoryMiB: memoryFor(all, i)}, nil
	}
}

// limitsOfShares returns the limits of a share together with the others that the
// same container has on the same daemon.
func limitsOfShares(all []Placed, share Placed) (gpu.Limits, error) {
	var sum gpu.Limits
	var together []int
	for i, p := range all {
		if p.Admin || !p.isShare() || p.base() != share.base() || p.mainRequest() != share.mainRequest() {
			continue
		}
		own, err := limitsOfShare(p)
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
func limitsOfShare(p Placed) (gpu.Limits, error) {
	if s, ok := p.Of.(gpu.Share); ok && s.Count > 0 {
		return gpu.EqualShare(p.GPU, s)
	}
	l := p.Consumed
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
func memoryFor(all []Placed, i int) int64 {
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
func namesDevice(all []Placed, key string, i int) bool {
	if whole, ok := all[i].base().(gpu.Whole); ok && strings.EqualFold(key, string(whole.GPU)) {
		return true
	}
	index := 0
	for _, p := range all[:i] {
		if p.isConfigured() {
			index++
		}
	}
	return key == strconv.Itoa(index)
}

// checkPerDevice refuses a limit for a device that the claim doesn't have.
func checkPerDevice(all []Placed) error {
	var configured []int
	var names []string
	for i, p := range all {
		if p.isConfigured() {
			names = append(names, fmt.Sprintf("%d (%s of GPU %s)", len(names), p.Device, p.Of.Parent()))
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
