// Package control is the controller: the part of the driver that acts once per
// cluster. It watches every node's GPUInventory, the SharingPolicies, and the
// devices of claims, keeps each node's ResourceSlices equal to the node's
// offer, and writes the policies' statuses. The packages below it do that, by
// what they reconcile; this one starts them, and says which events wake them.
// A node's offer is decided in one place, decision, from facts alone.
//
// The controller never completes an incomplete pool without asking the plugin: the
// kubelet deletes a node's slices when it starts and when the plugin is gone, and a
// pod bound to a node without a plugin hangs. The controller deletes the remaining
// slices, raises spec.publishRequest in the GPUInventory, and publishes after the
// plugin has answered. The first publication, and one that a crash interrupted, go
// the same way. Only the current request is remembered; losing it costs one more
// request. Recent write failures are remembered to limit retries; decisions and the
// server's abilities are cached and can be recomputed.
//
// It knows nothing of pkg/node: the two talk through GPUInventory and device
// names.
package control
