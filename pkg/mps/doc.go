// Package mps is the kubelet plugin's client of the node's supervisor (package
// mps/supervisor, program mps-supervisor), which starts and stops MPS control
// daemons on request over a unix socket. It also knows the supervisor's run
// directory, which the plugin reads while the supervisor is away.
//
// It decides nothing: the plugin's journal determines the wanted daemons and
// their limits.
package mps
