//go:build integration

package apiserver_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/tessera-dra/tessera/test/apiserver"
)

// assets is set in the process that TestKilled starts and kills: the directory
// of the binaries.
const assets = "TEST_APISERVER_ASSETS"

func TestMain(m *testing.M) {
	if dir := os.Getenv(assets); dir != "" {
		os.Exit(serve(dir))
	}
	os.Exit(m.Run())
}

// serve starts the two programs, says so, and waits to be killed.
func serve(dir string) int {
	if _, err := apiserver.Start(&envtest.Environment{}, dir); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("ready")
	select {}
}

func TestKilled(t *testing.T) {
	dir := t.TempDir()
	if err := apiserver.Binaries(t.Context(), dir, t.Output()); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), assets+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	var said string
	if _, err := fmt.Fscanln(out, &said); err != nil || said != "ready" {
		t.Fatalf("it said %q: %v", said, err)
	}
	programs := children(t, cmd.Process.Pid)
	if len(programs) != 2 {
		t.Fatalf("it has the children %v, want kube-apiserver and etcd", programs)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	err = wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		return len(running(programs)) == 0, nil
	})
	if err != nil {
		t.Errorf("%v run on: %v", running(programs), err)
	}
}

// children lists the processes that a process has started, by ID and name.
func children(t *testing.T, pid int) map[string]string {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, stat := range stats {
		data, _ := os.ReadFile(stat) // none: it ended meanwhile
		name, rest, _ := strings.Cut(string(data), ") ")
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(pid) {
			id, name, _ := strings.Cut(name, " (")
			found[id] = name
		}
	}
	return found
}

// running lists those of the processes that haven't ended.
func running(processes map[string]string) []string {
	var left []string
	for id, name := range processes {
		data, _ := os.ReadFile("/proc/" + id + "/stat")
		if _, state, _ := strings.Cut(string(data), ") "); state != "" && !strings.HasPrefix(state, "Z") {
			left = append(left, name+" "+id)
		}
	}
	return left
}
