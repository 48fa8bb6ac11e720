package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Platform is one architecture's image of a multi-platform index.
type Platform struct {
	Architecture string // as Go names it
	Entries      []Entry
	Config       v1.Config
}

// Index identifies a written multi-platform index.
type Index struct {
	// Digest is the index's, by which a registry serves all platforms.
	Digest string
	// Images has the digest of each platform's image, by architecture.
	Images map[string]string
}

// WriteIndex makes an archive in the OCI image layout at path: an index named
// reference of an image for each platform, made at the time created. Layers are
// compressed, as registries serve them. A file at path is replaced.
func WriteIndex(path, reference string, created time.Time, platforms []Platform) (Index, error) {
	tag, err := name.NewTag(reference)
	if err != nil {
		return Index{}, fmt.Errorf("image name: %w", err)
	}
	written := Index{Images: map[string]string{}}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range platforms {
		img, err := p.build(created)
		if err != nil {
			return Index{}, fmt.Errorf("image %s for %s: %w", reference, p.Architecture, err)
		}
		digest, err := img.Digest()
		if err != nil {
			return Index{}, fmt.Errorf("digest of image %s for %s: %w", reference, p.Architecture, err)
		}
		written.Images[p.Architecture] = digest.String()
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        img,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: p.Architecture}},
		})
	}
	digest, err := index.Digest()
	if err != nil {
		return Index{}, fmt.Errorf("digest of index %s: %w", reference, err)
	}
	written.Digest = digest.String()
	if err := writeLayout(path, tag, index); err != nil {
		return Index{}, fmt.Errorf("archive of index %s: %w", reference, err)
	}
	return written, nil
}

// build makes the platform's image in OCI's media types.
func (p Platform) build(created time.Time) (v1.Image, error) {
	content, err := layerBytes(p.Entries)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content)), nil
	}, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return nil, fmt.Errorf("compress the layer: %w", err)
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return nil, fmt.Errorf("add the layer: %w", err)
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("read the config: %w", err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", p.Architecture, p.Config
	file.Created = v1.Time{Time: created.UTC()}
	return mutate.ConfigFile(img, file)
}

// writeLayout writes the index as a directory, the form that the library supports,
// and packs the directory into the archive.
func writeLayout(archive string, tag name.Tag, index v1.ImageIndex) (err error) {
	if err := os.MkdirAll(filepath.Dir(archive), 0o755); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(archive), "layout-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	root, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	// The first name is the specification's, the second one containerd's and
	// Docker's, who take it for the whole name.
	err = root.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": tag.TagStr(),
		"io.containerd.image.name":          tag.Name(),
	}))
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(archive), filepath.Base(archive)+".*")
	if err != nil {
		return err
	}
	err = errors.Join(packDirectory(f, dir), f.Chmod(0o644), f.Close())
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return os.Rename(f.Name(), archive)
}

// packDirectory writes the files of dir, sorted by path, owned by root and made
// at the epoch.
func packDirectory(to io.Writer, dir string) error {
	archive := tar.NewWriter(to)
	err := filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || file == dir {
			return err
		}
		path, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		entry := Entry{Path: "/" + filepath.ToSlash(path)}
		if !d.IsDir() {
			entry.Source, entry.Mode = file, 0o644
		}
		return entry.write(archive)
	})
	return errors.Join(err, archive.Close())
}
