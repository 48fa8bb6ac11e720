package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/tessera-dra/tessera/pkg/mps"
)

func TestStopDoesNotWaitForClients(t *testing.T) {
	for _, quirk := range []string{"clients", "deaf"} {
		t.Run(quirk, func(t *testing.T) {
			n := newNode(t)
			n.start("")
			n.ensure(one("a"))
			n.put(quirk, "")
			if _, err := n.Stop(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
			n.gone("a")
		})
	}
}

// A daemon that misses the first request to end is asked again, not killed.
func TestDaemonThatMissesItsEnd(t *testing.T) {
	n := newNode(t)
	n.start("")
	n.ensure(one("a"))
	n.serving()
	n.put("distracted", "")
	if _, err := n.Stop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	n.gone("a")
	if _, err := os.Stat(filepath.Join(n.cfg.DriverRoot, "ended")); err != nil {
		t.Errorf("the daemon didn't end by itself: %v", err)
	}
}

// A daemon can be stopped even if its files were changed or removed.
func TestStopWithoutItsFiles(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, at place){
		"no directory": func(t *testing.T, at place) {
			if err := errors.Join(at.unmountShm(), os.RemoveAll(string(at))); err != nil {
				t.Fatal(err)
			}
		},
		"the record can't be written": func(t *testing.T, at place) {
			if err := os.Remove(at.record()); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(at.record()+"/x", 0o755); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.start("")
			first := n.ensure(one("a"))
			start, _ := startOf(first.PID)
			damage(t, n.at("a"))
			if _, err := n.Stop(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
			if alive(first.PID, start) {
				t.Error("the daemon still runs")
			}
			n.gone("a")
		})
	}
}

// Only a caller that wants the next daemon waits for the end of the previous
// one, and a crash doesn't prevent that end.
func TestBeginStop(t *testing.T) {
	n := newNode(t)
	n.put("clients", "")
	n.start("")
	before := n.ensure(one("a"))
	if ended, _, err := n.BeginStop(t.Context(), "a"); ended || err != nil {
		t.Fatalf("a daemon with clients: ended %t, %v", ended, err)
	}
	if listed := n.list(); len(listed) != 1 || listed[0].Phase != mps.Ending {
		t.Errorf("listed: %+v", listed)
	}
	after := n.ensure(one("a"))
	if after.PID == before.PID || after.Restarts != 0 {
		t.Errorf("%+v, before %+v", after, before)
	}
	if _, _, err := n.BeginStop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	n.kill()
	n.drop("clients")
	n.start("")
	n.gone("a")
	if listed := n.list(); len(listed) > 0 {
		t.Errorf("listed: %+v", listed)
	}
	if ended, _, err := n.BeginStop(t.Context(), "a"); !ended || err != nil {
		t.Errorf("a daemon that isn't there: ended %t, %v", ended, err)
	}
}
