package containers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestUnstartedIsKilled checks what becomes of processes that still have a claim's mark
// when the wait for them ends: a runtime's that never became the container's program is killed.
func TestUnstartedIsKilled(t *testing.T) {
	const marked = "901 880 8:1 /var/lib/tessera/marks/" + claimUID + "//deleted /dev/tessera/" + claimUID + " ro - ext4 /dev/sda1 rw\n"
	for name, test := range map[string]struct {
		comm, mountinfo, namespace string
		want                       bool
	}{
		"never started, runc":      {comm: "runc:[2:INIT]", mountinfo: marked, want: true},
		"never started, crun":      {comm: "crun", mountinfo: marked, want: true},
		"the container's program":  {comm: "trainer", mountinfo: marked},
		"another claim's":          {comm: "runc:[2:INIT]", mountinfo: strings.ReplaceAll(marked, claimUID, "1"+claimUID[1:])},
		"not the host's processes": {comm: "runc:[2:INIT]", mountinfo: marked, namespace: "mnt:[1]"},
	} {
		t.Run(name, func(t *testing.T) {
			child := exec.CommandContext(t.Context(), "sleep", "infinity")
			if err := child.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = child.Wait() // it is killed
			}()
			defer func() {
				_ = child.Process.Kill() // unless it was
				<-ended
			}()
			namespace := test.namespace
			if namespace == "" {
				var err error
				if namespace, err = os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", child.Process.Pid)); err != nil {
					t.Fatal(err)
				}
			}
			root := newRoot(t)
			write(t, filepath.Join(process(t, root, child.Process.Pid, namespace, test.mountinfo, ""), "comm"), test.comm+"\n")
			c := start(t, t.TempDir(), root)
			defer hold(t, mark(t, c))()
			err := holds(t, c)
			if !test.want {
				if strings.Contains(err.Error(), "killed") || child.Process.Signal(syscall.Signal(0)) != nil {
					t.Errorf("it was killed: %v", err)
				}
				return
			}
			<-ended
			if got := child.ProcessState.String(); got != "signal: killed" || !strings.Contains(err.Error(), fmt.Sprintf("killed [%d]", child.Process.Pid)) {
				t.Errorf("%s: %v", got, err)
			}
		})
	}
}
