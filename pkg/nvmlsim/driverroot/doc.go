// Package driverroot lays out, and takes away again, the files of an NVIDIA
// driver of a simulated machine, as a real driver's installation looks: versioned
// libraries, nvidia-smi, device nodes, and the parts of /proc and /sys that the
// driver makes, all under one root directory.
//
// The library and nvidia-smi are copied from where they were built; nvidia-smi, which
// the library starts as its engine, carries the machine's description
// (nvmlsim.Embed). The other libraries are empty shared objects with the right
// names, for those who look for files and mount them. The
// machine's state file is kept when the same machine is installed again.
//
// What was made is written down in a manifest first, so that Uninstall removes
// exactly that, also after an installation that was killed half-way.
package driverroot
