// Package nvmlsim is pretended NVIDIA hardware: a machine with GPUs that
// answers what NVML would, without a GPU, a driver or root.
//
// A machine is declared (Spec), given its identities (Describe: UUIDs,
// serials and PCI addresses follow from the machine's name, so that they are
// the same on every run and differ between nodes), and kept in one state file
// that all processes share (Store). The file is the hardware: it outlives every
// process, and whoever opens it sees the same GPUs. GPU models are data
// (models/*.yaml), each row with its source.
//
// It is used in two ways: in process, by tests and the nvidia-smi stand-in, and
// through libnvidia-ml.so.1 (packages library and engine), by production binaries
// unmodified. Neither adds behaviour of its own.
//
// What a process sees depends on where it is, as with a real driver. With the
// state file in reach (on the node, under the driver root, or named by
// NVSIM_STATE) it sees all GPUs. In a user's container it sees exactly the GPUs
// whose /dev/nvidiaN is there and allowed by the device cgroup. What they are
// like it reads from the state file's second name, which container runtimes
// mount because it looks like firmware (FirmwareFile); without that their
// identities come from the description that installing appended to nvidia-smi
// (Embed), and they count as healthy and idle.
//
// Programs that use a GPU are Holders: what they use ends with them. CUDA MPS and
// a CUDA program are pretended in package mps.
//
// It is not a CUDA: nothing runs on these GPUs. The package imports neither
// go-nvml nor any other package of this module.
package nvmlsim
