package cluster

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
)

const inotifyInstancesPath = "/proc/sys/fs/inotify/max_user_instances"

// inotifyInstances is enough for some eighty nodes: a kubelet and containerd
// take about a dozen, and most hosts allow a user 128.
const inotifyInstances = 1024

// allowInotify raises the limit on inotify instances, until the next boot, if the
// host's is lower than what clusters need. A kubelet that gets none ends with "too
// many open files". Where the limit can't be raised, a line in log says what to do.
func allowInotify(path string, log io.Writer) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the limit on inotify instances: %w", err)
	}
	limit, err := strconv.Atoi(string(bytes.TrimSpace(data)))
	if err != nil {
		return fmt.Errorf("read the limit on inotify instances: %s: %w", path, err)
	}
	if limit >= inotifyInstances {
		return nil
	}
	if err := os.WriteFile(path, []byte(strconv.Itoa(inotifyInstances)), 0o644); err != nil {
		fmt.Fprintf(log, "this host allows %d inotify instances, enough for about ten nodes; with more, run "+
			"sysctl fs.inotify.max_user_instances=%d on it (%v)\n", limit, inotifyInstances, err)
		return nil
	}
	fmt.Fprintf(log, "raised fs.inotify.max_user_instances from %d to %d until the next boot\n", limit, inotifyInstances)
	return nil
}
