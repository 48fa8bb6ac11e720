// Package prepare gives an allocated claim its devices, and takes them back.
//
// A prepare writes one durable journal record and then the claim's CDI spec.
// The record comes first and holds everything the spec is made from: after a
// crash between the two, Recover goes forward and writes the spec. So one
// record does for what would otherwise be an intent and a result, as long as
// a device needs nothing else done to it, which is so for whole GPUs. An
// unprepare goes the other way: spec, then record.
//
// Who holds a device is computed from the journal each time, under the lock
// of the GPU; no lock is shared by all. A device of another claim is never
// given away. Where the other claim is on its way out, Prepare waits for the
// kubelet to unprepare it, because the kubelet's next try comes a minute
// later. An unprepare wins over every prepare of the same claim that began
// before it.
//
// The package declares what it needs of the node (CDI, Inventory) and of the
// cluster (Holders); it imports pkg/node/journal and no other sibling.
package prepare
