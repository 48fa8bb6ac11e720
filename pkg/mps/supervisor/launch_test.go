package supervisor

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

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

// What a launched program sees, with the host mounted as in a container, and as a
// mere directory.
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
			l := launch{
				HostRoot: tc.hostRoot, Program: driverroot.Program{Root: tc.root, Path: "/bin/look"}, Place: "/run/mps/d/a",
				Args: []string{"/only-the-host", "/only-the-driver", "/run/mps/d/a/pipe/control", "/dev/shm/private", "/dev/shm/everybodys", container},
			}
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd, err := l.command(t.Context(), []string{self, "launch"}, []string{"A=b"})
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if got := strings.Join(strings.Fields(string(out)), " "); got != tc.want {
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
	if err := n.Stop(t.Context(), "a"); err != nil {
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
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ text, want string }{
		"no program": {launchText(t, "/", "/nowhere/program"), "run /nowhere/program"},
		"no host":    {launchText(t, "/nowhere", "/bin/true"), "enter the host's file system at /nowhere"},
		"no text":    {"launch", "invalid character"},
	} {
		out, err := exec.Command(self, "launch", tc.text).CombinedOutput()
		if err == nil || !strings.Contains(string(out), tc.want) {
			t.Errorf("%s: %v, %s", name, err, out)
		}
	}
}

func launchText(t *testing.T, host, program string) string {
	t.Helper()
	text, err := json.Marshal(launch{HostRoot: host, Program: driverroot.Program{Root: "/", Path: program}, Place: place(shmOf(t))})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(text), launchPrefix) {
		t.Fatalf("%s doesn't begin with %s", text, launchPrefix)
	}
	return string(text)
}

func shmOf(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "shm"), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}
