// Package preparetest helps to test what prepares claims: Node is a node in
// memory, partitions included, with a CDI directory on disk, which the doctor
// can look at; Sharing has MPS daemons and time slices on it.
//
// Only tests import it.
package preparetest
