// Package node is the kubelet plugin: it wires the packages below it, and starts
// and stops them in the right order. It also looks for the driver and reads the
// hardware.
//
// docs/state.md has the order of a start, docs/threads.md the goroutines.
package node
