package prepare

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// resolved is a device as the node has it.
type resolved struct {
	device gpu.Device
	gpu    gpu.GPU
}

// resolve finds a device that a request was given on this node.
func (p *Preparer) resolve(request string, name gpu.DeviceName) (resolved, error) {
	d, g, err := p.Inventory.Device(name)
	if err != nil {
		return resolved{}, fmt.Errorf("request %q was given device %q: %w", request, name, err)
	}
	return resolved{device: d, gpu: g}, nil
}

// record is what the journal is to remember of the claim: all that the rest is
// made from. It refuses what no container could use.
func (p *Preparer) record(c *resourceapi.ResourceClaim, read []claim.Grant) (journal.Record, error) {
	r := journal.Record{ClaimUID: string(c.UID), Namespace: c.Namespace, Name: c.Name, BootID: p.BootID, Pods: reservedFor(c)}
	on := make([]gpu.GPU, 0, len(read))
	for _, g := range read {
		found, err := p.resolve(g.Request, g.Device)
		if err != nil {
			return r, err
		}
		grant := journal.GrantOf(g.Device, entire(found, g))
		grant.Request, grant.Admin, grant.ShareID, grant.TimeSlice = g.Request, g.Admin, g.ShareID, string(g.TimeSlice)
		r.Grants, on = append(r.Grants, grant), append(on, found.gpu)
	}
	if err := checkContainers(r.Grants, read); err != nil {
		return r, err
	}
	return r, setLimits(r.Grants, read, on)
}

// entire replaces a share that has all of a GPU with the whole GPU, because no
// other claim can share it.
func entire(found resolved, g claim.Grant) gpu.Device {
	share, ok := found.device.(gpu.Share)
	if !ok || share.Count > 0 || g.Consumed.ThreadPercentage != 100 {
		return found.device
	}
	whole, ok := share.Of.(gpu.Whole)
	if !ok {
		return found.device
	}
	if all, err := gpu.ShareableMiB(found.gpu, whole); err != nil || g.Consumed.MemoryMiB != all {
		return found.device
	}
	return whole
}

// daemon is the MPS daemon of a grant: that of a GPU or partition, that of the
// claim, or none.
type daemon struct {
	of  gpu.Device
	own bool
}

func daemonOf(g journal.Grant, read claim.Grant) daemon {
	switch {
	case g.Share != nil:
		return daemon{of: g.Base()}
	case read.MPS != nil:
		return daemon{own: true}
	default:
		return daemon{}
	}
}

// checkContainers refuses a request whose devices no container can use together:
// a process that is a client of an MPS daemon sees what the daemon has, and
// nothing else.
func checkContainers(grants []journal.Grant, read []claim.Grant) error {
	for i, g := range grants {
		for j, h := range grants[:i] {
			if g.Admin || h.Admin || mainRequest(g) != mainRequest(h) || daemonOf(g, read[i]) == daemonOf(h, read[j]) {
				continue
			}
			return fmt.Errorf("%w: request %q was given %s and %s, but a container reaches one MPS daemon only, and sees no other GPU then: make a request for each and give each container its own (resources.claims[].request), or have all shares cut from one GPU (constraints: matchAttribute gpu.nvidia.com/parentUUID)",
				claim.ErrPermanent, mainRequest(g), h.Device, g.Device)
		}
	}
	return nil
}

// mainRequest is the request that a container can name: without the alternative
// that was chosen.
func mainRequest(g journal.Grant) string {
	name, _, _ := strings.Cut(g.Request, "/")
	return name
}

// setLimits says of all grants with MPS what the claim's processes may use. The
// shares of one request on one daemon are added up: a container has them all, and
// is one client.
func setLimits(grants []journal.Grant, read []claim.Grant, on []gpu.GPU) error {
	if err := checkPerDevice(grants, read); err != nil {
		return err
	}
	for i, g := range grants {
		if g.Admin || (g.Share == nil && read[i].MPS == nil) {
			continue
		}
		l, err := limitsOf(grants, read, on, i)
		if err != nil {
			return fmt.Errorf("request %q was given device %q: %w", g.Request, g.Device, err)
		}
		grants[i].MPS = &journal.MPS{ThreadPercentage: l.ThreadPercentage, MemoryMiB: l.MemoryMiB}
	}
	return nil
}

// limitsOf are the limits of a grant that is a share, or has a configuration for
// MPS.
func limitsOf(grants []journal.Grant, read []claim.Grant, on []gpu.GPU, i int) (gpu.Limits, error) {
	share, m := grants[i].Share != nil, read[i].MPS
	err := gpu.CheckMPS(on[i].Model)
	switch {
	case err != nil && share:
		return gpu.Limits{}, fmt.Errorf("%w: %w; delete the claim, and have the GPU's SharingPolicy offer it otherwise", claim.ErrPermanent, err)
	case err != nil:
		return gpu.Limits{}, m.Refuse(err)
	case share:
		return limitsOfShares(grants, read, on, i)
	default:
		return gpu.Limits{ThreadPercentage: m.ThreadPercentage, MemoryMiB: memoryFor(grants, read, i)}, nil
	}
}

