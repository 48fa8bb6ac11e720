package machine

import (
	"bufio"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// viewed is a component of a machine that runs what a test tells it. Its words come and go by
// pipes in the machine's /run.
type viewed struct {
	m         *testMachine
	questions *os.File
	answers   *bufio.Scanner
}

const shell = `exec </var/run/questions >/var/run/answers 2>&1; echo $$; while read -r line; do eval "$line"; echo ended $?; done`

// newViewed adds the component to a machine that is off.
func newViewed(m *testMachine, view []string) *viewed {
	m.t.Helper()
	m.spec.Components = []Component{{
		Name: "viewed", View: view,
		Args: []string{"sh", "-c", shell}, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "ANSWER=environment"},
	}}
	open := func(name string) *os.File {
		path := filepath.Join(m.spec.State, FilesDir, "run", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			m.t.Fatal(err)
		}
		if err := syscall.Mkfifo(path, 0o600); err != nil {
			m.t.Fatal(err)
		}
		// Both ends, so that neither side waits for the other to open it.
		f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK, 0)
		if err != nil {
			m.t.Fatal(err)
		}
		m.t.Cleanup(func() { _ = f.Close() })
		if err := f.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			m.t.Fatal(err)
		}
		return f
	}
	return &viewed{m: m, questions: open("questions"), answers: bufio.NewScanner(open("answers"))}
}

// started returns the PID of the component that has started.
func (v *viewed) started() int {
	v.m.t.Helper()
	pid, err := strconv.Atoi(v.line())
	if err != nil {
		v.m.t.Fatal(err)
	}
	return pid
}

func (v *viewed) line() string {
	v.m.t.Helper()
	if !v.answers.Scan() {
		log, _ := os.ReadFile(filepath.Join(v.m.spec.State, LogDir, "viewed.log"))
		v.m.t.Fatalf("no answer: %v: %s", v.answers.Err(), log)
	}
	return v.answers.Text()
}

// sh runs a script of one line, and returns its output, and in its last line how it ended.
func (v *viewed) sh(script string) string {
	v.m.t.Helper()
	if _, err := v.questions.WriteString(script + "\n"); err != nil {
		v.m.t.Fatal(err)
	}
	var lines []string
	for {
		lines = append(lines, v.line())
		if last := lines[len(lines)-1]; strings.HasPrefix(last, "ended ") {
			return strings.Join(lines, "\n")
		}
	}
}

// ask sends a request to the machine's control socket.
func (m *testMachine) ask(request Request) Response {
	m.t.Helper()
	conn, err := net.Dial("unix", filepath.Join(m.spec.State, SocketFile))
	if err != nil {
		m.t.Fatal(err)
	}
	defer conn.Close()
	if err := json.NewEncoder(conn).Encode(request); err != nil {
		m.t.Fatal(err)
	}
	var response Response
	if err := json.NewDecoder(conn).Decode(&response); err != nil {
		m.t.Fatal(err)
	}
	return response
}

// A node as Talos has it: the kubelet is a container.
func talos(t *testing.T) (*testMachine, *viewed) {
	t.Helper()
	m := newMachine(t, Spec{
		Dirs:       []string{"/var/lib/kubelet", "/var/lib/other", "/etc/cdi"},
		OwnDevices: true,
		Mounts:     []Mount{{Path: "/var", Options: []string{"noexec"}}, {Path: "/", Options: []string{"ro"}}},
		Links:      map[string]string{"/var/run": "/run"},
	})
	v := newViewed(m, []string{"/var/run", "/var/lib/kubelet", "/var/log", "/var/missing"})
	if err := os.MkdirAll(filepath.Join(m.spec.State, FilesDir, "etc/cdi/own"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := m.on(); err != nil {
		t.Fatal(err)
	}
	return m, v
}

func TestViewShowsItsDirectoriesOnly(t *testing.T) {
	_, v := talos(t)
	v.started()
	for script, want := range map[string]string{
		"echo $(ls /var) , $(ls /var/lib)":                 "lib log missing run , kubelet\nended 0",
		"readlink /var/run; echo $ANSWER":                  "/run\nenvironment\nended 0",
		"ls /home /opt /root /mnt 2>/dev/null":             "/opt:\nlocalcluster\nended 2",
		"cat /etc/cdi/own":                                 "cat: /etc/cdi/own: No such file or directory\nended 1",
		"grep -c ^root: /etc/passwd; : >/tmp/x":            "1\nended 0",
		"touch /etc/x":                                     "touch: cannot touch '/etc/x': Read-only file system\nended 1",
		"cp /bin/true /var/log; /var/log/true 2>/dev/null": "ended 126", // noexec, as in the machine
		"test -S " + StateDir + "/" + SocketFile:           "ended 0",
		"test -d /sys/fs/cgroup && test -c /dev/null":      "ended 0",
	} {
		if got := v.sh(script); got != want {
			t.Errorf("%s: got %q, want %q", script, got, want)
		}
	}
}

func TestViewSharesMounts(t *testing.T) {
	m, v := talos(t)
	pid := v.started()
	out := v.sh("mkdir /var/lib/kubelet/volume && mount -t tmpfs volume /var/lib/kubelet/volume && touch /var/lib/kubelet/volume/inside && mount -t tmpfs volume /var/log")
	if out != "ended 0" {
		t.Fatalf("mount in the view: %s", out)
	}
	m.sh("test -e /var/lib/kubelet/volume/inside")
	if out := m.sh("findmnt -n -o TARGET,SOURCE --list | grep volume"); strings.Count(out, "\n") != 1 {
		t.Errorf("the machine has mounts of the view: %s", out)
	}
	if out := m.sh("cat /proc/1/mountinfo"); strings.Contains(out, " "+stage) {
		t.Errorf("the machine sees how the view was made: %s", out)
	}
	m.sh("mkdir /run/shown /run/own && mount -t tmpfs shown /run/shown && touch /run/shown/outside")
	if out := v.sh("ls /run/shown"); out != "outside\nended 0" {
		t.Errorf("what was mounted in the machine: %s", out)
	}

	// As other components, it has the PID that pid 1 knows, and is started again.
	if known := m.ask(Request{Op: OpStatus}).Components[0].PID; known != pid {
		t.Errorf("pid 1 knows process %d, the component is %d", known, pid)
	}
	m.ask(Request{Op: OpSignal, Component: "viewed", Signal: int(syscall.SIGKILL)})
	v.started()
	if out := v.sh("ls /var/lib/kubelet/volume; umount /var/lib/kubelet/volume"); out != "inside\nended 0" {
		t.Errorf("after a restart: %s", out)
	}
	m.sh("test ! -e /var/lib/kubelet/volume/inside")
}
