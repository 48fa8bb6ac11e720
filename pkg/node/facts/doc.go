// Package facts holds what is known of the node: which GPUs it has, which names
// they have, or why there are none; and whether another driver serves them.
// pkg/node/driver reads the GPUs, pkg/node/prepare looks devices up, and
// pkg/node/report writes all of it to the cluster.
//
// It also takes requests to read the GPUs again, and knows whether that takes too long.
// It reads and writes nothing itself.
package facts
