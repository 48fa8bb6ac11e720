// Package nvml is the hardware port: the few calls this driver makes of
// NVIDIA's management library, each with its contract, and NVML's return codes
// mapped once to errors of ours.
//
// It is the only importer of go-nvml. A Session is opened once and kept for
// the life of the process, because nvmlInit is slow on busy hosts; GPU handles
// are looked up by index at each read, which is cheap, since by UUID is not.
//
// The same contract suite (package nvmltest) runs on real hardware and on the
// simulator's library.
package nvml
