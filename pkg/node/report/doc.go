// Package report tells the cluster what GPUs a node has: it keeps the node's
// GPUInventory object equal to the facts, and answers the controller's
// question whether this node's plugin is alive.
//
// Read gathers the facts, from NVML and from the kernel's view of the PCI
// devices. A Reporter holds the latest ones, serves them to whoever prepares
// claims, and writes the object: on change only, so that an idle node writes
// nothing, and again and again while the API server is away, without anybody
// waiting for it. It watches two objects, the node's own inventory and the
// Node; from the latter it learns whether another driver serves the GPUs.
//
// It decides nothing about what is on offer (the controller does), and doesn't
// find or load the driver (pkg/node does).
package report
