// Package publish converts a node's offer to ResourceSlices and makes a
// server's slices equal to them.
//
// A node's pool is named after the node. It has as few slices as the devices of
// its GPUs fit into, and the slices that the server's form of shared counters
// needs; Probe finds out that form. Only slices that carry this driver's name and
// our label are seen or touched. Everything is decided from the slices themselves:
// the package doesn't remember its writes, and when to publish is pkg/control's
// decision.
package publish
