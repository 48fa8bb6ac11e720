// Package driverroot finds the NVIDIA driver's user space on a host: the
// directory of its libraries and programs, its device nodes, and the file of
// the NVML library.
//
// The plugin usually runs in a container with the host's file system mounted
// somewhere (--host-root). Driver installations are full of symbolic links,
// some absolute, which must be followed within the host and not within the
// container; Host.Do runs a function with the host's root directory for that.
//
// It doesn't load the library (package nvml does) and keeps no state.
package driverroot
