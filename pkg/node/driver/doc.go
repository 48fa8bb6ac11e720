// Package driver finds the NVIDIA driver of the node, reads its GPUs and follows
// its events. The facts, the common CDI specification and the parts that use the
// driver (Listener) learn from it which driver there is, and when it goes.
//
// One driver, from its arrival to its loss, is Follower.follow: open, read, Arrived,
// read again at each signal, BeforeClose, close.
package driver
