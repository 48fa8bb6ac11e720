package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Names of links inside the machines.
const (
	bridgeLink = "br0"  // in the control plane; all machines and the host meet there
	uplink     = "host" // in the control plane: the host's link ends there
	nodeLink   = "eth0" // in each node
)

// side is one network namespace that is being configured.
type side struct {
	*netlink.Handle
	ns   netns.NsHandle
	name string
}

func openSide(name string, pid int) (*side, error) {
	ns, err := netns.GetFromPath("/proc/" + strconv.Itoa(pid) + "/ns/net")
	if err != nil {
		return nil, fmt.Errorf("open the network namespace of %s: %w", name, err)
	}
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		_ = ns.Close()
		return nil, fmt.Errorf("open the network of %s: %w", name, err)
	}
	return &side{Handle: handle, ns: ns, name: name}, nil
}

func openHost() (*side, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open the host's network: %w", err)
	}
	return &side{Handle: handle, name: "the host"}, nil
}

func (s *side) close() {
	s.Close()
	_ = s.ns.Close()
}

// connect links the machines, whose pid 1s are given by name, with each other
// and with the host. Existing links stay, but those of a fresh machine are
// created again: the ones of its predecessor may still exist.
//
// The bridge is in the control plane's namespace, out of reach of the host's
// packet filters; all links end with the machines they belong to.
func (p plan) connect(pids map[string]int, fresh map[string]bool) error {
	control, err := openSide(controlPlane, pids[controlPlane])
	if err != nil {
		return err
	}
	defer control.close()
	if err := p.connectControlPlane(control); err != nil {
		return fmt.Errorf("connect %s: %w", controlPlane, err)
	}
	if err := p.connectHost(control, fresh[controlPlane]); err != nil {
		return fmt.Errorf("connect the host: %w", err)
	}
	for node, name := range p.nodes {
		if err := p.connectNode(control, node, pids[name], fresh[controlPlane] || fresh[name]); err != nil {
			return fmt.Errorf("connect %s: %w", name, err)
		}
	}
	return nil
}

func (p plan) connectControlPlane(control *side) error {
	if err := control.up("lo"); err != nil {
		return err
	}
	if err := control.address("lo", netip.MustParsePrefix(kubernetesIP+"/32")); err != nil {
		return err
	}
	attributes := netlink.NewLinkAttrs()
	attributes.Name = bridgeLink
	// A fixed address: a bridge otherwise changes it with its ports.
	attributes.HardwareAddr = net.HardwareAddr{0x02, 'l', 'c', 0, byte(p.slot), 1}
	if err := control.ensure(&netlink.Bridge{LinkAttrs: attributes}); err != nil {
		return err
	}
	if err := control.address(bridgeLink, netip.PrefixFrom(p.apiserverAddress(), p.network().Bits())); err != nil {
		return err
	}
	return control.up(bridgeLink)
}

func (p plan) connectHost(control *side, fresh bool) error {
	host, err := openHost()
	if err != nil {
		return err
	}
	defer host.Close()
	if err := host.cable(p.hostLink(), uplink, control, fresh); err != nil {
		return err
	}
	if err := host.address(p.hostLink(), netip.PrefixFrom(p.hostAddress(), p.network().Bits())); err != nil {
		return err
	}
	if err := host.up(p.hostLink()); err != nil {
		return err
	}
	return control.plug(uplink)
}

func (p plan) connectNode(control *side, node, pid int, fresh bool) error {
	cable := nodeCable(node)
	machine, err := openSide(p.nodes[node], pid)
	if err != nil {
		return err
	}
	defer machine.close()
	if err := control.cable(cable, nodeLink, machine, fresh); err != nil {
		return err
	}
	if err := control.plug(cable); err != nil {
		return err
	}
	if err := machine.up("lo"); err != nil {
		return err
	}
	if err := machine.address(nodeLink, netip.PrefixFrom(p.nodeAddress(node), p.network().Bits())); err != nil {
		return err
	}
	if err := machine.up(nodeLink); err != nil {
		return err
	}
	if err := control.route(p.podCIDR(node), p.nodeAddress(node)); err != nil {
		return err
	}
	return p.routeNode(machine, node)
}

