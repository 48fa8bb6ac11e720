// Package cdi writes the Container Device Interface specifications that give a
// container its GPUs.
//
// The CDI directory has two kinds of files. One is common to all claims: the
// driver's libraries, programs, control device nodes and hooks, discovered by
// NVIDIA's nvcdi, which takes tens of milliseconds; it is written when the
// driver is found or changes. The other is one small file per claim with the
// device nodes of the claim's GPUs, or, for MIG partitions, of the GPU and of
// the two capabilities that give access to the instance; clients of MPS get the
// daemon's directories and their limits too. A container gets both names. So a
// prepare writes a few hundred bytes, and a container runtime, which reads the
// whole directory again after each change, reads the long list once and not
// once per claim.
//
// Files appear complete or not at all (written under a temporary name, then
// renamed), but are not synced: the directory is usually in memory, and after a
// reboot the plugin writes the files again from the journal.
//
// It accesses paths of the host through the Host in Config, because the plugin
// usually runs in a container. Package cdi doesn't decide which claim gets
// which GPU and stores no claims: the directory is its only state.
package cdi
