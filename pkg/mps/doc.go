// Package mps is the kubelet plugin's client of the node's supervisor (package
// mps/supervisor, program mps-supervisor), which starts and stops MPS control
// daemons on request over a unix socket.
//
// It decides nothing: the plugin's journal determines the wanted daemons and
// their limits.
package mps
