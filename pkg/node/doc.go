// Package node is the kubelet plugin: it wires the packages below it, and starts
// and stops them in the right order.
//
// docs/dev/state.md has the order of a start, docs/dev/architecture.md the goroutines.
package node
