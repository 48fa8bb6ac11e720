package containers

import (
	"bufio"
	"os/exec"
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
