package containers

import (
	"bufio"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// mountElsewhere mounts a file at target in a new mount namespace, and returns
// when it is mounted. The process in it is named sleep.
func mountElsewhere(t *testing.T, file, target string) (end func()) {
	t.Helper()
	const script = `mount --make-rprivate / && mount -t tmpfs tmpfs /dev && mkdir -p "${2%/*}" && : > "$2" && mount --bind "$1" "$2" && echo mounted && exec sleep infinity`
	cmd := exec.CommandContext(t.Context(), "sh", "-c", script, "sh", file, target)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("mounted: %q, %v", line, err)
	}
	return func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// TestLongMounts checks that a mark is found beside a mount whose line is very long, as that of an
// overlay of many directories.
func TestLongMounts(t *testing.T) {
	long := "36 35 0:50 / /x rw - overlay overlay rw,lowerdir=" + strings.Repeat("/l", 40_000) + "\n"
	found, err := parseMounts([]byte(long+"40 30 0:5 /marks/a "+MountDir+"/a ro - ext4 /dev/vda rw\n"+long), 1)
	if err != nil || len(found) != 1 || found[0].claimUID != "a" {
		t.Errorf("found %+v, %v, want the mark of claim a", found, err)
	}
}
