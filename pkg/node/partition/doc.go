// Package partition makes MIG partitions when claims need them and destroys
// them when nobody does.
//
// What it made, and whether it switched a GPU's MIG mode on, is in one journal
// record a GPU, written before the hardware is changed. Only what is in there,
// and agrees with the hardware in ids, profile and place, is Tessera's: it is
// used again, destroyed, and kept out of what the node reports. All else
// belongs to others; it is used where it is exactly what a claim was given, and
// never changed. Whether a partition of ours is needed is computed from the
// claims' records, so a partition that stays warm for the next claim costs no
// write.
//
// Every operation looks at the hardware first and takes it as the truth: what
// was destroyed by others, by a reboot or a reload of the driver is gone, and
// what a crash left half made is completed or destroyed. There is one lock a
// GPU, held for the length of an operation; GPUs don't wait for each other.
//
// The package knows nothing of Kubernetes objects or CDI. It is called by
// pkg/node/prepare through an interface of that package; only pkg/node, which
// wires the plugin, imports it.
package partition
