package claim

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/tessera-dra/tessera/api/resource/v1beta1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// ErrPermanent marks errors that no retry can mend: the claim itself must
// change. Their text says so.
var ErrPermanent = errors.New("retrying can't help")

// Grant is one device given to one request of a claim.
type Grant struct {
	// Request as the allocation names it: "main", or "main/sub" where it was
	// one of the request's firstAvailable alternatives.
	Request string
	// Device in the node's pool.
	Device gpu.DeviceName
	// Admin: the device may be looked at while others use it. An admin grant
	// holds nothing.
	Admin bool
	// ShareID distinguishes several grants of one device; empty if the device can
	// be allocated only once.
	ShareID string
	// Consumed is this grant's part of an MPS share that can be allocated several
	// times: the requested amount. It is zero for other devices.
	Consumed gpu.Limits
	// MPS holds the settings of a configuration with strategy MPS; nil without one. A
	// share is a client of MPS without it. Its settings must not exceed the share's
	// limits, which aren't known here.
	MPS *MPS
	// TimeSlice is the interval that the configuration asks for with strategy
	// TimeSlicing; empty where it doesn't. Whole GPUs only.
	TimeSlice v1beta1.TimeSliceInterval
	// Ineffective: the configuration asks for TimeSlicing on a MIG device, which is valid
	// and has no effect.
	Ineffective bool

	// Of is the device for the claim: the granted device, or the whole GPU instead
	// of a share that has all of it. GPU has the facts of the device's GPU. Both are
	// zero until Place.
	Of  gpu.Device
	GPU gpu.GPU
	// Limits of the claim's processes on the device, as clients of an MPS daemon; nil
	// where there is none. SetLimits sets it.
	Limits *gpu.Limits
}

// Read returns the claim's grants from one driver's pool, in the order of the
// allocation, at least one. It skips results of other drivers and pools.
//
// It returns an error for a claim that isn't allocated, has nothing from this
// pool, or has a configuration that this driver can't honour; the last one is
// ErrPermanent. The configuration of an admin grant is checked, but has no
// effect.
func Read(claim *resourceapi.ResourceClaim, driver, pool string) ([]Grant, error) {
	if claim.Status.Allocation == nil {
		return nil, errors.New("the claim is not allocated: the scheduler has to give it devices first")
	}
	allocation := claim.Status.Allocation.Devices
	var grants []Grant
	for _, result := range allocation.Results {
		if result.Driver != driver || result.Pool != pool {
			continue
		}
		g, err := grantOf(allocation, driver, result)
		if err != nil {
			return nil, fmt.Errorf("request %q: %w", result.Request, err)
		}
		grants = append(grants, g)
	}
	if len(grants) == 0 {
		return nil, fmt.Errorf("the claim has no device of driver %s in pool %q; it has %s: delete the pod so that its claim is allocated again", driver, pool, describe(allocation.Results))
	}
	if err := errors.Join(checkTwice(grants), checkOneDaemon(grants)); err != nil {
		return nil, err
	}
	return grants, nil
}

// grantOf reads one result.
func grantOf(allocation resourceapi.DeviceAllocationResult, driver string, result resourceapi.DeviceRequestAllocationResult) (_ Grant, err error) {
	var config effective
	if len(allocation.Config) > 0 {
		if config, err = configFor(allocation, driver, result); err != nil {
			return Grant{}, err
		}
	}
	g := Grant{
		Request: result.Request,
		Device:  gpu.DeviceName(result.Device),
		Admin:   ptr.Deref(result.AdminAccess, false),
		ShareID: string(ptr.Deref(result.ShareID, "")),
	}
	if g.Admin {
		return g, nil
	}
	g.MPS, g.TimeSlice, g.Ineffective = config.mps, config.timeSlice, config.ineffective
	if g.Device.IsShare() {
		g.Consumed, err = consumed(result.ConsumedCapacity, driver)
	}
	if err != nil {
		return Grant{}, fmt.Errorf("device %q: %w", g.Device, err)
	}
	return g, nil
}

// Place returns the grant with the device that the node has under its name, and the
// facts of the device's GPU.
func (g Grant) Place(device gpu.Device, facts gpu.GPU) Grant {
	g.Of, g.GPU = wholeIfAll(g, device, facts), facts
	return g
}

