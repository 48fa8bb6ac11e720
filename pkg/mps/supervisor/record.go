package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

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
	if err = errors.Join(err, temp.Close()); err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, os.Remove(temp.Name())))
	}
	return nil
}

// bootID of the running kernel.
func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot ID: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
