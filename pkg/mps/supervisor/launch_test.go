package supervisor

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// lookSource is a program that needs no library and says which of some files
// there are.
const lookSource = `package main

import (
	"fmt"
	"os"
)

func main() {
	for _, path := range os.Args[1:] {
		if _, err := os.Stat(path); err == nil {
			fmt.Println(path)
		}
	}
}
`

// look builds the program into a directory.
func look(t *testing.T, dir string) {
	t.Helper()
	source := filepath.Join(t.TempDir(), "look.go")
	if err := os.WriteFile(source, []byte(lookSource), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "look"), source)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
}

// A launched program sees the host's files, with the host mounted as in a
// container, and as a plain directory.
func TestLaunchedInTheHost(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	host := t.TempDir()
	for _, dir := range []string{"run/mps/d/a/pipe", "run/mps/d/a/shm", "dev/shm", "driver/dev/shm", "driver/bin", "bin"} {
		if err := os.MkdirAll(filepath.Join(host, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"only-the-host", "driver/only-the-driver", "run/mps/d/a/pipe/control", "run/mps/d/a/shm/private", "dev/shm/everybodys", "driver/dev/shm/everybodys"} {
		if err := os.WriteFile(filepath.Join(host, file), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	look(t, filepath.Join(host, "bin"))
	if err := os.Link(filepath.Join(host, "bin/look"), filepath.Join(host, "driver/bin/look")); err != nil {
		t.Fatal(err)
	}
	container := t.TempDir()
	if err := unix.Mount(host, container, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("can't mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(container, unix.MNT_DETACH) })
	for name, tc := range map[string]struct{ hostRoot, root, want string }{
		"a mount":                      {container, "/", "/only-the-host /run/mps/d/a/pipe/control /dev/shm/private"},
		"a directory":                  {host, "/", "/only-the-host /run/mps/d/a/pipe/control /dev/shm/private"},
		"a driver root in a mount":     {container, "/driver", "/only-the-driver /run/mps/d/a/pipe/control /dev/shm/private"},
		"a driver root in a directory": {host, "/driver", "/only-the-driver /run/mps/d/a/pipe/control /dev/shm/private"},
	} {
		t.Run(name, func(t *testing.T) {
			l := launch{hostRoot: tc.hostRoot, program: driverroot.Program{Root: tc.root, Path: "/bin/look"}, place: "/run/mps/d/a"}
			cmd := l.command(t.Context(), []string{"A=b"},
				"/only-the-host", "/only-the-driver", "/run/mps/d/a/pipe/control", "/dev/shm/private", "/dev/shm/everybodys", container)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := l.start(cmd); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Fatalf("%v: %s", err, &out)
			}
			if got := strings.Join(strings.Fields(out.String()), " "); got != tc.want {
				t.Errorf("it sees %q, want %q", got, tc.want)
			}
		})
	}
	if _, err := os.Stat("/dev/shm/private"); err == nil {
		t.Error("the caller's /dev/shm was replaced")
	}
}

// In a driver root that is a system of its own nothing is left of a daemon.
func TestUnfurnish(t *testing.T) {
	n := newNode(t)
	n.drop("bin/" + program)
	elf, err := os.ReadFile("/bin/sleep")
	if err != nil {
		t.Fatal(err)
	}
	n.put("bin/"+program, string(elf))
	loader, err := exec.CommandContext(t.Context(), "sh", "-c", "ldd /bin/sleep | grep -o '/[^ ]*/ld-[^ ]*'").Output()
	if err != nil {
		t.Skip("no loader")
	}
	inside := filepath.Join(n.cfg.DriverRoot, strings.TrimSpace(string(loader)))
	if err := os.MkdirAll(filepath.Dir(inside), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(inside, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	d := driver{host: hostOf(n.cfg), cfg: &n.cfg}
	p, err := d.find()
	if err != nil || p.Root != n.cfg.DriverRoot {
		t.Fatalf("found %+v, %v", p, err)
	}
	shown := filepath.Join(p.Root, string(n.at("a")))
	if err := os.MkdirAll(shown, 0o755); err != nil {
		t.Fatal(err)
	}
	n.start("")
	if _, err := n.Stop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(shown); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", shown, err)
	}
}

func TestLaunchSaysWhatIsWrong(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	for name, tc := range map[string]struct{ host, program, want string }{
		"no program": {"/", "/nowhere/program", "run /nowhere/program"},
		"no host":    {"/nowhere", "/bin/true", "enter the host's file system at /nowhere"},
	} {
		l := launch{hostRoot: tc.host, program: driverroot.Program{Root: "/", Path: tc.program}, place: place(shmOf(t))}
		if err := l.start(l.command(t.Context(), nil)); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q in it", name, err, tc.want)
		}
	}
}

// A kernel that can't start a process in a cgroup is named as the cause.
func TestStartInACgroupNeedsLinux57(t *testing.T) {
	started := &os.PathError{Op: "fork/exec", Path: "/bin/true", Err: syscall.ENOSYS}
	in := &exec.Cmd{SysProcAttr: &syscall.SysProcAttr{UseCgroupFD: true}}
	if err := explainStart(in, started); !strings.Contains(err.Error(), "Linux 5.7") || !errors.Is(err, syscall.ENOSYS) {
		t.Errorf("in a cgroup: %v", err)
	}
	if err := explainStart(&exec.Cmd{}, started); err != error(started) {
		t.Errorf("in none: %v", err)
	}
	if err := explainStart(in, syscall.ENOENT); !errors.Is(err, syscall.ENOENT) || strings.Contains(err.Error(), "Linux") {
		t.Errorf("another error: %v", err)
	}
}

// The process that launches keeps its own files and namespaces, whichever of its
// threads is asked next.
func TestLaunchLeavesTheProcessAsItWas(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	before := threads(t)
	for range 20 {
		l := launch{hostRoot: t.TempDir(), program: driverroot.Program{Root: "/", Path: "/nowhere"}, place: place(shmOf(t))}
		if err := l.start(l.command(t.Context(), nil)); err == nil {
			t.Fatal("a program that isn't there was started")
		}
	}
	strange := func() map[string]bool {
		seen := threads(t)
		maps.DeleteFunc(seen, func(one string, _ bool) bool { return before[one] })
		return seen
	}
	for began := time.Now(); len(strange()) > 0; runtime.Gosched() { // a thread ends a moment after its goroutine
		if time.Since(began) > time.Minute {
			t.Fatalf("threads have %v, want one of %v", strange(), before)
		}
	}
}

// threads returns the root directories and mount namespaces of this process's
// threads. A thread that has begun to end has none.
func threads(t *testing.T) map[string]bool {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{}
	for _, task := range tasks {
		root, rootErr := os.Readlink(filepath.Join(task, "root"))
		mounts, mountsErr := os.Readlink(filepath.Join(task, "ns/mnt"))
		if rootErr == nil && mountsErr == nil {
			all[root+" "+mounts] = true
		}
	}
	return all
}

func shmOf(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "shm"), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}
