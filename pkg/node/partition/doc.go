// Package partition creates MIG partitions when claims need them and destroys
// unneeded ones.
//
// One journal record per GPU lists the partitions that Tessera created, and whether
// it switched the GPU's MIG mode on. The record is written before the hardware is
// changed. Only partitions in the record that agree with the hardware in ids, profile
// and placement are Tessera's: they are used again, destroyed, and left out of the
// node's report. All others belong to other programs; a claim uses such a partition
// if it is exactly the allocated one, and Tessera never changes it. Whether a
// partition is needed is computed from the claims' records, so a partition that stays
// warm for the next claim costs no write.
//
// Every operation reads the hardware first and takes it as the truth: partitions that
// were destroyed by others, by a reboot or by a reload of the driver are gone, and
// those that a crash left incomplete are completed or destroyed. There is one lock per
// GPU, held during an operation; GPUs don't wait for each other.
//
// The package knows nothing of Kubernetes objects. Of pkg/node/cdi it knows that a GPU's
// device node may have another number after a switch of the MIG mode.
package partition
