// Package cdi writes the Container Device Interface specifications that give a
// container its GPUs.
//
// Two kinds of file lie in the CDI directory. One is common to all claims: the
// driver's libraries, programs, control device nodes and hooks, discovered by
// NVIDIA's nvcdi, which takes tens of milliseconds; it is written when the
// driver is found and when it changes. The other is one small file per claim
// with the device nodes of the claim's GPUs, or, for MIG partitions, of the GPU
// and of the two capabilities that open the instance; clients of MPS get the
// daemon's directories and their limits too. A container is given both names.
// So a prepare writes some hundred bytes, and a container runtime, which reads
// the whole directory again after each change, reads the long list once and
// not once per claim.
//
// Files appear complete or not at all (written aside, then renamed), but are
// not synced: the directory is usually in memory, and whatever outlives a
// reboot is written again from the journal when the plugin starts.
//
// Paths of the host are seen through the function that Config brings, since
// the plugin usually runs in a container. Package cdi doesn't decide who gets
// which GPU and doesn't remember claims: the directory is its only state.
package cdi
