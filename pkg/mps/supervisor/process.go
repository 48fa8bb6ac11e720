package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// startOf returns when a process was started, in the clock ticks since boot that
// /proc/PID/stat has; false where there is no such process, or only its exit
// status is left.
func startOf(pid int) (uint64, bool) {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return 0, false
	}
	stat, err := p.Stat()
	return stat.Starttime, err == nil && stat.State != "Z" && stat.State != "X"
}

// alive reports whether the process is there and is the one that was started then.
func alive(pid int, start uint64) bool {
	now, ok := startOf(pid)
	return ok && pid > 0 && now == start
}

// ended reports whether the process has ended.
func (p process) ended() bool { return !alive(p.pid, p.start) }

// parsePID reads a pid file.
func parsePID(data []byte) (int, error) {
	pid, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 32)
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("%q is no process id", data)
	}
	return int(pid), nil
}

// awaitExit returns nil when the process has ended, whosever child it is, and
// ctx's error if that ends first.
func awaitExit(ctx context.Context, pid int, start uint64) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("watch process %d: %w", pid, err)
	}
	// With PIDFD_NONBLOCK, Linux before 5.10 refuses to open it.
	if err := unix.SetNonblock(fd, true); err != nil {
		return errors.Join(fmt.Errorf("watch process %d: %w", pid, err), unix.Close(fd))
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	if !alive(pid, start) {
		return nil
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("watch process %d: %w", pid, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := conn.Read(exited); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("watch process %d: %w", pid, err)
	}
	return nil
}

// checkKernel returns an error if the kernel is too old to watch and end daemons.
func checkKernel() error {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return fmt.Errorf("MPS daemons can't be watched and ended on this node: that needs Linux 5.3 or later (pidfd_open), and with cgroup v2 Linux 5.7: %w", err)
	}
	return unix.Close(fd)
}

// exited reports whether the process of a pidfd has ended.
func exited(fd uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}

// process is one process of the host. A process id is used again; with the time
// of the start it isn't.
type process struct {
	pid   int
	start uint64
}

// users lists the processes that work behind a pipe directory: the daemon, its
// server, and commands to the daemon. Clients are not among them, nor is the
// shell of somebody who looks at the daemon.
func users(pipe string) []process {
	var own unix.Stat_t
	if err := unix.Stat(pipe, &own); err != nil {
		return nil
	}
	all, err := procfs.AllProcs()
	if err != nil {
		return nil
	}
	var found []process
	for _, p := range all {
		if p.PID == os.Getpid() || !isOurs(p, pipe) {
			continue
		}
		start, ok := startOf(p.PID)
		if !ok || !isOurs(p, pipe) { // the same process, or one that is ours too
			continue
		}
		// Other nodes may live on this machine, with the same paths.
		if sees(p.PID, pipe, own) {
			found = append(found, process{p.PID, start})
		}
	}
	return found
}

// isOurs reports whether a process is a program of MPS that began with the pipe directory in
// its environment.
func isOurs(p procfs.Proc, pipe string) bool {
	command, err := p.CmdLine()
	if err != nil || len(command) == 0 || !strings.HasPrefix(filepath.Base(command[0]), programPrefix) {
		return false
	}
	environment, err := p.Environ()
	return err == nil && slices.Contains(environment, pipeVariable+"="+pipe)
}

// sees reports whether a process has the directory at the same path. Links count as
// they do for that process: a process in a container can't pose as a
// daemon by means of a link.
func sees(pid int, path string, directory unix.Stat_t) bool {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	var theirs unix.Stat_t
	switch {
	case errors.Is(err, unix.ENOSYS): // before Linux 5.6
		err = unix.Stat(fmt.Sprintf("/proc/%d/root%s", pid, path), &theirs)
	case err == nil:
		err = errors.Join(unix.Fstat(fd, &theirs), unix.Close(fd))
	}
	return err == nil && theirs.Dev == directory.Dev && theirs.Ino == directory.Ino
}

// killUsers ends the processes that work with a pipe directory, and waits until
// they have ended.
func killUsers(ctx context.Context, pipe string) error {
	for range 5 { // one may have started another meanwhile
		found := users(pipe)
		if len(found) == 0 {
			return nil
		}
		if err := kill(ctx, found); err != nil {
			return err
		}
	}
	return fmt.Errorf("processes that use %s keep coming back: something else starts them, and has to be stopped", pipe)
}

// kill ends processes and waits until they have ended. Another process that has
// got one of their ids meanwhile is left alone.
func kill(ctx context.Context, all []process) error {
	for _, p := range all {
		if err := p.kill(); err != nil {
			return fmt.Errorf("kill process %d: %w", p.pid, err)
		}
	}
	for _, p := range all {
		if err := awaitExit(ctx, p.pid, p.start); err != nil {
			return fmt.Errorf("process %d doesn't end though it was killed (does the driver hold it? look at the kernel's log): %w", p.pid, err)
		}
	}
	return nil
}

// kill sends SIGKILL to the process, and to no other: the pidfd stays that of one
// process, and the start is compared when the id can't change its owner any more.
func (p process) kill() error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if !alive(p.pid, p.start) {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}
