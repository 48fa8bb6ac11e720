package node

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// TestDataDirChanged: a plugin with another data directory than that of the CDI
// specifications on disk doesn't start while
// claims are prepared: its journal knows nothing of them.
func TestDataDirChanged(t *testing.T) {
	before, now := filepath.Join(t.TempDir(), "before"), filepath.Join(t.TempDir(), "now")
	lock := func(path string) *datadir.Dir {
		d, err := datadir.Lock(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return d
	}
	host, dir := driverroot.NewHost(installed.Host), t.TempDir()
	first := lock(before)
	hook, _, err := first.InstallHook("/proc/self/exe", driverroot.NewHost("/"))
	if err != nil {
		t.Fatal(err)
	}
	marks, err := containers.New(first.Marks(), host)
	if err != nil {
		t.Fatal(err)
	}
	root, session, err := driver.Open(host, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	specs := cdi.New(cdi.Config{Dir: dir, HookPath: hook, Host: host, Mark: marks.Mark})
	gpus, err := session.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = specs.SetDriver(nil) })
	if err := specs.SetDriver(&cdi.Driver{
		Root: root.Path, DevRoot: root.DevRoot, ProcRoot: root.ProcRoot, LibraryDirs: root.LibraryDirs, GPUs: gpus, Session: session,
	}); err != nil {
		t.Fatal(err)
	}
	whole := holding.New(installed.Names()[0], gpu.Whole{GPU: gpus[0].UUID})
	if _, err := specs.Write(holding.Realized{Record: holding.Record{ClaimUID: "claim-1", Holdings: []holding.Holding{whole}}}); err != nil {
		t.Fatal(err)
	}
	other := lock(now)
	err = other.Check(specs)
	if err == nil || !strings.Contains(err.Error(), before+",") || !strings.Contains(err.Error(), now) {
		t.Errorf("with another directory: %v, want a refusal that names both directories", err)
	}
	if err := specs.Remove("claim-1"); err != nil {
		t.Fatal(err)
	}
	if err := other.Check(specs); err != nil {
		t.Errorf("with another directory, and nothing prepared: %v", err)
	}
}
