package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/files"
)

// encode sets the lowest version that has all used fields, so that older
// container runtimes can read the specification too.
func encode(spec *specs.Spec) ([]byte, error) {
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("version of CDI specification %s: %w", spec.Kind, err)
	}
	spec.Version = version
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("encode CDI specification %s: %w", spec.Kind, err)
	}
	return append(data, '\n'), nil
}

// writeSpec writes the file unless it already has this content: each change
// makes container runtimes read the directory again.
func writeSpec(path string, spec *specs.Spec) error {
	data, err := encode(spec)
	if err != nil {
		return err
	}
	return writeFile(path, data)
}

func writeFile(path string, data []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("create CDI directory: %w", err)
	}
	tmp, err := os.CreateTemp(dir, filepath.Base(path)+".*"+tempSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		// dir exists, because MkdirAll succeeded, but no file can be created in it.
		return fmt.Errorf("write CDI specification: %w: the host's directory was removed while it was mounted here; restart the plugin's pod, and empty the directory instead of removing it", err)
	}
	if err != nil {
		return fmt.Errorf("write CDI specification: %w", err)
	}
	err = files.Replace(path, tmp, func(f *os.File) error {
		_, err := f.Write(data)
		return errors.Join(err, f.Chmod(0o644))
	})
	if err != nil {
		return fmt.Errorf("write CDI specification %s: %w", path, err)
	}
	return nil
}
