package nvml

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// nvlinks stores the NVLinks of each GPU that were seen active, and their other
// ends. A link that goes down later stays: it may be training again, and the
// node's report must not change with that. The data ends with the session, and
// so with the driver.
type nvlinks struct {
	ends map[gpu.UUID]map[int]linkEnd
	none map[gpu.UUID]bool // GPUs without NVLink
}

// linkEnd is the device at the other end of a link.
type linkEnd struct {
	isSwitch bool
	pci      gpu.PCIAddress
}

// knownLinks returns a copy of the stored links of a GPU; none is true if it has no
// NVLink.
func (s *Session) knownLinks(uuid gpu.UUID) (ends map[int]linkEnd, none bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.nvlinks.ends[uuid]), s.nvlinks.none[uuid]
}

// addLinks stores links that were found.
func (s *Session) addLinks(uuid gpu.UUID, found map[int]linkEnd, none bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nvlinks.none[uuid] = none
	if s.nvlinks.ends[uuid] == nil {
		s.nvlinks.ends[uuid] = map[int]linkEnd{}
	}
	maps.Copy(s.nvlinks.ends[uuid], found)
}

// readNVLink reads and stores a GPU's links. A link about which NVML has no
// data now is read again next time. The error is that of the first call that failed.
func (s *Session) readNVLink(handle gonvml.Device, uuid gpu.UUID, object string) (failed error) {
	known, none := s.knownLinks(uuid)
	if none {
		return nil
	}
	supported := len(known) > 0
	found := map[int]linkEnd{}
	for link := range gonvml.NVLINK_MAX_LINKS {
		if _, ok := known[link]; ok {
			continue
		}
		state, ret := handle.GetNvLinkState(link)
		if ret == gonvml.ERROR_INVALID_ARGUMENT {
			break // the GPU has no more links
		}
		supported = supported || ret != gonvml.ERROR_NOT_SUPPORTED
		failed = cmp.Or(failed, failure(wrap(ret, "nvmlDeviceGetNvLinkState", object)))
		if ret != gonvml.SUCCESS || state != gonvml.FEATURE_ENABLED {
			continue
		}
		end, ok, err := s.readLinkEnd(handle, link, object)
		failed = cmp.Or(failed, err)
		if ok && err == nil {
			found[link] = end
		}
	}
	s.addLinks(uuid, found, !supported)
	return failed
}

// failure returns nil if the GPU or its driver doesn't have the feature.
func failure(err error) error {
	if errors.Is(err, ErrNotSupported) {
		return nil
	}
	return err
}

// readLinkEnd reads the device at the other end of a link; ok is false if NVML has no
// data about it. A driver that doesn't know the kind of the device may still
// know its PCI address, and vice versa. failed is the error of a call that may answer later.
func (s *Session) readLinkEnd(handle gonvml.Device, link int, object string) (end linkEnd, ok bool, failed error) {
	if s.has[callLinkEnd] {
		kind, ret := handle.GetNvLinkRemoteDeviceType(link)
		ok = ret == gonvml.SUCCESS
		end.isSwitch = ok && kind == gonvml.NVLINK_DEVICE_TYPE_SWITCH
		failed = failure(wrap(ret, callLinkEnd, object))
	}
	pci, ret := handle.GetNvLinkRemotePciInfo(link)
	if ret == gonvml.SUCCESS {
		end.pci, ok = gpu.NewPCIAddress(cString(pci.BusId[:])), true
	}
	return end, ok, cmp.Or(failed, failure(wrap(ret, "nvmlDeviceGetNvLinkRemotePciInfo", object)))
}

// join sets the NVLink of all GPUs of a node: each GPU's links, and its domain. It needs the
// session's lock.
func (n *nvlinks) join(gpus []gpu.GPU) {
	domains := newDomains(gpus)
	for _, g := range gpus {
		for _, end := range n.ends[g.UUID] {
			switch {
			case end.isSwitch:
				domains.merge(string(g.PCI), gpu.SwitchDomain)
			case domains[string(end.pci)] != "":
				domains.merge(string(g.PCI), string(end.pci))
			}
		}
	}
	for i, g := range gpus {
		if _, read := n.ends[g.UUID]; !read {
			continue // a GPU that hasn't answered in this session keeps its stored links
		}
		gpus[i].NVLink = nil
		if links := len(n.ends[g.UUID]); links > 0 {
			gpus[i].NVLink = &gpu.NVLink{Links: links, Domain: domains.name(g, gpus)}
		}
	}
}

// domains maps each GPU, by PCI address, and the switches, by SwitchDomain, to
// the domain that they are in.
type domains map[string]string

// newDomains puts each GPU, and the switches, into a domain of its own.
func newDomains(gpus []gpu.GPU) domains {
	d := domains{gpu.SwitchDomain: gpu.SwitchDomain}
	for _, g := range gpus {
		d[string(g.PCI)] = string(g.PCI)
	}
	return d
}

// merge makes one domain of those of a and b.
func (d domains) merge(a, b string) {
	from, to := d[a], d[b]
	for member, domain := range d {
		if domain == from {
			d[member] = to
		}
	}
}

// name returns the name of a GPU's domain: SwitchDomain, or the first UUID in it by
// order, so that it is the same after a restart. It is empty if the GPU is the only
// one of the domain.
func (d domains) name(g gpu.GPU, gpus []gpu.GPU) string {
	mine := d[string(g.PCI)]
	if mine == d[gpu.SwitchDomain] {
		return gpu.SwitchDomain
	}
	var members []gpu.UUID
	for _, other := range gpus {
		if d[string(other.PCI)] == mine {
			members = append(members, other.UUID)
		}
	}
	if len(members) < 2 {
		return ""
	}
	return string(slices.Min(members))
}