// limitsOfShares are the limits of a share together with the others that the same
// container has on the same daemon.
func limitsOfShares(grants []journal.Grant, read []claim.Grant, on []gpu.GPU, i int) (gpu.Limits, error) {
	var all gpu.Limits
	var together []int
	for j, h := range grants {
		if h.Admin || h.Share == nil || h.Base() != grants[i].Base() || mainRequest(h) != mainRequest(grants[i]) {
			continue
		}
		own, err := limitsOfShare(h, read[j], on[j])
		if err != nil {
			return gpu.Limits{}, err
		}
		all = gpu.Limits{ThreadPercentage: min(all.ThreadPercentage+own.ThreadPercentage, 100), MemoryMiB: all.MemoryMiB + own.MemoryMiB}
		together = append(together, j)
	}
	limits := all
	for _, j := range together {
		if read[j].MPS == nil {
			continue
		}
		want := gpu.Limits{ThreadPercentage: read[j].MPS.ThreadPercentage, MemoryMiB: memoryFor(grants, read, j)}
		if err := checkStricter(want, all); err != nil {
			return gpu.Limits{}, read[j].MPS.Refuse(err)
		}
		limits.ThreadPercentage = stricter(limits.ThreadPercentage, want.ThreadPercentage)
		limits.MemoryMiB = stricter(limits.MemoryMiB, want.MemoryMiB)
	}
	return limits, nil
}

// limitsOfShare are a share's own limits, both more than 0.
func limitsOfShare(g journal.Grant, read claim.Grant, on gpu.GPU) (gpu.Limits, error) {
	if s, ok := g.Of().(gpu.Share); ok && s.Count > 0 {
		return gpu.EqualShare(on, s)
	}
	l := read.Consumed
	if l.MemoryMiB == 0 {
		return l, fmt.Errorf("%w: the allocation doesn't say how much memory of it is the claim's (consumedCapacity): API server and scheduler have to have the feature gate DRAConsumableCapacity; delete the claim and let it be allocated anew",
			claim.ErrPermanent)
	}
	if l.ThreadPercentage == 0 {
		l.ThreadPercentage = 100
	}
	return l, nil
}

// stricter is the lower of two limits, of which 0 is none.
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

// memoryFor is the memory limit in the configuration of the i-th grant, for its
// device; 0: none.
func memoryFor(grants []journal.Grant, read []claim.Grant, i int) int64 {
	m := read[i].MPS
	limit := int64(0)
	for key, mib := range m.PerDevice {
		if namesDevice(grants, read, key, i) {
			limit = stricter(limit, mib)
		}
	}
	if limit == 0 {
		return m.MemoryMiB
	}
	return limit
}

// namesDevice says whether a key of defaultPerDevicePinnedMemoryLimit is for the
// i-th grant: it is the UUID of a GPU, or an index among the grants that have a
// configuration for MPS. A partition has no UUID before it is made.
func namesDevice(grants []journal.Grant, read []claim.Grant, key string, i int) bool {
	if whole, ok := grants[i].Base().(gpu.Whole); ok && strings.EqualFold(key, string(whole.GPU)) {
		return true
	}
	index := 0
	for j := range i {
		if isConfigured(read[j]) {
			index++
		}
	}
	return key == strconv.Itoa(index)
}

func isConfigured(g claim.Grant) bool { return !g.Admin && g.MPS != nil }

// checkPerDevice refuses a limit for a device that the claim doesn't have.
func checkPerDevice(grants []journal.Grant, read []claim.Grant) error {
	var configured []int
	var names []string
	for i, g := range read {
		if isConfigured(g) {
			names = append(names, fmt.Sprintf("%d (%s of GPU %s)", len(names), g.Device, grants[i].GPU))
			configured = append(configured, i)
		}
	}
	for _, i := range configured {
		for key := range read[i].MPS.PerDevice {
			if slices.ContainsFunc(configured, func(j int) bool { return namesDevice(grants, read, key, j) }) {
				continue
			}
			return read[i].MPS.Refuse(fmt.Errorf("sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[%s]: the claim has no such device; name a whole GPU by its UUID, or a device by its index: %s", key, strings.Join(names, ", ")))
		}
	}
	return nil
}

// given returns what the claim was given, to take it back. Of a record that can't
// be read, device names are all there is to go by; what they don't tell is found
// when nothing holds it any more.
func (p *Preparer) given(claimUID string) journal.Record {
	if r, ok := p.Journal.Get(claimUID); ok {
		return r
	}
	for _, u := range p.Journal.Unreadable() {
		if u.ClaimUID != claimUID {
			continue
		}
		r := u.Record
		r.Grants = slices.Clone(r.Grants)
		for i, g := range r.Grants {
			if d, _, err := p.Inventory.Device(g.Device); err == nil {
				r.Grants[i] = journal.GrantOf(g.Device, d)
				r.Grants[i].Request, r.Grants[i].Admin = g.Request, g.Admin
				if r.Grants[i].Share != nil {
					r.Grants[i].MPS = &journal.MPS{} // which every share has
				}
			}
		}
		return r
	}
	return journal.Record{ClaimUID: claimUID}
}
