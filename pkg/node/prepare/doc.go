// Package prepare prepares and unprepares the devices of allocated claims.
//
// A prepare writes one durable journal record, has the claim's MIG partitions
// made, has set up what it shares (MPS daemons, time slices), and then writes the
// claim's CDI spec. The record comes first and holds everything that the rest is
// made from, limits included: after a crash in between, Recover goes forward. One
// record serves as intent and result; pkg/node/partition and pkg/node/sharing
// record what partitions and settings need beyond that. An unprepare goes the other
// way: spec, what is shared, partitions, record.
//
// Who holds a device is computed from the journal each time, under the lock
// of the GPU; no lock is shared by all. A GPU's lock is given back as soon as
// the record is on disk, a claim's lock when all is done: the hardware works
// for the claims of one GPU in turn, and for GPUs side by side. A device of
// another claim, or one that needs some of the same silicon, is never
// given away; shares and replicas of the same are meant to be. An
// unprepare first waits for the end of the claim's containers; until then the
// claim counts among those that share (holding.Unpreparing). Then the claim is
// marked as leaving (holding.Leaving) before its daemons are stopped, and as
// having left (holding.Left) before its partitions are released, so the last
// claim to leave releases what they shared, in whatever order they end. Where
// the other claim is on its way out, Prepare waits for the
// kubelet to unprepare it, because the kubelet's next try comes a minute
// later. An unprepare wins over every prepare of the same claim that began
// before it.
//
// It is one package because each file is a step of a claim's way, or decides what follows when
// one fails, and all of them need the claim's lock.
//
// Of the cluster it reads claims and the API server's version. Of its siblings it is above
// all that a claim's devices need, and below what answers the kubelet.
package prepare
