package partition_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

func TestUnreadableRecord(t *testing.T) {
	n := newNode(t, newHardware())
	p, other := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb", 6)
	first := n.prepare(t, p)
	n.journal.Close()
	path := filepath.Join(n.dir, "gpus", string(gpu0)+".json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data[:len(data)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	n = start(t, n.hw, n.dir, "boot-1", nil)
	wantError(t, n.Recover(t.Context()), path[:len(path)-5]+".corrupt", "-mig 0")
	if got := n.Conditions(); len(got[gpu0]) != 1 || got[gpu0][0].Type != gpu.StateUnreadable {
		t.Errorf("conditions: %v", got)
	}
	if again, err := n.Ensure(t.Context(), p); err != nil || again != first {
		t.Errorf("what is there can be used: got %v, %v", again, err)
	}
	n.hold(t, other)
	_, err = n.Ensure(t.Context(), other)
	wantError(t, err, "can't be read")
	wantError(t, n.ClearMIG(t.Context(), gpu0), "can't be read")
	n.unprepare(t, p)
	n.checkThere(t, gpu0, true, p)
	n.hw.reboot() // or an administrator's hand
	n.prepare(t, other)
	n.checkThere(t, gpu0, true, other)
	if got := n.Conditions(); len(got) > 0 {
		t.Errorf("conditions after: %v", got)
	}
}

// TestUnreadableRecordOfOthersMode: where the mode can't be ours, as before
// Hopper, it needn't be switched off for the record to be settled.
func TestUnreadableRecordOfOthersMode(t *testing.T) {
	n := newNode(t, newHardware())
	n.hw.outside(gpu0, func(g *simulated) { g.mig.Enabled, g.mig.Pending, g.mig.Switchable = true, true, false })
	p, other := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb", 6)
	n.prepare(t, p)
	n.journal.Close()
	if err := os.WriteFile(filepath.Join(n.dir, "gpus", string(gpu0)+".json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	n = start(t, n.hw, n.dir, "boot-1", nil)
	wantError(t, n.Recover(t.Context()), "can't be read")
	n.unprepare(t, p)
	n.hw.outside(gpu0, func(g *simulated) { g.mig.Instances = nil })
	n.prepare(t, other)
	n.checkThere(t, gpu0, true, other)
}

// TestUnreadableClaim damages a claim's file: its possible partitions stay, and
// are destroyed some time after the claim was unprepared.
func TestUnreadableClaim(t *testing.T) {
	p := part(gpu0, "1g.18gb", 0)
	for name, damage := range map[string]func([]byte) []byte{
		"cut off": func(data []byte) []byte { return data[:10] },
		"changed": func(data []byte) []byte { return []byte(strings.Replace(string(data), "default", "defaulT", 1)) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, newHardware())
				n.prepare(t, p)
				n.journal.Close()
				path := filepath.Join(n.dir, uid(p)+".json")
				data, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, damage(data), 0o600); err != nil {
					t.Fatal(err)
				}
				n = n.restart(t, "boot-1")
				ctx, stop := context.WithCancel(t.Context())
				done := make(chan struct{})
				go func() { n.Run(ctx); close(done) }()
				time.Sleep(time.Hour)
				n.checkThere(t, gpu0, true, p)
				if looks := n.hw.count("look"); looks > 100 {
					t.Errorf("%d looks in an hour", looks)
				}
				if err := n.journal.Delete(uid(p)); err != nil { // unprepared
					t.Fatal(err)
				}
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				n.checkThere(t, gpu0, false)
				stop()
				<-done
			})
		})
	}
}
