package contents

import (
	"context"
	"debug/elf"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/deployments/container/image"
)

// glibcLibraries are what the plugin and the NVIDIA libraries that it opens
// need, the C library first. All but libgcc_s are part of glibc; some are empty
// there since 2.34, but still asked for by name.
func glibcLibraries() []string {
	return []string{"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libresolv.so.2", "libgcc_s.so.1"}
}

// glibc lists the loader and the libraries for the programs that are built,
// each at a path where the loader looks. A program that needs another library
// is an error.
func glibc(ctx context.Context, on platform, built []string) ([]image.Entry, error) {
	var loader string
	for _, file := range built {
		l, err := inspect(file)
		if err != nil {
			return nil, err
		}
		if l != "" {
			loader = l
		}
	}
	if loader == "" {
		return nil, fmt.Errorf("none of the programs is dynamically linked, but the kubelet plugin must be")
	}
	source, err := library(ctx, on, filepath.Base(loader))
	if err != nil {
		return nil, err
	}
	entries := []image.Entry{{Path: loader, Source: source}}
	var dir string
	for _, name := range glibcLibraries() {
		found, err := library(ctx, on, name)
		if err != nil {
			return nil, err
		}
		if dir == "" {
			dir = searched(on, found)
		}
		entries = append(entries, image.Entry{Path: filepath.Join(dir, name), Source: found})
	}
	return entries, nil
}

// searched returns the directory where the loader looks, given where the C
// library was found. Of this machine's that is the same place, which differs
// between distributions; a cross compiler's is known to be Debian's.
func searched(on platform, found string) string {
	if on.native() {
		return filepath.Dir(found)
	}
	return filepath.Join("/lib", on.triple)
}

// inspect returns the loader that an ELF file asks for, "" for a static program
// or a library, and refuses needs that the image won't meet.
func inspect(file string) (loader string, err error) {
	f, err := elf.Open(file)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", file, err)
	}
	defer f.Close()
	needed, err := f.ImportedLibraries()
	if err != nil {
		return "", fmt.Errorf("read what %s needs: %w", file, err)
	}
	for _, name := range needed {
		if !slices.Contains(glibcLibraries(), name) && !strings.HasPrefix(name, "ld-linux") {
			return "", fmt.Errorf("%s needs %s, which the image doesn't have", filepath.Base(file), name)
		}
	}
	for _, segment := range f.Progs {
		if segment.Type == elf.PT_INTERP {
			name, err := io.ReadAll(segment.Open())
			if err != nil {
				return "", fmt.Errorf("read the loader's name in %s: %w", file, err)
			}
			return strings.TrimRight(string(name), "\x00"), nil
		}
	}
	return "", nil
}

// library finds one of glibc's files where the C compiler links from.
func library(ctx context.Context, on platform, name string) (string, error) {
	out, err := exec.CommandContext(ctx, on.compiler(), "-print-file-name="+name).Output()
	if err != nil {
		return "", fmt.Errorf("ask the C compiler for %s: %w (%s)", name, err, on.install())
	}
	found := strings.TrimSpace(string(out))
	if !filepath.IsAbs(found) {
		return "", fmt.Errorf("the C compiler %s knows no %s (%s)", on.compiler(), name, on.install())
	}
	return filepath.Clean(found), nil
}
