// Package filestest is a disk for tests: a FUSE file system that forgets, when its
// power is cut, all that programs haven't synced, and that fails when it is told to.
//
// It loses as much as POSIX allows, which is more than most file systems do: fsync
// of a file makes its data durable and not its name; fsync of a directory makes its
// names durable, and neither the data of its files nor its own name in the
// directory above. Each name changed since then is lost or kept for itself, also
// both names of a rename. Data that wasn't synced is lost in one piece, cut off, or
// zeros.
//
// It needs root and /dev/fuse. Only tests import it.
package filestest
