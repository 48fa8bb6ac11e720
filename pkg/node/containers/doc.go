// Package containers finds out whether a container with a claim's devices still
// runs, and waits for its end.
//
// Each claim has a mark: an empty file that the claim's CDI spec mounts into
// every container that gets the claim. A mount keeps the file's directory entry
// alive in the kernel, so after the file was unlinked the kernel reports its
// deletion (inotify's IN_DELETE_SELF) at the moment at which the last mount
// namespace with such a mount is gone: when the last process of the last of
// these containers has ended. This needs no API server, no list of pods and no
// scan of processes, and it includes containers of pods that joined a shared
// claim later. Once the file is unlinked, a container that was about to start
// with the claim can't: its runtime finds nothing to mount.
//
// At its start, the package finds marks that an earlier process of the plugin
// deleted and that are still mounted, in the mountinfo of the host's processes.
//
// The pods that a claim's record names count as a whole: a process of any of
// their containers may have been passed a file descriptor of the device. Their
// cgroups must be empty or gone too.
package containers
