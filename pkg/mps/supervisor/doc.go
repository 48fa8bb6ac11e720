// Package supervisor starts, watches and stops the MPS control daemons of a
// node. It does what it is asked to (see package mps) and knows no claims.
//
// Each daemon has a directory in the run directory, named after it:
//
//	d/<name>/daemon.json  what is wanted, and which process it is
//	d/<name>/pipe         the sockets: the daemon's CUDA_MPS_PIPE_DIRECTORY
//	d/<name>/clients      those of them that clients may see, as hard links
//	d/<name>/log          control.log and server.log, and what starting it said
//	d/<name>/shm          its /dev/shm
//
// The intent is written before the effect, so after a crash at any point every
// process and directory is found again: by the record, or else by the pipe
// directory in the environment of the processes. A daemon outlives the
// supervisor: it has left the container's cgroup and has the host's files as its
// own (see Launch). The next supervisor adopts it without its clients noticing.
// A record that can't be read is put aside; its daemon is then nobody's, and is
// stopped.
//
// A daemon that dies is started again, at once and then with growing pauses,
// with the limits it had. All of it lies on a tmpfs and is gone after a reboot,
// like the daemons.
package supervisor
