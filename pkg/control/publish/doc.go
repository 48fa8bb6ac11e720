// Package publish turns what a node offers into ResourceSlices and brings a
// server's slices in line with them.
//
// A node's pool is named after the node and has one slice a GPU, so that the
// scheduler can skip a GPU as a whole, and beside them what the server's form of
// shared counters needs; Probe finds that form out. Only slices that carry this
// driver's name and our label are seen or touched. Everything is decided from
// the slices themselves: the package keeps no memory of what it wrote, and when
// to publish is pkg/control's decision.
package publish
