// Package preparetest helps to test what prepares claims: Check asserts what
// must always be true of a node's journal and CDI directory, whoever wrote
// them, and Node is a node in memory, partitions included, with a CDI directory
// on disk.
//
// Only tests import it.
package preparetest
