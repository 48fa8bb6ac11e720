package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// initName is the name by which the test binary knows that it is a machine's pid 1; pid 1
// gives it that of its own file.
const initName = "machine-init"

func TestMain(m *testing.M) {
	if os.Args[0] == initName || os.Args[0] == "/proc/self/exe" {
		fmt.Fprintln(os.Stderr, Main(os.Args[1:]))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// running machine of a test.
type testMachine struct {
	t    *testing.T
	spec Spec
	cmd  *exec.Cmd
}

// newMachine returns a machine that is off. It sees its own directories as the machines of
// clusters do.
func newMachine(t *testing.T, spec Spec) *testMachine {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	spec.Name, spec.State, spec.Bin = "test", t.TempDir(), t.TempDir()
	spec.Dirs = append([]string{"/run", "/tmp"}, spec.Dirs...)
	if err := os.Mkdir(filepath.Join(spec.State, LogDir), 0o755); err != nil {
		t.Fatal(err)
	}
	m := &testMachine{t: t, spec: spec}
	t.Cleanup(m.off)
	return m
}

// startMachine returns a machine that runs.
func startMachine(t *testing.T, spec Spec) *testMachine {
	t.Helper()
	m := newMachine(t, spec)
	if err := m.on(); err != nil {
		t.Fatal(err)
	}
	return m
}

// on starts pid 1 as package cluster does, and returns what it says if it can't set up the machine.
func (m *testMachine) on() error {
	m.t.Helper()
	data, err := json.Marshal(m.spec)
	if err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.spec.State, SpecFile), data, 0o644); err != nil {
		m.t.Fatal(err)
	}
	goRead, goWrite, err := os.Pipe()
	if err != nil {
		m.t.Fatal(err)
	}
	readyRead, readyWrite, err := os.Pipe()
	if err != nil {
		m.t.Fatal(err)
	}
	m.cmd = exec.Command("/proc/self/exe", m.spec.State)
	m.cmd.Args[0] = initName
	m.cmd.Stdout, m.cmd.Stderr = m.t.Output(), m.t.Output()
	m.cmd.ExtraFiles = []*os.File{GoFD - 3: goRead, ReadyFD - 3: readyWrite}
	m.cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET,
	}
	err = m.cmd.Start()
	goRead.Close()
	readyWrite.Close()
	if err != nil {
		m.t.Fatal(err)
	}
	goWrite.Write([]byte{1})
	goWrite.Close()
	answer, err := io.ReadAll(readyRead)
	readyRead.Close()
	if err != nil {
		m.t.Fatal(err)
	}
	if string(answer) != "ok" {
		return errors.New(string(answer))
	}
	return nil
}

// off ends the machine as a power cut does.
func (m *testMachine) off() {
	if m.cmd == nil || m.cmd.Process == nil {
		return
	}
	_ = m.cmd.Process.Kill()
	_ = m.cmd.Wait()
	m.cmd = nil
}

