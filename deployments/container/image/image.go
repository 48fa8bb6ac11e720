// Package image writes container images without Docker, a registry or root: a
// list of files goes in, an archive comes out that `ctr images import`,
// `docker load` and `localcluster load-image` take.
//
// An image has one layer, and equal input gives equal bytes: no clock, user or
// file mode of the machine goes into it. Archives are rewritten only when their
// content changes. Layers are not compressed: these archives travel from one
// directory of a machine to another.
//
// It serves the image builders of this repository (deployments/container/build
// and the local cluster); the product does not import it.
package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Entry is one file, link or directory of an image, owned by root. Directories
// above it are made with mode 0755.
type Entry struct {
	// Path in the image, absolute and clean.
	Path string
	// Source on this machine whose content is copied, links followed. Empty for
	// a link or a directory.
	Source string
	// Link is the target of a symbolic link.
	Link string
	// Mode of a file or directory; 0 means 0755.
	Mode os.FileMode
}

// Write makes the archive of an image named reference ("tessera:0.1.0") at
// path, atomically, unless the file there already has that content. It says
// whether it wrote. config's platform, history and layers are set here.
func Write(path, reference string, entries []Entry, config v1.Config) (written bool, err error) {
	tag, err := name.NewTag(reference)
	if err != nil {
		return false, fmt.Errorf("image name: %w", err)
	}
	img, err := build(entries, config)
	if err != nil {
		return false, fmt.Errorf("image %s: %w", reference, err)
	}
	key, err := fingerprint(img, reference)
	if err != nil {
		return false, fmt.Errorf("image %s: %w", reference, err)
	}
	if current(path, key) {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return false, fmt.Errorf("image archive: %w", err)
	}
	if err := replace(path, tag, img); err != nil {
		return false, fmt.Errorf("image archive: %w", err)
	}
	if err := os.WriteFile(path+".key", key, 0o644); err != nil {
		return false, fmt.Errorf("image archive's key: %w", err)
	}
	return true, nil
}

func build(entries []Entry, config v1.Config) (v1.Image, error) {
	layer, err := layerBytes(entries)
	if err != nil {
		return nil, err
	}
	img, err := mutate.AppendLayers(empty.Image, static.NewLayer(layer, types.DockerUncompressedLayer))
	if err != nil {
		return nil, fmt.Errorf("add the layer: %w", err)
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("read the config: %w", err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", runtime.GOARCH, config
	return mutate.ConfigFile(img, file)
}

func layerBytes(entries []Entry) ([]byte, error) {
	entries = slices.Clone(entries)
	slices.SortFunc(entries, func(a, b Entry) int { return strings.Compare(a.Path, b.Path) })
	var buffer bytes.Buffer
	archive := tar.NewWriter(&buffer)
	seen := map[string]bool{"/": true}
	for _, e := range entries {
		if !path.IsAbs(e.Path) || path.Clean(e.Path) != e.Path {
			return nil, fmt.Errorf("path %q is not absolute and clean", e.Path)
		}
		if seen[e.Path] {
			return nil, fmt.Errorf("path %s is given twice, or is the directory of an entry before", e.Path)
		}
		if err := addParents(archive, e.Path, seen); err != nil {
			return nil, err
		}
		seen[e.Path] = true
		if err := e.write(archive); err != nil {
			return nil, fmt.Errorf("add %s: %w", e.Path, err)
		}
	}
	if err := archive.Close(); err != nil {
		return nil, fmt.Errorf("end the layer: %w", err)
	}
	return buffer.Bytes(), nil
}

func addParents(archive *tar.Writer, of string, seen map[string]bool) error {
	dir := path.Dir(of)
	if seen[dir] {
		return nil
	}
	if err := addParents(archive, dir, seen); err != nil {
		return err
	}
	seen[dir] = true
	return Entry{Path: dir}.write(archive)
}

func (e Entry) write(archive *tar.Writer) error {
	mode := e.Mode
	if mode == 0 {
		mode = 0o755
	}
	header := tar.Header{Name: strings.TrimPrefix(e.Path, "/"), Mode: unixMode(mode), Format: tar.FormatPAX}
	switch {
	case e.Link != "":
		header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, e.Link, 0o777
	case e.Source == "":
		header.Typeflag, header.Name = tar.TypeDir, header.Name+"/"
	default:
		return e.copyFile(archive, header)
	}
	return archive.WriteHeader(&header)
}

func (e Entry) copyFile(archive *tar.Writer, header tar.Header) error {
	f, err := os.Open(e.Source)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", e.Source)
	}
	header.Typeflag, header.Size = tar.TypeReg, info.Size()
	if err := archive.WriteHeader(&header); err != nil {
		return err
	}
	_, err = io.Copy(archive, f)
	return err
}

// unixMode is mode as tar has it: permission bits, and the sticky bit for
// directories such as /tmp.
func unixMode(mode os.FileMode) int64 {
	bits := int64(mode.Perm())
	if mode&os.ModeSticky != 0 {
		bits |= 0o1000
	}
	return bits
}

// fingerprint identifies an archive's content: the image's digest and name.
func fingerprint(img v1.Image, reference string) ([]byte, error) {
	digest, err := img.Digest()
	if err != nil {
		return nil, fmt.Errorf("digest: %w", err)
	}
	return fmt.Appendf(nil, "%s %s\n", digest, reference), nil
}

// current reports whether the archive is there and was written for key. An
// unreadable key just means that it is written again.
func current(archive string, key []byte) bool {
	if _, err := os.Stat(archive); err != nil {
		return false
	}
	old, err := os.ReadFile(archive + ".key")
	return err == nil && bytes.Equal(old, key)
}

func replace(archive string, tag name.Tag, img v1.Image) error {
	if err := os.RemoveAll(archive + ".key"); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(archive), filepath.Base(archive)+".*")
	if err != nil {
		return err
	}
	err = errors.Join(tarball.Write(tag, img, f), f.Chmod(0o644), f.Close())
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return os.Rename(f.Name(), archive)
}
