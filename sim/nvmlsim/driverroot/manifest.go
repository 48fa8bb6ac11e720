package driverroot

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const manifestFile = "var/lib/nvmlsim/manifest"

// manifest is the set of paths, relative to the root, that Install created.
type manifest map[string]bool

func (m manifest) add(path string) { m[path] = true }

// readManifest returns an empty manifest if there is none.
func readManifest(root string) (manifest, error) {
	path := filepath.Join(root, manifestFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return manifest{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	m := manifest{}
	for line := range strings.Lines(string(b)) {
		p := strings.TrimSuffix(line, "\n")
		if !filepath.IsLocal(p) {
			return nil, fmt.Errorf("manifest %s: %q leads out of the driver root", path, p)
		}
		m.add(p)
	}
	return m, nil
}

func (m manifest) write(root string) error {
	var b bytes.Buffer
	for _, p := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintln(&b, p)
	}
	if err := replace(filepath.Join(root, manifestFile), b.Bytes(), 0o644); err != nil {
		return fmt.Errorf("write manifest: %w", err)
	}
	return nil
}

// replace writes a file atomically, unless it has the content already.
func replace(path string, content []byte, mode fs.FileMode) error {
	if fi, err := os.Lstat(path); err == nil && fi.Mode() == mode {
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
			return nil
		}
	}
	return swap(path, func(tmp string) error {
		if err := os.WriteFile(tmp, content, mode); err != nil {
			return err
		}
		return os.Chmod(tmp, mode)
	})
}

// swap creates an object under a temporary name and renames it to path.
func swap(path string, create func(tmp string) error) error {
	tmp := filepath.Join(filepath.Dir(path), ".nvmlsim-"+filepath.Base(path))
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := create(tmp); err != nil {
		_ = os.Remove(tmp) // report the first error
		return err
	}
	return os.Rename(tmp, path)
}
