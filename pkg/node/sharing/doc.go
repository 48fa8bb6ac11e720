// Package sharing has GPUs and MIG partitions ready for those who have them
// together: it has MPS daemons run for shares and for claims that ask for MPS, and
// sets compute modes and time slices.
//
// What is needed is computed from the journal each time: from the claims' records
// of this boot that aren't leaving. There is nothing to count, and a daemon that
// several claims use goes with the last of them, whoever asks first. What is
// there is asked of the supervisor (pkg/mps), which runs the daemons, and of the
// hardware; both are compared, and the difference is done.
//
// A setting of a GPU that is changed is in the journal as it was found, from
// before the change until after it is put back. A setting that was found as it
// is wanted is left alone, and so is one that somebody else changes meanwhile.
//
// A GPU gets its compute mode before its daemon, and loses it after: a process
// that isn't a client of the daemon is never let in beside it. There is one lock
// a GPU, held for the length of an operation; GPUs don't wait for each other,
// but for those that one daemon has together.
//
// The package knows nothing of Kubernetes objects or CDI. It is called by
// pkg/node/prepare through an interface of that package; only pkg/node, which
// wires the plugin, imports it.
package sharing