// try runs a shell script in the machine.
func (m *testMachine) try(script string) (string, error) {
	m.t.Helper()
	pid := strconv.Itoa(m.cmd.Process.Pid)
	cmd := exec.Command("nsenter", "--target", pid, "--mount", "--pid", "--net", "--", "/bin/sh", "-c", script)
	cmd.Dir = "/"
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// sh returns the output of a shell script in the machine, which mustn't fail.
func (m *testMachine) sh(script string) string {
	m.t.Helper()
	out, err := m.try("set -e\n" + script)
	if err != nil {
		m.t.Fatalf("in the machine: %s: %v: %s", script, err, out)
	}
	return out
}

// fails checks that a script fails in the machine with a message.
func (m *testMachine) fails(script, want string) {
	m.t.Helper()
	out, err := m.try(script)
	if err == nil || !strings.Contains(out, want) {
		m.t.Errorf("in the machine: %s: got %v, %q; want it to fail with %q", script, err, out, want)
	}
}

const program = "#!/bin/sh\necho ran\n"

// runs reports whether a program that is put in a directory of the machine can be run.
func (m *testMachine) runs(dir string) bool {
	m.t.Helper()
	m.sh(fmt.Sprintf("mkdir -p %[1]s && printf %[2]q > %[1]s/program && chmod 755 %[1]s/program", dir, program))
	out, err := m.try(dir + "/program")
	if err != nil && !strings.Contains(out, "Permission denied") {
		m.t.Fatalf("run a program in %s: %v: %s", dir, err, out)
	}
	return err == nil
}

// A node as Container-Optimized OS has it.
func TestMountsOfAReadOnlyRoot(t *testing.T) {
	m := newMachine(t, Spec{
		Dirs: []string{"/etc/cdi", "/var/lib/kubelet", "/var/lib/containerd"},
		Mounts: []Mount{
			{Path: "/etc", Type: "overlay"},
			{Path: "/var", Options: []string{"noexec", "nosuid", "nodev"}},
			{Path: "/var/lib/kubelet", Options: []string{"nosuid", "nodev"}},
			{Path: "/home", Type: "disk", Options: []string{"noexec", "nosuid", "nodev"}},
			{Path: "/home/kubernetes/bin", Type: "disk", Options: []string{"nosuid", "nodev"}},
			{Path: "/tmp", Type: "tmpfs", Options: []string{"noexec", "nosuid", "nodev"}},
			{Path: "/", Options: []string{"ro"}},
		},
	})
	if err := os.WriteFile(filepath.Join(m.spec.Bin, "program"), []byte(program), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := m.on(); err != nil {
		t.Fatal(err)
	}

	got := map[string]bool{}
	for _, dir := range []string{"/etc", "/etc/cdi", "/var", "/var/lib", "/var/lib/kubelet", "/var/lib/kubelet/plugins", "/var/lib/containerd", "/home", "/home/kubernetes/bin", "/tmp", "/run"} {
		got[dir] = m.runs(dir)
	}
	want := map[string]bool{
		"/etc": true, "/etc/cdi": true, "/var": false, "/var/lib": false, "/var/lib/kubelet": true, "/var/lib/kubelet/plugins": true,
		"/var/lib/containerd": true, "/home": false, "/home/kubernetes/bin": true, "/tmp": false, "/run": true,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("where programs run (-want, +got):\n%s", diff)
	}
	if out := m.sh(BinDir + "/program"); out != "ran" {
		t.Errorf("the cluster's program: %q", out)
	}
	for _, dir := range []string{"/", "/usr", "/usr/bin", "/opt", "/opt/localcluster"} {
		m.fails("mkdir "+filepath.Join(dir, "new"), "Read-only file system")
	}
	if out := m.sh("stat -c %a /tmp /var /home"); out != "1777\n755\n755" {
		t.Errorf("modes of /tmp, /var, /home: %q", out)
	}

	m.off()
	if err := m.on(); err != nil {
		t.Fatal(err)
	}
	stays := m.sh("for d in /etc /etc/cdi /var /var/lib/kubelet /home /home/kubernetes/bin /tmp; do test -e $d/program && echo $d; done; true")
	if stays != "/etc/cdi\n/var/lib/kubelet\n/home\n/home/kubernetes/bin" {
		t.Errorf("after a power cut there are programs in: %s", stays)
	}
}

// What is mounted in the machine, by itself or from outside, is seen by all its programs.
func TestLaterMountsSpread(t *testing.T) {
	m := startMachine(t, Spec{Dirs: []string{"/var/lib/kubelet"}, Mounts: []Mount{{Path: "/var", Options: []string{"noexec"}}, {Path: "/", Options: []string{"ro"}}}})
	m.sh("mkdir -p /var/lib/kubelet/pods/x")
	out := m.sh("unshare --mount --propagation unchanged mount -t tmpfs spread /var/lib/kubelet/pods/x; findmnt -n -o SOURCE /var/lib/kubelet/pods/x")
	if out != "spread" {
		t.Errorf("mounts at the directory: %q", out)
	}
}

func TestMountsHideWhatIsBelowOnlyIfEmpty(t *testing.T) {
	m := startMachine(t, Spec{
		Dirs: []string{"/opt/own/below"},
		Mounts: []Mount{
			{Path: "/opt/own/below/again", Type: "tmpfs"},
			{Path: "/opt/own", Type: "tmpfs", Options: []string{"ro"}},
			{Path: "/opt/own/below", Options: []string{"noexec"}},
			{Path: "/usr", Options: []string{"ro"}},
		},
	})
	if out := m.sh("ls /opt/own /opt/own/below"); out != "/opt/own:\nbelow\n\n/opt/own/below:\nagain" {
		t.Errorf("got %q", out)
	}
	m.fails("touch /opt/own/x", "Read-only file system")
	m.sh("touch /opt/own/below/x /opt/own/below/again/x /opt/x")
	m.fails("touch /usr/x", "Read-only file system")
	if m.runs("/opt/own/below") || !m.runs("/opt/own/below/again") {
		t.Error("programs run below the wrong directory")
	}
}

func TestOverlayOverADiskTakesAllWrites(t *testing.T) {
	m := newMachine(t, Spec{Dirs: []string{"/var/lib/own"}, Mounts: []Mount{{Path: "/var/lib/own/etc", Type: "overlay"}}})
	kept := filepath.Join(m.spec.State, FilesDir, "var/lib/own/etc")
	if err := os.MkdirAll(kept, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(kept, "conf"), []byte("as shipped\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := m.on(); err != nil {
		t.Fatal(err)
	}
	if out := m.sh("cd /var/lib/own/etc; echo changed > conf; touch new; cat conf"); out != "changed" {
		t.Errorf("got %q", out)
	}
	m.off()
	if err := m.on(); err != nil {
		t.Fatal(err)
	}
	if out := m.sh("cd /var/lib/own/etc; ls; cat conf"); out != "conf\nas shipped" {
		t.Errorf("after a power cut: %q", out)
	}
}

func TestMountsThatCannotBe(t *testing.T) {
	for want, mount := range map[string]Mount{
		"there is no such type":              {Path: "/x", Type: "zfs"},
		`there is no option "fast"`:          {Path: "/x", Options: []string{"fast"}},
		"the root can have other options":    {Path: "/", Type: "tmpfs"},
		"mkdir /etc/passwd: not a directory": {Path: "/etc/passwd"},
	} {
		err := newMachine(t, Spec{Mounts: []Mount{mount}}).on()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("mount %+v: got %v, want %s", mount, err, want)
		}
	}
}

// As the container runtime does it for pods with user namespaces.
func TestUserNamespaceMountsKernelFileSystems(t *testing.T) {
	for name, spec := range map[string]Spec{
		"host's devices": {MaskedSysctls: map[string]string{"kernel/panic": "10"}},
		"own devices":    {MaskedSysctls: map[string]string{"kernel/panic": "10"}, OwnDevices: true},
	} {
		t.Run(name, func(t *testing.T) {
			m := startMachine(t, spec)
			m.sh(`mkdir /tmp/proc /tmp/sys
exec unshare --user --map-root-user --mount --pid --net --fork /bin/sh -ec 'mount -t proc proc /tmp/proc; mount -t sysfs sysfs /tmp/sys; test -e /tmp/proc/self; test -e /tmp/sys/kernel'`)
		})
	}
}
