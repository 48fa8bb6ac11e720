package cluster

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOptionsValidate(t *testing.T) {
	for name, tc := range map[string]struct {
		options Options
		want    string // part of the error; empty means valid
	}{
		"defaults":            {Options{}, ""},
		"several nodes":       {Options{Name: "a-1", Nodes: 3}, ""},
		"name with a slash":   {Options{Name: "a/b"}, "cluster name"},
		"name climbing up":    {Options{Name: ".."}, "cluster name"},
		"name too long":       {Options{Name: strings.Repeat("a", 33)}, "cluster name"},
		"patch release":       {Options{Kubernetes: "1.37.1"}, "without the patch release"},
		"negative nodes":      {Options{Nodes: -1}, "nodes"},
		"more nodes than fit": {Options{Nodes: 101}, "nodes"},
	} {
		t.Run(name, func(t *testing.T) {
			err := tc.options.withDefaults().validate()
			if tc.want == "" && err != nil {
				t.Fatalf("unexpected error: %v", err)
			}
			if tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Fatalf("got error %v, want one about %q", err, tc.want)
			}
		})
	}
}

func TestFreeSlot(t *testing.T) {
	all := map[int]bool{}
	for slot := range slots {
		all[slot] = true
	}
	for name, tc := range map[string]struct {
		taken map[int]bool
		host  []netip.Addr
		want  int
		err   error
	}{
		"first":                       {want: 0},
		"after other clusters":        {taken: map[int]bool{0: true, 1: true}, want: 2},
		"in a gap":                    {taken: map[int]bool{0: true, 2: true}, want: 1},
		"beside an address of ours":   {host: []netip.Addr{netip.MustParseAddr("198.18.0.1")}, want: 1},
		"other addresses don't count": {host: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, want: 0},
		"all taken":                   {taken: all, err: errNoSlot},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := freeSlot(tc.taken, tc.host)
			if !errors.Is(err, tc.err) || got != tc.want {
				t.Errorf("got %d, %v; want %d, %v", got, err, tc.want, tc.err)
			}
		})
	}
}

// Two clusters must not share an address, nor two machines of one.
func TestAddressesDiffer(t *testing.T) {
	seen := map[netip.Addr]string{}
	note := func(address netip.Addr, what string) {
		t.Helper()
		if other, ok := seen[address]; ok {
			t.Errorf("%s and %s both have %s", other, what, address)
		}
		seen[address] = what
	}
	for _, slot := range []int{0, 1, slots - 1} {
		p := plan{slot: slot, nodes: nodeNames(maxNodes, "", true)}
		note(p.hostAddress(), "host")
		note(p.apiserverAddress(), "API server")
		for node, name := range p.nodes {
			note(p.nodeAddress(node), name)
		}
	}
}

func TestMachineNames(t *testing.T) {
	for name, tc := range map[string]struct {
		format string
		plain  bool
		want   []string
	}{
		"own nodes":      {"", false, []string{"control-plane", "node-0", "node-1"}},
		"names of EKS":   {"ip-10-0-1-%d.compute.internal", true, []string{"control-plane", "ip-10-0-1-0.compute.internal", "ip-10-0-1-1.compute.internal", "system-0"}},
		"names of AKS":   {"aks-gpu-vmss%06d", true, []string{"control-plane", "aks-gpu-vmss000000", "aks-gpu-vmss000001", "system-0"}},
		"names like own": {"", true, []string{"control-plane", "node-0", "node-1", "system-0"}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, plan{nodes: nodeNames(2, tc.format, tc.plain)}.machineNames()); diff != "" {
				t.Error(diff)
			}
		})
	}
}
