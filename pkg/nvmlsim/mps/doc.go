// Package mps is CUDA MPS of simulated machines: stand-ins for
// nvidia-cuda-mps-control and nvidia-cuda-mps-server, and a stand-in for a CUDA
// program that is their client, or uses a GPU without them. Command language,
// texts, files, exit codes and what limits do are those of driver 580.159.04 on
// an H200; what nobody has seen there is marked as assumed.
//
// The control daemon and the server are processes of their own, as the real
// ones are. The daemon listens in its pipe directory, starts the server for the
// first client or on command, and hands each client's connection over to it; so
// whoever can reach the pipe directory is served, from any container. The server
// holds the GPUs' memory for itself and its clients (nvmlsim.Holder), and decides
// what a client gets. A connection that ends is a process that died.
package mps
