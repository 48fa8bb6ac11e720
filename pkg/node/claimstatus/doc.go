// Package claimstatus tells in a ResourceClaim's status.devices which MIG device
// a partition became: its UUID, which monitoring knows it by, its instance ids,
// its profile and its place; and of clients of MPS the limits they have, which the
// claim's configuration may have made stricter. A device's attributes can't say
// that, because the partition is made after it was allocated. Of other devices the
// attributes say it all, and nothing is written.
//
// Writing is never in the way of a prepare: Tell only remembers, Run asks and
// writes, again and again while the API server is away. It is no harm if the
// status isn't written: a server that doesn't store the field (before Kubernetes
// 1.33), or that doesn't allow it, is left in peace. What a claim's status says
// already isn't written again.
//
// It needs the rights to get resourceclaims and to patch resourceclaims/status,
// and, for Kubernetes 1.36 and later, the verb associated-node:patch on
// resourceclaims/driver of this driver's name. It imports no sibling.
package claimstatus
