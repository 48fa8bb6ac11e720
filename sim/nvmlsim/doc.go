// Package nvmlsim simulates NVIDIA hardware: a machine with GPUs that answers
// as NVML does, without a GPU, a driver or root.
//
// A Spec declares a machine. Describe adds identities: UUIDs, serials and PCI
// addresses are derived from the machine's name, so they are the same in every
// run and differ between nodes. A Store keeps the machine in one state file
// that all processes share. The file stands for the hardware: it outlives every
// process, and all processes that open it see the same GPUs. GPU models are
// data (models/*.yaml), each row with its source.
//
// It is used in two ways: in process, by tests and the simulated nvidia-smi,
// and through libnvidia-ml.so.1 (packages library and engine), by unmodified
// production binaries. Both behave the same.
//
// As with a real driver, a process sees different GPUs on the node and in a
// container. If it can open the state file (on the node, under the driver root,
// or named by NVSIM_STATE) it sees all GPUs. In a user's container it sees
// exactly the GPUs whose /dev/nvidiaN exists and is allowed by the device
// cgroup. It reads their state from a second name of the state file, which
// container runtimes mount because it looks like firmware (FirmwareFile).
// Without that file, their identities come from the description that the
// installation appended to nvidia-smi (Embed), and they count as healthy and
// idle.
//
// A program that uses a GPU is a Holder; when it ends, its use of the GPU ends.
// Package mps simulates CUDA MPS and a CUDA program.
//
// CUDA itself is not simulated: nothing runs on these GPUs. The package imports
// neither go-nvml nor any other package of this module.
//
// It is one package because NVML's areas, a file each, are views of the same Machine:
// they share its state, its faults and the rules for calls to it.
package nvmlsim
