package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/test/cluster"
)

// column is a kind of cluster.
type column struct {
	// kubernetes of the control plane, and the kubelets' version if it is another.
	kubernetes, kubelet string
	// containerd is its version, if it isn't the newest.
	containerd string
	dra        cluster.DRA
}

// columns returns all of them. Where Dynamic Resource Allocation is on by
// default, DRADefault and DRAOn are the same.
func columns() []column {
	var all []column
	for minor := 31; minor <= 37; minor++ {
		version := fmt.Sprintf("1.%d", minor)
		if minor < 34 {
			all = append(all, column{kubernetes: version, dra: cluster.DRADefault})
		}
		all = append(all, column{kubernetes: version, dra: cluster.DRAOn}, column{kubernetes: version, dra: cluster.DRAAll})
	}
	for _, skewed := range [][2]string{{"1.33", "1.32"}, {"1.34", "1.32"}, {"1.37", "1.36"}, {"1.37", "1.35"}} {
		all = append(all, column{kubernetes: skewed[0], kubelet: skewed[1], dra: cluster.DRAOn})
	}
	return append(all, column{kubernetes: "1.32", containerd: "1.7", dra: cluster.DRAOn})
}

// id names the column in files.
func (c column) id() string {
	id := c.kubernetes + "-" + string(c.dra)
	if c.kubelet != "" {
		id += "-kubelet-" + c.kubelet
	}
	if c.containerd != "" {
		id += "-containerd-" + c.containerd
	}
	return id
}

// cluster names the clusters of the column.
func (c column) cluster() string { return "e2e-" + strings.ReplaceAll(c.id(), ".", "") }

// kind says in which table a column is.
func (c column) kind() string {
	switch {
	case c.kubelet != "" || c.containerd != "":
		return "others"
	case c.dra == cluster.DRAAll:
		return "all"
	default:
		return "default"
	}
}

// feature is a row: it works where its story passes.
type feature struct {
	name, story string
	// others: also for kubelets that are older than the control plane, and for an
	// older containerd.
	others bool
	// fault: what is shown isn't something that users ask for.
	fault bool
}

func features() []feature {
	return []feature{
		{"Whole GPU", "one-gpu", true, false},
		{"MIG partition on demand", "mig-ways", false, false},
		{"MIG partitions by layout", "mig-layout", true, false},
		{"MPS shares, equal", "mps-shares", true, false},
		{"MPS shares by size", "mps-consumable", false, false},
		{"MPS shares of MIG partitions", "mps-partitions", false, false},
		{"MPS by a claim's configuration", "mps-config", false, false},
		{"Time slices", "time-slicing", true, false},
		{"Extended resources (nvidia.com/gpu)", "extended-resources", false, false},
		{"Device status in claims", "device-status", false, false},
		{"Admin access", "admin-access", false, false},
		{"Prioritized list (firstAvailable)", "ways-to-claim", false, false},
		{"Plugin killed", "crash-plugin", true, true},
		{"Plugin killed while it creates partitions", "mig-crash", false, true},
		{"Controller killed", "crash-controller", false, true},
		{"Kubelet restarted", "kubelet-restart", true, true},
		{"ResourceSlices deleted by somebody", "slices-deleted", false, true},
		{"Rolling upgrade", "rollout", true, true},
		{"Handover after a force-deleted pod", "handover", false, true},
		{"Bad configuration refused", "bad-config", false, true},
		{"helm uninstall and install", "uninstall", true, true},
	}
}

// stories returns those that run on the clusters of a column.
func (c column) stories() []string {
	var names []string
	for _, f := range features() {
		if (c.kind() != "others" || f.others) && !slices.Contains(names, f.story) {
			names = append(names, f.story)
		}
	}
	return names
}
