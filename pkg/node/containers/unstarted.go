package containers

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// isUnstarted reports whether a command's name is that of a process of runc or crun (CRI-O's
// default; read off version 1.8.1) that has made a container and waits for the word to execute the
// container's program. It has the claim's marks mounted already.
func isUnstarted(command string) bool { return command == "runc:[2:INIT]" || command == "crun" }

// killUnstarted kills processes with a mark of the claim that have not executed their
// container's program, and returns their PIDs. If the container runtime is killed while it starts a
// container, it may forget that process, which then waits for ever. The kubelet would
// kill it with the rest of the pod's cgroup, but only after the claim is unprepared.
//
// Call it only when all pods of the claim have ended, and the mark has been deleted.
func (c *Containers) killUnstarted(claimUID string) (killed []int) {
	mounts, _ := c.scan() // one that can't be read isn't killed
	for _, m := range mounts {
		if m.claimUID == claimUID && isUnstarted(c.command(m.pid)) && c.kill(m) == nil {
			killed = append(killed, m.pid)
		}
	}
	return killed
}

// kill kills the process that was found with a mark, if it still is that one. It fails
// unless this process sees the host's processes under the host's PIDs.
func (c *Containers) kill(m mount) error {
	fd, err := unix.PidfdOpen(m.pid, 0)
	if err != nil {
		return fmt.Errorf("open process %d: %w", m.pid, err)
	}
	defer unix.Close(fd)
	own, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(m.pid), "ns/mnt"))
	if err != nil {
		return fmt.Errorf("read the mount namespace of process %d: %w", m.pid, err)
	}
	hosts, err := os.Readlink(c.process(m.pid, "ns/mnt"))
	if err != nil {
		return fmt.Errorf("read the mount namespace of process %d: %w", m.pid, err)
	}
	text, err := os.ReadFile(c.process(m.pid, "mountinfo"))
	if err != nil {
		return fmt.Errorf("read the mounts of process %d: %w", m.pid, err)
	}
	marks, err := parseMounts(text, m.pid)
	if err != nil {
		return err
	}
	same := slices.ContainsFunc(marks, func(now mount) bool { return now.claimUID == m.claimUID })
	if own != hosts || !same || !isUnstarted(c.command(m.pid)) {
		return fmt.Errorf("process %d is another one", m.pid)
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		return fmt.Errorf("kill process %d: %w", m.pid, err)
	}
	return nil
}
