package cluster

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// clusterSpace is what two nodes write in their first minutes, with images, etcd
// and logs, and as much again.
const clusterSpace = 3 << 30

// checkSpace fails, naming dir, where fewer than need bytes are free: on a full
// disk etcd, containerd and the kubelets of a new cluster die one after the other,
// and only the log of one of them says why.
func checkSpace(dir string, need uint64) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the directory of the clusters: %w", err)
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(dir, &disk); err != nil {
		return fmt.Errorf("read the free space of %s: %w", dir, err)
	}
	free := disk.Bavail * uint64(disk.Bsize)
	if free < need {
		return fmt.Errorf("%s has %d MiB of free space, and a cluster needs %d: free some, "+
			"for example with go clean -cache, or take down other clusters (localcluster status)", dir, free>>20, need>>20)
	}
	return nil
}
