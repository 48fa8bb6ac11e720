package supervisor

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/tessera-dra/tessera/pkg/files"
	"github.com/tessera-dra/tessera/pkg/mps"
)

// writeRecord replaces the file. It isn't synced: after the machine went down
// there is neither the file nor the daemon.
func writeRecord(path string, r mps.Record) error {
	data, err := r.Encode()
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	temp, err := os.CreateTemp(filepath.Dir(path), mps.RecordFile+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = temp.Write(data)
	if err := files.Replace(path, temp, err); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
