package journal_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/tessera-dra/tessera/pkg/files/filestest"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// TestPowerLossInANewDirectory checks that records survive in directories that are
// new, also in those that a plugin has made that was killed before it synced them.
func TestPowerLossInANewDirectory(t *testing.T) {
	const uuid = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	for name, made := range map[string]string{"none there": "", "the journal's there": "data/claims", "all there": "data/claims/health"} {
		t.Run(name, func(t *testing.T) {
			d := filestest.New(t, t.TempDir(), filestest.Tree{"data": {Mode: fs.ModeDir | 0o755}})
			if err := os.MkdirAll(filepath.Join(d.Dir, made), 0o700); err != nil {
				t.Fatal(err)
			}
			j, err := journal.Open(filepath.Join(d.Dir, "data", "claims"), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer j.Close()
			if err := j.PutHealth(holding.Health{GPU: uuid}); err != nil {
				t.Fatal(err)
			}
			left := d.Cut(filestest.Losses()[0])
			if path := "data/claims/health/" + string(uuid) + ".json"; left[path].Data == "" {
				t.Errorf("%s is lost; left: %v", path, left)
			}
		})
	}
}
