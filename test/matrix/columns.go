package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/sim/cluster"
)

// column is a kind of cluster.
type column struct {
	// kubernetes of the control plane, and the kubelets' version if it is another.
	kubernetes, kubelet string
	// runtime is the container runtime, if it isn't the newest containerd.
	runtime string
	dra     cluster.DRA
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
	return append(all,
		column{kubernetes: "1.32", runtime: cluster.OldContainerd, dra: cluster.DRAOn},
		column{kubernetes: "1.37", runtime: cluster.CRIO, dra: cluster.DRAOn},
	)
}

// id names the column in files.
func (c column) id() string {
	id := c.kubernetes + "-" + string(c.dra)
	if c.kubelet != "" {
		id += "-kubelet-" + c.kubelet
	}
	if c.runtime != "" {
		id += "-" + c.runtime
	}
	return id
}

// cluster names the clusters of the column.
func (c column) cluster() string { return "e2e-" + strings.ReplaceAll(c.id(), ".", "") }

// kind says in which table a column is.
func (c column) kind() string {
	switch {
	case c.kubelet != "" || c.runtime != "":
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
	// others: also for kubelets that are older than the control plane, and for another container
	// runtime.
	others bool
	// runtime: the story depends on the container runtime: only the table of other kubelets and
	// runtimes has it.
	runtime bool
	// fault: the story shows behaviour after a failure, or an upgrade or a migration;
	// the first table doesn't list it.
	fault bool
}

func features() []feature {
	return []feature{
		{name: "Whole GPU", story: "one-gpu", others: true},
		{name: "MIG partition on demand", story: "mig-ways", others: true},
		{name: "MIG partitions by layout", story: "mig-layout", others: true},
		{name: "MPS shares, equal", story: "mps-shares", others: true},
		{name: "MPS shares by size", story: "mps-consumable"},
		{name: "MPS shares of MIG partitions on demand (1.36: from 1.36.2)", story: "mps-partitions"},
		{name: "MPS by a claim's configuration", story: "mps-config"},
		{name: "Time slices", story: "time-slicing", others: true},
		{name: "Extended resources (nvidia.com/gpu)", story: "extended-resources"},
		{name: "Device status in claims", story: "device-status"},
		{name: "Device metadata in containers", story: "device-metadata", others: true},
		{name: "Admin access", story: "admin-access"},
		{name: "Prioritized list (firstAvailable)", story: "ways-to-claim"},
		{name: "Claims of PodGroups", story: "pod-group"},
		{name: "GPU and network card of another driver, under one PCIe root", story: "gpu-and-nic"},
		{name: "Ranks of nodes: small pods gather, large ones find a whole node", story: "packing"},
		{name: "Unhealthy GPU gets no new claims", story: "gpu-health"},
		{name: "Health of devices in the pod's status", story: "pod-status"},
		{name: "GPU reset by the plugin", story: "gpu-reset", fault: true},
		{name: "GPU lost: pods replaced by policy, diagnostic pods tolerate it", story: "gpu-lost", fault: true},
		{name: "GPU that doesn't answer", story: "gpu-wedged", fault: true},
		{name: "MPS daemon that can't be started", story: "mps-fails", fault: true},
		{name: "GPU that can't create a partition", story: "prepare-fails", fault: true},
		{name: "GPU that can't create a partition: pods replaced by policy", story: "prepare-fails-evict", fault: true},
		{name: "Plugin killed", story: "crash-plugin", others: true, fault: true},
		{name: "Plugin killed while it creates partitions", story: "mig-crash", fault: true},
		{name: "Controller killed", story: "crash-controller", fault: true},
		{name: "Kubelet restarted", story: "kubelet-restart", others: true, fault: true},
		{name: "ResourceSlices deleted by somebody", story: "slices-deleted", fault: true},
		{name: "Rolling upgrade", story: "rollout", others: true, fault: true},
		{name: "Handover after a force-deleted pod", story: "handover", others: true, fault: true},
		{name: "Container that the runtime forgets before it starts", story: "unstarted", runtime: true, fault: true},
		{name: "CDI directory emptied, removed, or elsewhere", story: "cdi-directories", runtime: true, fault: true},
		{name: "Bad configuration refused", story: "bad-config", fault: true},
		{name: "helm uninstall and install", story: "uninstall", others: true, fault: true},
		{name: "Migration from the device plugin", story: "migrate-device-plugin", fault: true},
		{name: "Migration of the device plugin's sharing", story: "migrate-sharing", fault: true},
		{name: "Migration from the MIG manager", story: "migrate-mig-manager", fault: true},
		{name: "Migration from NVIDIA's DRA driver", story: "migrate-dra-driver", fault: true},
	}
}

// in reports whether columns of a kind have the row.
func (f feature) in(kind string) bool {
	if kind == "others" {
		return f.others || f.runtime
	}
	return !f.runtime
}

// stories returns those that run on the clusters of a column.
func (c column) stories() []string {
	var names []string
	for _, f := range features() {
		if f.in(c.kind()) && !slices.Contains(names, f.story) {
			names = append(names, f.story)
		}
	}
	return names
}
