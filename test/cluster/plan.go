package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
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

// plan is everything about a cluster that follows from its name, slot and
// size; pure.
type plan struct {
	name string
	slot int
	// nodes is the number of node machines.
	nodes int
}

func (p plan) address(host int) netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18, byte(p.slot), byte(host)})
}

func (p plan) network() netip.Prefix           { return netip.PrefixFrom(p.address(0), 24) }
func (p plan) hostAddress() netip.Addr         { return p.address(1) }
func (p plan) apiserverAddress() netip.Addr    { return p.address(2) }
func (p plan) nodeAddress(node int) netip.Addr { return p.address(10 + node) }
func (p plan) hostLink() string                { return "lc" + strconv.Itoa(p.slot) }

func (p plan) podCIDR(node int) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf(podCIDRFormat, node))
}

func nodeName(node int) string { return "node-" + strconv.Itoa(node) }

func (p plan) nodeNames() []string {
	var names []string
	for node := range p.nodes {
		names = append(names, nodeName(node))
	}
	return names
}

// machineNames lists the control plane first.
func (p plan) machineNames() []string { return append([]string{controlPlane}, p.nodeNames()...) }

func (p plan) serverURL() string { return "https://" + p.apiserverAddress().String() }

func (p plan) apiserverAddresses() []net.IP {
	return []net.IP{net.ParseIP(p.apiserverAddress().String()), net.ParseIP(kubernetesIP), net.IPv4(127, 0, 0, 1)}
}

var clusterName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

var kubernetesVersion = regexp.MustCompile(`^1\.[0-9]+$`)

func (o Options) validate() error {
	switch {
	case !clusterName.MatchString(o.Name):
		return fmt.Errorf("cluster name %q: use 1 to 32 lower-case letters, digits and hyphens", o.Name)
	case !kubernetesVersion.MatchString(o.Kubernetes):
		return fmt.Errorf("the Kubernetes version %q: write it as 1.37, without the patch release", o.Kubernetes)
	case !kubernetesVersion.MatchString(o.Kubelet):
		return fmt.Errorf("the kubelets' version %q: write it as 1.37, without the patch release", o.Kubelet)
	case minorVersion(o.Kubelet) > minorVersion(o.Kubernetes) || minorVersion(o.Kubelet) < minorVersion(o.Kubernetes)-kubeletSkew:
		return fmt.Errorf("kubelets of %s with a control plane of %s: Kubernetes supports kubelets that are as new, or up to %d minor versions older",
			o.Kubelet, o.Kubernetes, kubeletSkew)
	case o.Containerd != DefaultContainerd && o.Containerd != oldContainerd:
		return fmt.Errorf("containerd %q: there is %s and %s", o.Containerd, DefaultContainerd, oldContainerd)
	case o.BinDir != "" && o.Kubelet != o.Kubernetes:
		return errors.New("prebuilt binaries are of one Kubernetes version: leave out the kubelets' version")
	case o.Nodes < 1 || o.Nodes > maxNodes:
		return fmt.Errorf("%d nodes: a cluster has 1 to %d", o.Nodes, maxNodes)
	}
	return o.validateDRA()
}

// kubeletSkew is how many minor versions older than the API server a kubelet may
// be (https://kubernetes.io/releases/version-skew-policy/).
const kubeletSkew = 3

func minorVersion(kubernetes string) int {
	_, minor, _ := strings.Cut(kubernetes, ".")
	n, _ := strconv.Atoi(minor) // validated before
	return n
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
