// Package sharing prepares GPUs and MIG partitions for sharing: it starts MPS
// daemons for shares and for claims that ask for MPS, and sets compute modes and
// time slices.
//
// It computes from the journal which daemons and settings claims need: from the
// claims' records of this boot that aren't leaving. There is no counter, so a daemon
// that several claims use is stopped with the last of them, in any order. The
// supervisor (pkg/mps), which runs the daemons, and the hardware say what is there;
// the package compares the two and applies the difference.
//
// The supervisor's reports are the only source of which daemons there are: an operation that
// starts or stops one returns when a report has shown that. Only while the supervisor doesn't
// answer, the directories of its daemons say which can't be running.
//
// The original value of a setting is in the journal from before the setting is
// changed until after it is restored. A setting that has the value that claims need
// isn't changed, and neither is one that somebody else changes meanwhile.
//
// The compute mode is set before the daemon starts and restored after it has ended,
// so only clients of the daemon can use the GPU. Each GPU has a lock, held for one
// operation. GPUs don't wait for each other, except those of one daemon.
//
// The package knows nothing of Kubernetes objects or CDI. Packages prepare,
// healthmonitor and driver call its Manager.
package sharing
