// Package control is the controller: the part of the driver that acts once per
// cluster. It watches every node's GPUInventory, the SharingPolicies, and the
// devices of claims, keeps each node's ResourceSlices equal to the node's
// offer, and writes the policies' statuses. A node's offer is decided in one
// place, plans, from facts alone.
//
// The controller never completes an incomplete pool without asking the plugin. The kubelet deletes a node's
// slices when it starts and when the plugin is gone, and a pod that is bound to
// a node without a plugin hangs. So the controller takes away what is left,
// raises spec.publishRequest in the GPUInventory, and publishes when a living
// plugin has answered. The first publication, and one that a crash cut short,
// go the same way: nothing but the request that is under way is remembered, and
// forgetting it costs one more request. (And which nodes could not be written
// lately, so that a server that refuses isn't stormed. What was decided, and
// how the server stores counters, is kept to save work, and computed again.)
//
// It knows nothing of pkg/node: the two talk through GPUInventory and device
// names.
package control
