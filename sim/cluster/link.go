package cluster

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// linkAll puts every file of from into dir, as a hard link where the file
// system allows it and as a copy elsewhere. Files already the same stay.
func linkAll(from, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", dir, err)
	}
	for _, name := range entryNames(from) {
		if err := linkFile(filepath.Join(from, name), filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("put %s into %s: %w", name, dir, err)
		}
	}
	return nil
}

func linkFile(source, target string) error {
	old, err := os.Lstat(target)
	info, sourceErr := os.Lstat(source)
	if sourceErr != nil {
		return sourceErr
	}
	if err == nil {
		if os.SameFile(old, info) {
			return nil
		}
		if err := os.Remove(target); err != nil {
			return err
		}
	}
	if info.Mode()&os.ModeSymlink != 0 {
		name, err := os.Readlink(source)
		if err != nil {
			return err
		}
		return os.Symlink(name, target)
	}
	if err := os.Link(source, target); err == nil {
		return nil
	}
	return copyFile(source, target, info.Mode())
}

func copyFile(source, target string, mode os.FileMode) error {
	in, err := os.Open(source)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(target, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode.Perm())
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		_ = out.Close()
		return err
	}
	return out.Close()
}
