package sharing_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// TestUnreadable records keep what they may need.
func TestUnreadable(t *testing.T) {
	for name, contents := range map[string]string{"nothing can be made out": "{", "the device can be": `"device":"gpu-980fb007-mps4-0","gpu":"` + string(gpu0) + `","request":"r"`} {
		t.Run(name, func(t *testing.T) {
			m := newMachine()
			n := newNode(t, m)
			n.prepare(t, claim("a", share(gpu0, 0)))
			want := is{
				Daemons: []mps.Daemon{{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}}},
				Modes:   exclusive0, Settings: []holding.Settings{changedMode(gpu0)},
			}
			n.end()
			if err := os.WriteFile(filepath.Join(n.dir, "a.json"), []byte(contents), 0o600); err != nil {
				t.Fatal(err)
			}
			n = n.restart(t, "boot-1")
			n.check(t, want)
			u := n.journal.Claims().Unreadable()
			if len(u) != 1 {
				t.Fatalf("unreadable: %v", u)
			}
			n.journal.AdvancePhase("a", holding.Leaving)
			if err := n.Leave(t.Context(), u[0].Record); err != nil {
				t.Error(err)
			}
			if err := n.journal.Delete("a"); err != nil {
				t.Error(err)
			}
			n.recover(t) // at the latest
			n.check(t, is{})
		})
	}
}

// TestUnreadableLeaves checks that a claim whose record can't be read can't leave while
// the supervisor, which has to stop its daemon, is unavailable.
func TestUnreadableLeaves(t *testing.T) {
	m := newMachine()
	n := newNode(t, m)
	g := ofPartition(gpu0, 0)
	n.prepare(t, claim("a", g))
	n.end()
	if err := os.WriteFile(filepath.Join(n.dir, "a.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.set(func() { m.away = true })
	n = start(t, m, n.dir, "boot-1", nil)
	n.journal.AdvancePhase("a", holding.Leaving)
	r := claim("a", g) // by the device's name; not which boot it is of
	if err := n.Leave(t.Context(), r); !errors.Is(err, mps.ErrUnavailable) {
		t.Errorf("leave: got %v", err)
	}
	m.set(func() { m.away = false })
	if err := n.Leave(t.Context(), r); err != nil {
		t.Error(err)
	}
	n.check(t, is{})
}

// TestUnreadableSettings checks that unreadable settings count as a driver's defaults.
func TestUnreadableSettings(t *testing.T) {
	m := newMachine()
	n := newNode(t, m)
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.prepare(t, claim("b", wholeSlice(gpu1, "Long")))
	n.end()
	for _, uuid := range []gpu.UUID{gpu0, gpu1} {
		if err := os.WriteFile(filepath.Join(n.dir, "settings", string(uuid)+".json"), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n = n.restart(t, "boot-1")
	n.unprepare(t, "a")
	n.unprepare(t, "b")
	n.check(t, is{})
	if got := n.journal.UnreadableSettings(); len(got) > 0 {
		t.Errorf("unreadable: %v", got)
	}
}
