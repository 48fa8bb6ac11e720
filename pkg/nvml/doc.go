// Package nvml is the hardware port: the few functions of NVIDIA's management
// library that this driver uses, each with its contract. It maps NVML's return
// codes to errors of its own.
//
// It is the only importer of go-nvml. A Session stays open as long as it can, because
// nvmlInit is slow on busy hosts: it is closed for a reset of a GPU, and when the driver
// changes or goes, and another is opened afterwards. GPU handles are looked up by index at
// each read, because a lookup by UUID is slow.
//
// The same contract suite (package nvmltest) runs on real hardware and on the
// simulator's library.
//
// It is one package because NVML's areas, a file each, have the session, its guard
// of calls and the errors in common, and nothing else may call NVML.
package nvml
