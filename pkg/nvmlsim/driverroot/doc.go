// Package driverroot installs and removes the files of a simulated machine's
// NVIDIA driver, laid out like a real installation: versioned libraries,
// nvidia-smi, device nodes, and the driver's parts of /proc and /sys, all under
// one root directory.
//
// A platform's own directories of libraries and programs can be given, and another
// directory for what the kernel makes: device nodes, /proc and /sys. A link beside the
// state file leads to that one. On a machine that is made for it, that is "/" itself:
// then the driver's lines are added to /proc/devices, and the kernel log is kept under
// another name, and both are put back in the end. The library and the programs find each
// other and the root by relative paths that are written into them, so they do so through
// another mount of the host too.
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
