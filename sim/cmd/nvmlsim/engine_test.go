package main_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"
)

// A call that hangs blocks its own thread only.
func TestLibraryHang(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "2xh100-80gb")
	l := open(t, root)
	gone, there := device(t, l, 0), device(t, l, 1)
	nvmlsim(t, "break", "0", "--wedged", "--root", root)
	hung := make(chan nvml.Return, 1)
	go func() { hung <- second(gone.GetUUID()) }()
	for range 100 {
		ok(t, second(there.GetUUID()))
		ok(t, second(l.DeviceGetCount()))
	}
	select {
	case r := <-hung:
		t.Fatalf("the call has returned: %v", r)
	default:
	}
	nvmlsim(t, "heal", "0", "--root", root)
	ok(t, <-hung)
}

func TestLibraryWithoutDriver(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "l4")
	nvmlsim(t, "driver", "unload", "--root", root)
	l := nvml.New(nvml.WithLibraryPath(library(root)))
	if r := l.Init(); r != nvml.ERROR_DRIVER_NOT_LOADED {
		t.Errorf("init: %v", r)
	}
	nvmlsim(t, "driver", "load", "--root", root)
	ok(t, l.Init())
	ok(t, l.Shutdown())
	if r := l.Shutdown(); r == nvml.SUCCESS {
		t.Error("shut down twice")
	}
}

func TestLibraryManyTimesAndFromManyThreads(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "8xh100-80gb")
	for range 20 {
		l := nvml.New(nvml.WithLibraryPath(library(root)))
		ok(t, l.Init())
		ok(t, l.Shutdown())
	}
	l := open(t, root)
	want, r := device(t, l, 7).GetUUID()
	ok(t, r)
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for range 200 {
				d, r := l.DeviceGetHandleByIndex(7)
				if uuid, r2 := d.GetUUID(); r != nvml.SUCCESS || r2 != nvml.SUCCESS || uuid != want {
					t.Errorf("%v, %v, %s", r, r2, uuid)
				}
			}
		})
	}
	for i := range 20 { // while the state changes
		nvmlsim(t, "break", itoa(i%8), "--xid", "13", "--root", root)
	}
	wg.Wait()
}

// TestLibraryInContainer runs a C program, like a user's, in a container that
// has only the library and device nodes.
func TestLibraryInContainer(t *testing.T) {
	root := install(t, "8xh100-80gb")
	dir := container(t, root, "nvidiactl", "nvidia3")
	compile(t, "call_all", dir)
	for _, path := range []string{"/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"} {
		b, err := os.ReadFile(path)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, path), b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	c := exec.Command("/call_all", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04")
	c.SysProcAttr, c.Dir = &syscall.SysProcAttr{Chroot: dir}, "/"
	var errors bytes.Buffer
	c.Stderr = &errors
	if out, err := c.Output(); err != nil || errors.String() != "nvmlInit_v2: 0\n" {
		t.Errorf("%v, %s%s", err, errors.String(), out)
	}
}

// TestLibraryStress is a short run of the stress test in docs/dev/testing.md.
func TestLibraryStress(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), compile(t, "stress", t.TempDir()), library(install(t, "8xh100-80gb")), "8", "32").CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// A thread that has called the library may end.
func TestLibraryThreadsEnd(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	l := open(t, install(t, "l4"))
	for range 300 {
		done := make(chan nvml.Return)
		go func() {
			runtime.LockOSThread() // and never unlocks: the thread ends here
			_, r := l.DeviceGetCount()
			done <- r
		}()
		ok(t, <-done)
	}
}

// engineOf finds the engine of a process, which is its child.
func engineOf(t *testing.T, pid int) int {
	t.Helper()
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		b, _ := os.ReadFile(list) // the thread may have ended
		for child := range strings.FieldsSeq(string(b)) {
			name, _ := os.ReadFile("/proc/" + child + "/cmdline")
			if strings.HasPrefix(string(name), "nvmlsim-engine\x00") {
				engine, err := strconv.Atoi(child)
				if err != nil {
					t.Fatal(err)
				}
				return engine
			}
		}
	}
	t.Fatalf("process %d has no engine", pid)
	return 0
}

// After an engine has died, NVML is in the same state as after a shutdown;
// nvmlInit starts another engine with the same GPUs.
func TestLibraryEngineDies(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "2xh100-80gb")
	l := nvml.New(nvml.WithLibraryPath(library(root)))
	ok(t, l.Init())
	ok(t, l.Init())
	d := device(t, l, 1)
	want, r := d.GetUUID()
	ok(t, r)
	set, r := l.EventSetCreate()
	ok(t, r)
	ok(t, d.RegisterEvents(nvml.EventTypeXidCriticalError, set))
	waiting := make(chan nvml.Return, 1)
	go func() { waiting <- second(set.Wait(600000)) }()
	if err := syscall.Kill(engineOf(t, os.Getpid()), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if r := <-waiting; r != nvml.ERROR_UNKNOWN && r != nvml.ERROR_UNINITIALIZED {
		t.Errorf("a call that was under way: %v", r)
	}
	if _, r := d.GetUUID(); r != nvml.ERROR_UNINITIALIZED {
		t.Errorf("a later call: %v", r)
	}
	ok(t, l.Init())
	if uuid, r := d.GetUUID(); r != nvml.SUCCESS || uuid != want {
		t.Errorf("the GPU's handle: %s, %v, want %s", uuid, r, want)
	}
	if _, r := set.Wait(1); r != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("the event set: %v", r)
	}
	ok(t, l.Shutdown())
	if _, r := d.GetUUID(); r != nvml.ERROR_UNINITIALIZED {
		t.Errorf("after as many shutdowns as initializations since: %v", r)
	}
}

// An engine ends with its process, even while a call hangs in it.
func TestLibraryProcessDies(t *testing.T) {
	root := install(t, "l4")
	nvmlsim(t, "fault", "SystemGetDriverVersion", "--hang", "--root", root)
	c := exec.Command(compile(t, "call_all", t.TempDir()), library(root))
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	errors, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(errors).ReadString('\n'); err != nil || line != "nvmlInit_v2: 0\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if _, err := io.WriteString(in, "nvmlSystemGetDriverVersion\n"); err != nil {
		t.Fatal(err)
	}
	engine, err := unix.PidfdOpen(engineOf(t, c.Process.Pid), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(engine)
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // it was killed
	const minute = 60000
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(engine), Events: unix.POLLIN}}, minute); n != 1 {
		t.Errorf("the engine goes on: %v", err)
	}
}

func TestLibraryWithoutProgram(t *testing.T) {
	if !ownProcess(t) {
		return
	}
	root := install(t, "l4")
	if err := os.Remove(filepath.Join(root, "usr/bin/nvidia-smi")); err != nil {
		t.Fatal(err)
	}
	l := nvml.New(nvml.WithLibraryPath(library(root)))
	if r := l.Init(); r != nvml.ERROR_DRIVER_NOT_LOADED {
		t.Errorf("init: %v", r)
	}
}
