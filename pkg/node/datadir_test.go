package node

import (
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
)

// TestDataDirChanged: a plugin with another data directory doesn't start while
// claims are prepared: its journal knows nothing of them.
func TestDataDirChanged(t *testing.T) {
	dir := t.TempDir()
	prepared := func(hook string) *cdi.Specs {
		h, _ := newHardware(t)
		h.specs = cdi.New(cdi.Config{Dir: dir, HookPath: hook, Host: h.host})
		runHardware(t, h)
		<-h.first
		device, _, err := h.facts.Device(firstDevice(t))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := h.specs.Write("claim-1", map[gpu.DeviceName]gpu.Prepared{firstDevice(t): {Device: device}}); err != nil {
			t.Fatal(err)
		}
		return h.specs
	}
	const before, now = "/var/lib/before", "/var/lib/now"
	specs := prepared(before + "/" + hookFile)
	if err := checkDataDir(specs, before, before+"/"+hookFile); err != nil {
		t.Errorf("with the same directory: %v", err)
	}
	err := checkDataDir(specs, now, now+"/"+hookFile)
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
