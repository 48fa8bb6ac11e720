// Command slowsync runs a program whose disk is slow: each fsync and fdatasync takes
// longer by the duration in a file, such as "500ms", which may change while the program
// runs; without the file, or with an empty one, nothing takes longer.
//
//	slowsync FILE PROGRAM ARGUMENT...
//
// The program keeps the process's ID. The kernel asks a second process before each of the
// calls (seccomp_unotify(2)); that one ends with the program. It needs root.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// asDelayer is the first argument of the second process; its socket is the descriptor 3.
const asDelayer = "--delay"

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: slowsync FILE PROGRAM ARGUMENT...")
		os.Exit(2)
	}
	do := func() error { return run(os.Args[1], os.Args[2:]) }
	if os.Args[1] == asDelayer {
		do = func() error { return delay(os.Args[2]) }
	}
	if err := do(); err != nil {
		fmt.Fprintln(os.Stderr, "slowsync:", err)
		os.Exit(1)
	}
}

// run becomes the program.
func run(file string, program []string) error {
	runtime.LockOSThread() // the filter is the thread's, and the program inherits it
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make a pair of sockets: %w", err)
	}
	delayer := exec.Command("/proc/self/exe", asDelayer, file) //nolint:gosec // this program
	delayer.Stderr = os.Stderr
	delayer.ExtraFiles = []*os.File{os.NewFile(uintptr(pair[1]), "socket")}
	if err := delayer.Start(); err != nil {
		return fmt.Errorf("start the process that delays: %w", err)
	}
	listener, err := install()
	if err != nil {
		return fmt.Errorf("install the filter: %w", err)
	}
	if err := unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(listener), nil, 0); err != nil {
		return fmt.Errorf("pass on the filter's descriptor: %w", err)
	}
	path, err := exec.LookPath(program[0])
	if err != nil {
		return err
	}
	return fmt.Errorf("run %s: %w", path, unix.Exec(path, program, os.Environ()))
}

// install has the kernel ask before this thread's calls of fsync and fdatasync, and returns
// the descriptor for that.
func install() (int, error) {
	load := unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS} // the call's number
	filter := []unix.SockFilter{
		load,
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_FSYNC, Jt: 1},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_FDATASYNC, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	// Signals of Go's runtime don't interrupt a call that waits.
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&program)))
	runtime.KeepAlive(filter)
	if errno != 0 {
		return 0, errno
	}
	return int(fd), nil
}

// call and answer are the kernel's struct seccomp_notif and seccomp_notif_resp.
type (
	call struct {
		id         uint64
		pid, flags uint32
		data       [64]byte
	}
	answer struct {
		id    uint64
		value int64
		error int32
		flags uint32
	}
)

const (
	receiveCall    = 0xc0502100 // SECCOMP_IOCTL_NOTIF_RECV
	sendAnswer     = 0xc0182101 // SECCOMP_IOCTL_NOTIF_SEND
	continueToCall = 1          // SECCOMP_USER_NOTIF_FLAG_CONTINUE
)

// delay lets each call go on after the time that the file says.
func delay(file string) error {
	listener, err := receive(3)
	if err != nil {
		return err
	}
	for {
		var c call
		switch _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), receiveCall, uintptr(unsafe.Pointer(&c))); errno {
		case 0:
		case unix.EINTR:
			continue
		case unix.ENOENT: // the program, or the thread that called, has ended
			if ended(listener) {
				return nil
			}
			continue
		default:
			return fmt.Errorf("wait for a call: %w", errno)
		}
		time.AfterFunc(wanted(file), func() {
			a := answer{id: c.id, flags: continueToCall}
			// Fails if the program has ended.
			_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(listener), sendAnswer, uintptr(unsafe.Pointer(&a)))
		})
	}
}

// ended reports whether no process is left that the kernel asks about.
func ended(listener int) bool {
	fds := []unix.PollFd{{Fd: int32(listener)}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1 && fds[0].Revents&unix.POLLHUP != 0
}

// receive receives a descriptor over a socket.
func receive(socket int) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(socket, make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("receive the filter's descriptor: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		return 0, fmt.Errorf("receive the filter's descriptor: %w", err)
	}
	for _, m := range messages {
		if fds, err := unix.ParseUnixRights(&m); err == nil && len(fds) == 1 {
			return fds[0], nil
		}
	}
	return 0, fmt.Errorf("receive the filter's descriptor: it isn't in %d messages", len(messages))
}

// wanted reads the file.
func wanted(file string) time.Duration {
	data, _ := os.ReadFile(file)
	d, _ := time.ParseDuration(strings.TrimSpace(string(data)))
	return d
}
