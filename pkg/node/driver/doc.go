// Package driver finds the NVIDIA driver of the node, reads its GPUs and follows
// its events. The facts, the common CDI specification and the parts that use the
// hardware (Parts) learn from it which driver there is, and when it goes.
//
// One driver, from its arrival to its loss, is Follower.follow: open, read, give it to
// the parts and recover, read again at each request, take it from the parts, close.
//
// It is one package because all of its files are steps of that, and share the Follower
// that takes them in turn.
package driver
