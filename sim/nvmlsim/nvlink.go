package nvmlsim

import (
	"fmt"
	"slices"
)

// NVLinkModel describes the NVLinks of a product.
type NVLinkModel struct {
	// Links of one GPU.
	Links int `json:"links"`
	// Topology is the default for machines with the product; see GPUSpec.NVLink.
	Topology string `json:"topology"`
}

// The ways in which the GPUs of one entry of a machine file are linked.
const (
	nvlinkNone   = "none"
	nvlinkPairs  = "pairs"
	nvlinkMesh   = "mesh"
	nvlinkSwitch = "switch"
)

// NVLink is NVML's information about one link of a GPU.
type NVLink struct {
	// Active means that the link is up. Only then the other fields are known.
	Active bool
	// Switch is true if the other end is an NVSwitch, false if it is a GPU.
	Switch bool
	// Remote is the other end's address.
	Remote PCI
}

// DeviceType is nvmlIntNvLinkDeviceType_t: 0 a GPU, 2 an NVSwitch.
func (l NVLink) DeviceType() uint32 {
	if l.Switch {
		return 2
	}
	return 0
}

// validateNVLink returns an error if a machine file's nvlink is invalid.
func (g GPUSpec) validateNVLink(m *Model) error {
	switch g.NVLink {
	case "", nvlinkNone:
		return nil
	case nvlinkPairs, nvlinkMesh, nvlinkSwitch:
		if m.NVLink == nil {
			return fmt.Errorf("nvlink: %s has no NVLink", g.Model)
		}
		return nil
	}
	return fmt.Errorf("nvlink: %q is not one of none, pairs, mesh, switch", g.NVLink)
}

// topology returns the topology of the entry's GPUs, "" without NVLink.
func (g GPUSpec) topology(m *Model) string {
	if g.NVLink == "" && m.NVLink != nil {
		return m.NVLink.Topology
	}
	return g.NVLink
}

// NVLinkState is nvmlDeviceGetNvLinkState: NotSupported for a product without
// NVLink, InvalidArgument for a link that it doesn't have.
func (g *GPU) NVLinkState(link int) (bool, error) {
	l, err := g.nvlink("DeviceGetNvLinkState", link)
	return l.Active, err
}

// NVLinkRemote is nvmlDeviceGetNvLinkRemotePciInfo and
// nvmlDeviceGetNvLinkRemoteDeviceType: NotSupported while the link isn't active
// (assumed).
func (g *GPU) NVLinkRemote(link int) (NVLink, error) {
	l, err := g.nvlink("DeviceGetNvLinkRemotePciInfo", link)
	if err == nil && !l.Active {
		return NVLink{}, NotSupported
	}
	return l, err
}

func (g *GPU) nvlink(call string, link int) (NVLink, error) {
	if err := g.call(call); err != nil {
		return NVLink{}, err
	}
	switch {
	case g.model.NVLink == nil:
		return NVLink{}, NotSupported
	case link < 0 || link >= g.model.NVLink.Links:
		return NVLink{}, InvalidArgument
	case slices.Contains(g.state().NVLinksDown, link):
		return NVLink{}, nil
	}
	return g.linked(link), nil
}

// linked returns the other end of a link that is up.
func (g *GPU) linked(link int) NVLink {
	board, me := g.board()
	if len(board) < 2 {
		return NVLink{}
	}
	other := -1
	switch g.id.NVLink {
	case nvlinkSwitch:
		// Behind the GPUs' buses (see identify); four switches, as on an HGX board.
		return NVLink{Active: true, Switch: true, Remote: PCI{Bus: uint32(0xd0 + link%4)}}
	case nvlinkPairs:
		other = me ^ 1
	case nvlinkMesh:
		other = (me + meshOffset(link, len(board))) % len(board)
	}
	if other < 0 || other >= len(board) || g.dividesLink(board[other]) {
		return NVLink{}
	}
	return NVLink{Active: true, Remote: board[other].PCI()}
}

// dividesLink reports whether a link that leads directly to another GPU is off because
// one of the two is in MIG mode (assumed: NVIDIA says only that there is no P2P then).
func (g *GPU) dividesLink(other Identity) bool {
	s := g.m.state()
	if s == nil {
		return false
	}
	for i, id := range g.m.description.GPUs {
		if (i == g.pos || id.UUID == other.UUID) && s.GPUs[i].MIGCurrent {
			return true
		}
	}
	return false
}

// board returns the GPUs of the same entry of the machine file, and the index
// of this one.
func (g *GPU) board() (board []Identity, me int) {
	for _, id := range g.m.description.GPUs {
		if id.Board != g.id.Board {
			continue
		}
		if id.UUID == g.id.UUID {
			me = len(board)
		}
		board = append(board, id)
	}
	return board, me
}

// meshOffset returns the distance to a link's other end among n GPUs: 1, n-1,
// 2, n-2 and so on, so that both ends agree.
func meshOffset(link, n int) int {
	step := link % (n - 1)
	offset := step/2 + 1
	if step%2 == 1 {
		return n - offset
	}
	return offset
}
