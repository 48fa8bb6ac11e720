package healthmonitor

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// TestWhoUsesAGPU checks who keeps a GPU from being reset: also who only looks at it,
// and who may have it.
func TestWhoUsesAGPU(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "torn.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	j, err := journal.Open(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for name, h := range map[string]holding.Holding{
		"whole": {GPU: "GPU-0"}, "part": {GPU: "GPU-0", Partition: holding.Partition{Profile: "1g.10gb", Size: 1}},
		"share": {GPU: "GPU-0", Share: &holding.Part{Count: 2}}, "admin": {GPU: "GPU-0", Admin: true}, "other": {GPU: "GPU-1"},
	} {
		if err := j.Put(holding.Record{ClaimUID: name, Namespace: "default", Name: name, Holdings: []holding.Holding{h}}); err != nil {
			t.Fatal(err)
		}
	}
	m := &Monitor{cfg: Config{Journal: j}}
	got := m.users("GPU-0")
	slices.Sort(got)
	want := []string{"claim default/admin", "claim default/part", "claim default/share", "claim default/whole", "perhaps claim torn, whose journal record can't be read"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("users (-want +got):\n%s", diff)
	}
}

func TestDividedByOthers(t *testing.T) {
	for name, c := range map[string]struct {
		mig  *gpu.MIG
		want bool
	}{
		"no MIG":              {nil, false},
		"mode off":            {&gpu.MIG{Switchable: true}, false},
		"mode on, lasting":    {&gpu.MIG{Enabled: true}, false},
		"mode on, until then": {&gpu.MIG{Enabled: true, Switchable: true}, true},
		"instances":           {&gpu.MIG{Enabled: true, Instances: []gpu.Instance{{}}}, true},
	} {
		if got := dividedByOthers(c.mig); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
