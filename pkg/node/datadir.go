package node

import (
	"fmt"
	"path/filepath"

	"github.com/tessera-dra/tessera/pkg/node/cdi"
)

// checkDataDir returns an error if claims were prepared by a plugin with another
// data directory: that one's journal says who has which GPU and which partitions are
// ours. The common CDI specification names the hook program, and so that directory.
// After a reboot, specifications, partitions and prepared claims are gone.
func checkDataDir(specs *cdi.Specs, dataDir, hook string) error {
	claims, err := specs.Claims()
	if err != nil || len(claims) == 0 {
		return nil //nolint:nilerr // specifications that can't be read are in no container's way, nor removed
	}
	before, err := specs.HookInUse()
	if err != nil || before == "" || filepath.Clean(before) == filepath.Clean(hook) {
		return nil //nolint:nilerr // as above
	}
	was := filepath.Dir(filepath.Dir(before)) // see hookFile
	return fmt.Errorf("--data-dir: %d claims were prepared with the journal in %s, and %s knows nothing of them: start with that directory again (chart value node.dataDir), or drain the node before it is changed",
		len(claims), was, dataDir)
}
