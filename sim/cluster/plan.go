package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
)

// Addresses that are the same in every cluster. They live in the machines'
// network namespaces, so clusters don't meet.
const (
	serviceCIDR   = "10.96.0.0/16"
	kubernetesIP  = "10.96.0.1"
	dnsIP         = "10.96.0.10" // nobody answers there; it keeps the kubelet from complaining
	podCIDRFormat = "10.244.%d.0/24"
	apiserverPort = 443
)

// Each cluster takes one slot, which gives it the network 198.18.SLOT.0/24 (of
// the range that RFC 2544 sets aside for benchmarks) and the host's link lcSLOT.
const slots = 64

const (
	maxNodes     = 100
	controlPlane = "control-plane"
)

// plainNode is the node without GPUs, labels and taints that the cluster of a platform
// has besides those that were asked for: real ones have such nodes too, and what tolerates
// no taint runs there.
const plainNode = "system-0"

// plan is everything about a cluster that follows from its name, slot and
// nodes; pure.
type plan struct {
	name string
	slot int
	// nodes are the names of the node machines.
	nodes []string
}

// nodeNames are those of the node machines. The format is empty for nodes of no platform.
func nodeNames(count int, format string, plain bool) []string {
	var names []string
	for node := range count {
		names = append(names, fmt.Sprintf(cmp.Or(format, "node-%d"), node))
	}
	if plain {
		names = append(names, plainNode)
	}
	return names
}

func (p plan) address(host int) netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18, byte(p.slot), byte(host)})
}

func (p plan) network() netip.Prefix           { return netip.PrefixFrom(p.address(0), 24) }
func (p plan) hostAddress() netip.Addr         { return p.address(1) }
func (p plan) apiserverAddress() netip.Addr    { return p.address(2) }
func (p plan) nodeAddress(node int) netip.Addr { return p.address(10 + node) }
func (p plan) hostLink() string                { return "lc" + strconv.Itoa(p.slot) }

// nodeCable is the control plane's end of a node's link. Names of links have at most 15 letters.
func nodeCable(node int) string { return "node-" + strconv.Itoa(node) }

func (p plan) podCIDR(node int) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf(podCIDRFormat, node))
}

// machineNames lists the control plane first.
func (p plan) machineNames() []string { return append([]string{controlPlane}, p.nodes...) }

func (p plan) serverURL() string { return "https://" + p.apiserverAddress().String() }

func (p plan) apiserverAddresses() []net.IP {
	return []net.IP{net.ParseIP(p.apiserverAddress().String()), net.ParseIP(kubernetesIP), net.IPv4(127, 0, 0, 1)}
}

var errNoSlot = errors.New("all networks 198.18.0.0/24 to 198.18.63.0/24 are taken: run localcluster down for a cluster that isn't needed")

// freeSlot returns the first slot that no cluster has and whose network no
// address of the host is in.
func freeSlot(taken map[int]bool, hostAddresses []netip.Addr) (int, error) {
	for slot := range slots {
		if !taken[slot] && !anyIn(plan{slot: slot}.network(), hostAddresses) {
			return slot, nil
		}
	}
	return 0, errNoSlot
}

func anyIn(network netip.Prefix, addresses []netip.Addr) bool {
	return slices.ContainsFunc(addresses, network.Contains)
}
