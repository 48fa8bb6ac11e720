// Package mps simulates CUDA MPS: nvidia-cuda-mps-control,
// nvidia-cuda-mps-server, and a CUDA program that is their client or uses a GPU
// without them. Command language, texts, files, exit codes and the effects of
// limits are those of driver 580.159.04 on an H200, for several users on an H100;
// behaviour that was not observed there is marked as assumed.
//
// The control daemon and the server are separate processes, like the real ones.
// The daemon listens in its pipe directory, starts the server for the first
// client or on command, and passes each client's connection to the server; so
// every program that can reach the pipe directory is served, in any container.
// The server records the GPU memory of itself and its clients (nvmlsim.Holder),
// and applies the limits. The end of a connection means that the process has
// died.
package mps
