package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// containerLabel is the SELinux label of files that every confined container may
// use: the type that containers' own files have, without the categories that keep
// containers apart.
const containerLabel = "system_u:object_r:container_file_t:s0"

// setxattr is unix.Setxattr.
type setxattr func(path, attr string, data []byte, flags int) error

// labelForContainers gives a directory the label containerLabel on a host with
// SELinux, and does nothing on others. What is made in the directory inherits its
// type.
func labelForContainers(hostRoot, dir string, set setxattr) error {
	_, err := os.Stat(filepath.Join(hostRoot, "sys/fs/selinux/enforce"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find out whether the host has SELinux: %w", err)
	}
	err = set(dir, "security.selinux", []byte(containerLabel+"\x00"), 0)
	// A policy without that type confines no containers by it.
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("label %s for containers: %w", dir, err)
	}
	return nil
}