// wholeIfAll replaces a share that has all of a GPU with the whole GPU, because no
// other claim can share it.
func wholeIfAll(g Grant, device gpu.Device, facts gpu.GPU) gpu.Device {
	share, ok := device.(gpu.Share)
	if !ok || share.Count > 0 || g.Consumed.ThreadPercentage != 100 {
		return device
	}
	whole, ok := share.Of.(gpu.Whole)
	if !ok {
		return device
	}
	if all, err := gpu.ShareableMiB(facts, whole); err != nil || g.Consumed.MemoryMiB != all {
		return device
	}
	return whole
}

// base is the silicon that the grant is of, alone or together with others.
func (g Grant) base() gpu.Device { return gpu.Base(g.Of) }

func (g Grant) isShare() bool {
	_, ok := g.Of.(gpu.Share)
	return ok
}

// UsesMPS reports whether the claim's processes are clients of an MPS daemon on the device.
func (g Grant) UsesMPS() bool { return !g.Admin && (g.isShare() || g.MPS != nil) }

// consumed reads the allocated amount of a share with multiple allocations.
// SetLimits refuses a share that needs an amount and has none.
func consumed(capacity map[resourceapi.QualifiedName]resource.Quantity, driver string) (gpu.Limits, error) {
	var l gpu.Limits
	for name, q := range capacity {
		switch resourceapi.QualifiedName(strings.TrimPrefix(string(name), driver+"/")) {
		case gpu.MemoryCapacity:
			l.MemoryMiB = mebibytes(q)
			if l.MemoryMiB < 1 {
				return gpu.Limits{}, fmt.Errorf("%w: %s of capacity memory were allocated, and an MPS share has at least 1Mi: request more, and create the claim again", ErrPermanent, q.String())
			}
		case gpu.ThreadCapacity:
			l.ThreadPercentage = int(min(max(q.Value(), 1), 100))
		}
	}
	return l, nil
}

// mebibytes rounds down: that is the unit of MPS limits.
func mebibytes(q resource.Quantity) int64 { return q.Value() >> 20 }

// checkTwice refuses an allocation that gives one device twice, neither as a
// share nor for an administrator to look at.
func checkTwice(grants []Grant) error {
	seen := make(map[gpu.DeviceName]Grant, len(grants))
	for _, g := range grants {
		if g.Admin {
			continue
		}
		if first, dup := seen[g.Device]; dup && (g.ShareID == "" || first.ShareID == "" || g.ShareID == first.ShareID) {
			return fmt.Errorf("device %q is allocated to request %q and to request %q of the same claim; %w: delete the claim and create it again",
				g.Device, first.Request, g.Request, ErrPermanent)
		}
		seen[g.Device] = g
	}
	return nil
}

// sameMPS reports whether the two ask for the same.
func sameMPS(a, b *MPS) bool {
	return a.ThreadPercentage == b.ThreadPercentage && a.MemoryMiB == b.MemoryMiB && maps.Equal(a.PerDevice, b.PerDevice)
}

// checkOneDaemon refuses MPS by configuration where one daemon can't serve all
// devices of the claim that have it.
func checkOneDaemon(grants []Grant) error {
	own := slices.DeleteFunc(slices.Clone(grants), func(g Grant) bool { return g.MPS == nil || g.Device.IsShare() })
	for _, g := range own[min(1, len(own)):] {
		first := own[0]
		if first.Device.IsPartition() || g.Device.IsPartition() {
			return fmt.Errorf("%w: strategy MPS for %s and for %s: an MPS daemon reaches one MIG device or several whole GPUs, and a claim has one daemon: use a claim for each",
				ErrPermanent, first.Device, g.Device)
		}
		if !sameMPS(first.MPS, g.MPS) {
			return fmt.Errorf("%w: requests %q and %q have different configurations for MPS, and a claim has one MPS daemon for all its GPUs: use two claims, or one configuration with defaultPerDevicePinnedMemoryLimit",
				ErrPermanent, first.Request, g.Request)
		}
	}
	return nil
}

// describe lists where the results of a claim are from.
func describe(results []resourceapi.DeviceRequestAllocationResult) string {
	var where []string
	for _, r := range results {
		where = append(where, fmt.Sprintf("%s/%s/%s", r.Driver, r.Pool, r.Device))
	}
	if len(where) == 0 {
		return "no devices at all"
	}
	slices.Sort(where)
	return strings.Join(slices.Compact(where), ", ")
}