// routeNode gives a node its ways to the other nodes' pods and to the
// kubernetes service; other cluster IPs fail at once instead of timing out.
func (p plan) routeNode(machine *side, node int) error {
	for other := range p.nodes {
		if other == node {
			continue
		}
		if err := machine.route(p.podCIDR(other), p.nodeAddress(other)); err != nil {
			return err
		}
	}
	if err := machine.route(netip.MustParsePrefix(kubernetesIP+"/32"), p.apiserverAddress()); err != nil {
		return err
	}
	services := &netlink.Route{Dst: ipNet(netip.MustParsePrefix(serviceCIDR)), Type: unix.RTN_UNREACHABLE}
	if err := machine.RouteReplace(services); err != nil {
		return fmt.Errorf("refuse %s: %w", serviceCIDR, err)
	}
	return nil
}

// cable links two namespaces; if fresh, it replaces an existing link.
func (s *side) cable(name, peer string, to *side, fresh bool) error {
	if fresh {
		if err := errors.Join(s.remove(name), to.remove(peer)); err != nil {
			return err
		}
	}
	attributes := netlink.NewLinkAttrs()
	attributes.Name = name
	return s.ensure(&netlink.Veth{LinkAttrs: attributes, PeerName: peer, PeerNamespace: netlink.NsFd(int(to.ns))})
}

// remove deletes a link; none of that name is fine.
func (s *side) remove(name string) error {
	link, err := s.LinkByName(name)
	if isNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for the link %s in %s: %w", name, s.name, err)
	}
	if err := s.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete the link %s in %s: %w", name, s.name, err)
	}
	return nil
}

// ensure adds a link unless one of that name is there.
func (s *side) ensure(link netlink.Link) error {
	name := link.Attrs().Name
	_, err := s.LinkByName(name)
	if err == nil {
		return nil
	}
	if !isNotFound(err) {
		return fmt.Errorf("look for the link %s in %s: %w", name, s.name, err)
	}
	if err := s.LinkAdd(link); err != nil {
		return fmt.Errorf("add the link %s to %s: %w", name, s.name, err)
	}
	return nil
}

func isNotFound(err error) bool {
	var notFound netlink.LinkNotFoundError
	return errors.As(err, &notFound)
}

func (s *side) link(name string) (netlink.Link, error) {
	link, err := s.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("find the link %s in %s: %w", name, s.name, err)
	}
	return link, nil
}

func (s *side) up(name string) error {
	link, err := s.link(name)
	if err != nil {
		return err
	}
	if err := s.LinkSetUp(link); err != nil {
		return fmt.Errorf("switch on the link %s in %s: %w", name, s.name, err)
	}
	return nil
}

func (s *side) address(name string, prefix netip.Prefix) error {
	link, err := s.link(name)
	if err != nil {
		return err
	}
	if err := s.AddrReplace(link, &netlink.Addr{IPNet: ipNet(prefix)}); err != nil {
		return fmt.Errorf("give %s to %s in %s: %w", prefix, name, s.name, err)
	}
	return nil
}

// plug makes a link a port of the bridge.
func (s *side) plug(name string) error {
	bridge, err := s.link(bridgeLink)
	if err != nil {
		return err
	}
	link, err := s.link(name)
	if err != nil {
		return err
	}
	if err := s.LinkSetMaster(link, bridge); err != nil {
		return fmt.Errorf("plug %s into the bridge: %w", name, err)
	}
	return s.up(name)
}

func (s *side) route(to netip.Prefix, via netip.Addr) error {
	if err := s.RouteReplace(&netlink.Route{Dst: ipNet(to), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route %s via %s in %s: %w", to, via, s.name, err)
	}
	return nil
}

func ipNet(prefix netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())}
}

// removeHostLink deletes the host's end of the cluster's network at once; it
// would otherwise go with the control plane, a moment later.
func (p plan) removeHostLink() error {
	host, err := openHost()
	if err != nil {
		return err
	}
	defer host.Close()
	return host.remove(p.hostLink())
}

// hostAddresses lists the IPv4 addresses that the host has.
func hostAddresses() ([]netip.Addr, error) {
	list, err := netlink.AddrList(nil, unix.AF_INET)
	if err != nil {
		return nil, fmt.Errorf("list the host's addresses: %w", err)
	}
	var addresses []netip.Addr
	for _, address := range list {
		if a, ok := netip.AddrFromSlice(address.IP); ok {
			addresses = append(addresses, a.Unmap())
		}
	}
	return addresses, nil
}
