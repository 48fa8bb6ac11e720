// Package mps is how the kubelet plugin has MPS control daemons started and
// stopped: by asking the supervisor of the node (package mps/supervisor, program
// mps-supervisor) over its unix socket.
//
// It decides nothing: which daemons are wanted, with which limits, is what the
// plugin's journal says.
package mps
