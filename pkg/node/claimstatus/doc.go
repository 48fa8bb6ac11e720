// Package claimstatus writes the MIG device of a partition to a ResourceClaim's
// status.devices: its UUID, which monitoring uses, its instance ids, its profile
// and its placement. For clients of MPS it writes their limits, which the claim's
// configuration may have lowered. A device's attributes can't have these facts,
// because the partition is created after it was allocated. For other devices
// nothing is written.
//
// Metadata returns the same facts, and more, for the file that containers can read.
//
// Writing never delays a prepare: Enqueue only stores the facts; Run reads the
// claim and writes, and retries while the API server can't be reached. The
// status is optional: one that a server refuses isn't written again. If a server
// doesn't store the field (before Kubernetes 1.33), statuses wait, and one of them
// is tried every ten minutes. A status that is already correct isn't written again.
//
// It needs the rights to get resourceclaims and to patch resourceclaims/status,
// and, for Kubernetes 1.36 and later, the verb associated-node:patch on
// resourceclaims/driver of this driver's name.
package claimstatus
