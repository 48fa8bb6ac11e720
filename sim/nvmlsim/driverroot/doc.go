// Package driverroot installs and removes the files of a simulated machine's
// NVIDIA driver, laid out like a real installation: versioned libraries,
// nvidia-smi, device nodes, and the driver's parts of /proc and /sys, all under
// one root directory.
//
// Options give the directories of libraries and programs, and Kernel, the directory for
// device nodes, /proc and /sys, to which the link nvmlsim.KernelLink leads. Kernel may be
// / on a machine made for it: Install then adds lines to /proc/devices and replaces
// /dev/kmsg, and Uninstall restores both. The library and the programs find each other and
// the root by relative paths that are written into them, so they do so through another
// mount of the host too.
//
// The library and nvidia-smi are copies of built files; nvidia-smi, which the library
// starts as its engine, carries the machine's description (nvmlsim.Embed). The other
// libraries are empty shared objects with the right names, for programs that search
// for these files and mount them. The machine's state file is kept when the same
// machine is installed again.
//
// A manifest lists every file before it is created, so that Uninstall removes
// exactly these files, also after an interrupted installation.
package driverroot
