package machine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// Bottlerocket has its programs and libraries in a directory of another name.
func TestLinkInPlaceOfTheHostsDirectory(t *testing.T) {
	const usr = "/x86_64-bottlerocket-linux-gnu/sys-root/usr"
	m := startMachine(t, Spec{
		Links:  map[string]string{"/usr": usr[1:], "/usr/games": "bin"},
		Mounts: []Mount{{Path: "/", Options: []string{"ro"}}},
	})
	if out := m.sh("readlink -f /usr/bin /bin /usr/games"); out != strings.Repeat(usr+"/bin\n", 2)+usr+"/bin" {
		t.Errorf("got %q", out)
	}
	m.sh("test -x /bin/sh; test -d " + usr + "/lib")
	m.fails("touch "+usr+"/x", "Read-only file system")
}

func TestLinks(t *testing.T) {
	m := newMachine(t, Spec{
		Dirs:   []string{"/var/lib/own"},
		Mounts: []Mount{{Path: "/opt", Type: "tmpfs"}, {Path: "/home", Type: "disk"}},
		Links: map[string]string{
			"/etc/passwd":             "shadow",         // in place of a file
			"/bin/sh":                 "/bin/bash",      // below and in place of a link
			"/no/such/dir/link":       "../../target",   // in directories that don't exist
			"/opt/deep/link":          "/etc",           // in a tmpfs
			"/home/link":              "/opt/deep",      // on a disk
			"/var/lib/own/link":       "/home",          // in a directory of the machine
			"/var/run":                "/run",           // as the host may have it already
			"/etc/init.d":             "/usr/lib/no-rc", // the host's directory is shown there
			"/var/lib/localcluster-x": "/var/lib/own",   // to what is mounted later
		},
	})
	for range 2 { // those on disks are there when the machine is switched on again
		if err := m.on(); err != nil {
			t.Fatal(err)
		}
		for path, target := range m.spec.Links {
			if out := m.sh("readlink " + path); out != target {
				t.Errorf("%s leads to %q, want %q", path, out, target)
			}
		}
		if out := m.sh("ls -a /usr/lib/no-rc; stat -c %a /etc"); !strings.Contains(out, "..\n") || !strings.HasSuffix(out, "755") {
			t.Errorf("got %q", out)
		}
		m.off()
	}
	if out, err := os.Readlink("/etc/passwd"); err == nil {
		t.Errorf("the host's /etc/passwd became a link to %s", out)
	}
}

func TestLinkInPlaceOfFilesOnADisk(t *testing.T) {
	m := newMachine(t, Spec{Dirs: []string{"/var/lib/own"}, Links: map[string]string{"/var/lib/own/dir": "/etc"}})
	dir := filepath.Join(m.spec.State, FilesDir, "var/lib/own/dir/kept")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := m.on(); err == nil || !strings.Contains(err.Error(), "/var/lib/own/dir") {
		t.Errorf("got %v, want an error about the directory that isn't empty", err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
}

// The host's files must be as they were.
func TestHostDoesNotChange(t *testing.T) {
	var before, after unix.Stat_t
	if err := unix.Stat("/usr/bin", &before); err != nil {
		t.Fatal(err)
	}
	m := startMachine(t, Spec{Links: map[string]string{"/usr": "elsewhere/usr"}})
	m.sh("touch /usr/bin/new /elsewhere/usr/bin/new2")
	if err := unix.Stat("/usr/bin", &after); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("the host's /usr/bin changed:\n%s", diff)
	}
}
