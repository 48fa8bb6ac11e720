// Package supervisor starts, watches and stops the MPS control daemons of a
// node. It serves the requests of package mps and knows no claims.
//
// Each daemon has a directory in the run directory, named after it:
//
//	d/<name>/daemon.json  the wanted daemon, and its process
//	d/<name>/pipe         the sockets: the daemon's CUDA_MPS_PIPE_DIRECTORY
//	d/<name>/clients      those of them that clients may see, as hard links
//	d/<name>/log          control.log and server.log, and start.log, its output while it started
//	d/<name>/shm          its /dev/shm
//
// The intent is written before the effect, so after a crash at any point every
// process and directory is found again: by the record, or else by the pipe
// directory in the environment of the processes. A daemon outlives the
// supervisor: it is outside of the container's cgroup and has the host's files. The
// next supervisor adopts it without its clients noticing.
// A record that can't be read is renamed, and its daemon is stopped.
//
// A daemon that dies is started again, at once and then with growing pauses,
// with the limits it had. All of it lies on a tmpfs and is gone after a reboot,
// like the daemons.
//
// It is one package because every file handles a side of the same daemon: its
// record, directory, processes, cgroup, limits and clients. Which of them exist
// decides what is done with the others.
package supervisor
