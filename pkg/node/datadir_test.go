package node

import (
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/driver"
)

// TestDataDirChanged: a plugin with another data directory doesn't start while
// claims are prepared: its journal knows nothing of them.
func TestDataDirChanged(t *testing.T) {
	const before, now = "/var/lib/before", "/var/lib/now"
	host, dir := driverroot.NewHost(installed.Host), t.TempDir()
	root, session, err := driver.Open(host, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	specs := cdi.New(cdi.Config{Dir: dir, HookPath: before + "/" + hookFile, Host: host})
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
	whole := gpu.Prepared{Device: gpu.Whole{GPU: gpus[0].UUID}}
	if _, err := specs.Write("claim-1", map[gpu.DeviceName]gpu.Prepared{installed.Names()[0]: whole}); err != nil {
		t.Fatal(err)
	}
	if err := checkDataDir(specs, before, before+"/"+hookFile); err != nil {
		t.Errorf("with the same directory: %v", err)
	}
	err = checkDataDir(specs, now, now+"/"+hookFile)
	if err == nil || !strings.Contains(err.Error(), "--data-dir: ") || !strings.Contains(err.Error(), before+",") || !strings.Contains(err.Error(), now) {
		t.Errorf("with another directory: %v, want a refusal that names the flag and both directories", err)
	}
	if err := specs.Remove("claim-1"); err != nil {
		t.Fatal(err)
	}
	if err := checkDataDir(specs, now, now+"/"+hookFile); err != nil {
		t.Errorf("with another directory, and nothing prepared: %v", err)
	}
}
