//go:build amd64

package supervisor

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// asOldKernel calls f on a thread on which pidfd_open fails as on an old kernel: with
// EINVAL for any flag before Linux 5.10, and with ENOSYS before 5.3.
func asOldKernel(t *testing.T, errno syscall.Errno, f func()) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: the kernel has to refuse a system call")
	}
	const number, arch, flags = 0, 4, 24 // offsets in struct seccomp_data
	least := uint32(1)
	if errno == syscall.ENOSYS {
		least = 0
	}
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: arch},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.AUDIT_ARCH_X86_64, Jf: 4},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: number},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_PIDFD_OPEN, Jf: 2},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: flags},
		{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, K: least, Jt: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	driverroot.OnOwnThread(func() {
		_, _, err := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&program)))
		if err != 0 {
			t.Errorf("seccomp: %v", err)
			return
		}
		if _, err := unix.PidfdOpen(os.Getpid(), unix.PIDFD_NONBLOCK); !errors.Is(err, errno) {
			t.Errorf("pidfd_open with a flag: %v, want %v", err, errno)
		}
		f()
	})
}

// TestWatchBeforeLinux510: the end of a process is noticed on kernels without
// PIDFD_NONBLOCK, and the wait for it ends with the context.
func TestWatchBeforeLinux510(t *testing.T) {
	cmd := exec.Command("sleep", "3600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	start, ok := startOf(cmd.Process.Pid)
	if !ok {
		t.Fatal("it doesn't run")
	}
	asOldKernel(t, syscall.EINVAL, func() {
		if err := checkKernel(); err != nil {
			t.Error(err)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := awaitExit(ended, cmd.Process.Pid, start); !errors.Is(err, context.Canceled) {
			t.Errorf("a wait that is cancelled: %v", err)
		}
		exited := make(chan error, 1)
		go func() { exited <- cmd.Wait() }()
		if err := (process{cmd.Process.Pid, start}).kill(); err != nil {
			t.Error(err)
		}
		if err := awaitExit(t.Context(), cmd.Process.Pid, start); err != nil {
			t.Errorf("a process that ends: %v", err)
		}
		<-exited
	})
}

func TestKernelIsTooOld(t *testing.T) {
	asOldKernel(t, syscall.ENOSYS, func() {
		if err := checkKernel(); err == nil || !strings.Contains(err.Error(), "needs Linux 5.3") {
			t.Errorf("got %v, want the least version", err)
		}
	})
}
