package supervisor

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/mps"
)

func TestSupervisorLeavesDaemonsRunning(t *testing.T) {
	n := newNode(t)
	n.start("")
	before := n.ensure(one("a"))
	if err := n.running.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	n.crashed()
	if _, err := n.List(t.Context()); !errors.Is(err, mps.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
	n.start("")
	if diff := cmp.Diff([]mps.State{before}, n.list(), anyRevision); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
	// It is watched again.
	if err := unix.Kill(before.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.until(func(states []mps.State) bool {
		return len(states) == 1 && states[0].Phase == mps.Running && states[0].Restarts == 1
	})
}

// A driver whose files aren't there for a moment is no reason to end what runs.
func TestDriverAwayWhenTheSupervisorStarts(t *testing.T) {
	n := newNode(t)
	n.start("")
	first := n.ensure(one("a"))
	n.kill()
	n.drop("bin/" + program)
	n.start("")
	if states := n.list(); len(states) != 1 || states[0].PID != first.PID || states[0].Phase != mps.Running {
		t.Errorf("listed: %+v", states)
	}
	if again := n.ensure(one("a")); again.PID != first.PID {
		t.Errorf("restarted: %+v", again)
	}
	n.link(plain, "bin/"+program)
	if _, err := n.Stop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	n.gone("a")
}

func TestDaemonDiesWithoutSupervisor(t *testing.T) {
	n := newNode(t)
	n.start("")
	before := n.ensure(one("a"))
	n.kill()
	start, _ := startOf(before.PID)
	if err := kill(t.Context(), []process{{before.PID, start}}); err != nil {
		t.Fatal(err)
	}
	n.start("")
	after := n.until(func(states []mps.State) bool { return len(states) == 1 && states[0].Phase == mps.Running })[0]
	if after.Restarts != 1 || after.PID == before.PID {
		t.Errorf("%+v", after)
	}
	if got := n.ask("a", "get_default_device_pinned_mem_limit 0"); got != "3G\n" {
		t.Errorf("limit %q", got)
	}
}

func TestUnreadableRecord(t *testing.T) {
	for name, damage := range map[string]func(*testing.T, string){
		"torn": func(t *testing.T, path string) {
			if err := os.Truncate(path, 20); err != nil {
				t.Fatal(err)
			}
		},
		"missing": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.start("")
			before, other := n.ensure(one("a")), n.ensure(one("b"))
			n.kill()
			damage(t, n.at("a").record())
			n.start("")
			if states := n.list(); len(states) != 1 || states[0].PID != other.PID {
				t.Errorf("listed: %+v", states)
			}
			if alive(before.PID, before2(before.PID)) {
				t.Error("the unknown daemon still runs")
			}
			if _, err := os.Stat(n.at("a").aside()); (err == nil) != (name == "torn") {
				t.Errorf("the renamed record: %v", err)
			}
			n.ensure(one("a"))
			if _, err := n.Stop(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
			n.gone("a")
		})
	}
}

func before2(pid int) uint64 { start, _ := startOf(pid); return start }

// A supervisor that restarts doesn't make prepares in progress fail.
func TestEnsureWaitsForSupervisor(t *testing.T) {
	n := newNode(t)
	begun, done := make(chan struct{}), make(chan error, 1)
	go func() {
		close(begun)
		_, err := n.Ensure(t.Context(), one("a"))
		done <- err
	}()
	<-begun
	n.start("")
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestSecondSupervisorWaits(t *testing.T) {
	n := newNode(t)
	n.start("")
	s, err := New(n.cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := s.Run(ctx); err == nil || !strings.Contains(err.Error(), "another supervisor") {
		t.Errorf("got %v", err)
	}
	n.ensure(one("a"))
}

// A daemon whose process is the recorded one is adopted, however slow it is: its
// clients compute. It gets its limits when it answers again.
func TestAdoptsADaemonThatDoesNotAnswer(t *testing.T) {
	n := newNode(t)
	n.start("")
	n.ensure(one("a"))
	before := n.serving()[0]
	n.kill()
	if err := unix.Kill(before.PID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	n.start("")
	if adopted := n.list(); len(adopted) != 1 || adopted[0].PID != before.PID || adopted[0].Phase != mps.Running {
		t.Fatalf("adopted: %+v, want daemon %d", adopted, before.PID)
	}
	stuck := n.until(func(all []mps.State) bool { return all[0].Trouble != "" })[0]
	if !strings.Contains(stuck.Trouble, "does not answer") || stuck.PID != before.PID || stuck.Restarts != 0 {
		t.Errorf("a daemon that doesn't answer: %+v", stuck)
	}
	if err := unix.Kill(before.PID, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if after := n.serving()[0]; after.PID != before.PID || after.ServerPID != before.ServerPID || after.Restarts != 0 {
		t.Errorf("%+v, before %+v", after, before)
	}
}

// The same holds for one that answers what the supervisor doesn't understand.
func TestAdoptsADaemonThatTakesNoLimits(t *testing.T) {
	n := newNode(t)
	n.start("")
	n.ensure(one("a"))
	before := n.serving()[0]
	n.kill()
	n.put("garbled", "")
	n.start("")
	odd := n.until(func(all []mps.State) bool { return len(all) == 1 && all[0].Trouble != "" })[0]
	if !strings.Contains(odd.Trouble, "didn't take the limits") || odd.PID != before.PID || odd.Restarts != 0 {
		t.Errorf("%+v, before %+v", odd, before)
	}
	if _, ok := startOf(before.ServerPID); !ok {
		t.Error("the server was killed, and its clients with it")
	}
	n.drop("garbled")
	if after := n.serving()[0]; after.PID != before.PID || after.ServerPID != before.ServerPID {
		t.Errorf("%+v, before %+v", after, before)
	}
}
