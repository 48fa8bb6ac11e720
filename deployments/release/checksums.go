package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// writeChecksums writes SHA256SUMS for the files of dir, as sha256sum --check
// reads it.
func writeChecksums(dir string) error {
	files, err := os.ReadDir(dir) // sorted by name
	if err != nil {
		return fmt.Errorf("list the release's files: %w", err)
	}
	var text strings.Builder
	for _, file := range files {
		sum, err := checksum(filepath.Join(dir, file.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&text, "%s  %s\n", sum, file.Name())
	}
	if err := os.WriteFile(filepath.Join(dir, "SHA256SUMS"), []byte(text.String()), 0o644); err != nil {
		return fmt.Errorf("write the checksums: %w", err)
	}
	return nil
}

func checksum(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", fmt.Errorf("checksum: %w", err)
	}
	hash := sha256.New()
	_, err = io.Copy(hash, f)
	if err := errors.Join(err, f.Close()); err != nil {
		return "", fmt.Errorf("checksum of %s: %w", file, err)
	}
	return fmt.Sprintf("%x", hash.Sum(nil)), nil
}
