package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// containerLabel is the SELinux label of files that every confined container may use:
// the type of containers' own files, without the categories that separate containers.
const containerLabel = "system_u:object_r:container_file_t:s0"

// setxattr is unix.Setxattr.
type setxattr func(path, attr string, data []byte, flags int) error

// labelForContainers sets the label of a directory to containerLabel on a host with
// SELinux, and does nothing on others. Files that are created in the directory inherit
// its type. Idempotent.
func labelForContainers(hostRoot, dir string, set setxattr) error {
	_, err := os.Stat(filepath.Join(hostRoot, "sys/fs/selinux/enforce"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find out whether the host has SELinux: %w", err)
	}
	err = set(dir, "security.selinux", []byte(containerLabel+"\x00"), 0)
	// EINVAL: the host's policy doesn't define that type, so it doesn't confine containers.
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("label %s for containers: %w", dir, err)
	}
	return nil
}
