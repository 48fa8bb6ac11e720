package image

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// indexOf writes an index of two platforms. The machine's side of the files
// (directory, mode, times, order) differs with each dir.
func indexOf(t *testing.T, dir string, mode os.FileMode) (archive string, index Index) {
	t.Helper()
	program := func(arch string) Entry {
		return Entry{Path: "/usr/bin/program", Source: writeFile(t, dir, arch, "program for "+arch, mode)}
	}
	config := v1.Config{Env: []string{"PATH=/usr/bin"}}
	archive = filepath.Join(dir, "out", "image.tar")
	index, err := WriteIndex(archive, reference, time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC), []Platform{
		{"amd64", []Entry{program("amd64"), {Path: "/tmp"}}, config},
		{"arm64", []Entry{{Path: "/tmp"}, program("arm64")}, config},
	})
	if err != nil {
		t.Fatal(err)
	}
	return archive, index
}

func TestWriteIndex(t *testing.T) {
	archive, written := indexOf(t, t.TempDir(), 0o644)
	root, err := layout.ImageIndexFromPath(unpack(t, archive))
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := root.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if len(manifest.Manifests) != 1 || manifest.Manifests[0].Digest.String() != written.Digest {
		t.Fatalf("the layout has %v, want the index %s alone", manifest.Manifests, written.Digest)
	}
	wantNames := map[string]string{"org.opencontainers.image.ref.name": "1.0", "io.containerd.image.name": "index." + reference}
	if diff := cmp.Diff(wantNames, manifest.Manifests[0].Annotations); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
	index, err := root.ImageIndex(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	images, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, m := range images.Manifests {
		got[m.Platform.Architecture] = m.Digest.String()
		checkPlatform(t, index, m)
	}
	if diff := cmp.Diff(written.Images, got); diff != "" || len(got) != 2 {
		t.Errorf("images (-said +written):\n%s", diff)
	}
}

func checkPlatform(t *testing.T, index v1.ImageIndex, m v1.Descriptor) {
	t.Helper()
	img, err := index.Image(m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	arch := m.Platform.Architecture
	if config.Architecture != arch || config.OS != "linux" || config.Created.Unix() != 1795348800 {
		t.Errorf("%s: the config says %s, %s, %s", arch, config.OS, config.Architecture, config.Created)
	}
	if kind, err := img.MediaType(); err != nil || kind != types.OCIManifestSchema1 {
		t.Errorf("%s: media type %s, error %v", arch, kind, err)
	}
	want := []string{"tmp/ 755 5 0", "usr/ 755 5 0", "usr/bin/ 755 5 0", "usr/bin/program 755 0 0: program for " + arch}
	if diff := cmp.Diff(want, list(t, img)); diff != "" {
		t.Errorf("%s: layer (-want +got):\n%s", arch, diff)
	}
}

func TestWriteIndexIsReproducible(t *testing.T) {
	one, _ := indexOf(t, t.TempDir(), 0o600)
	two, _ := indexOf(t, t.TempDir(), 0o755)
	if read(t, one) != read(t, two) {
		t.Error("equal content gave different archives")
	}
}

func TestWriteIndexRefuses(t *testing.T) {
	for name, c := range map[string]struct{ reference, want string }{
		"name":       {"Not A Name", "image name"},
		"lost files": {reference, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			_, err := WriteIndex(filepath.Join(dir, "image.tar"), c.reference, time.Time{}, []Platform{
				{"arm64", []Entry{{Path: "/a", Source: filepath.Join(dir, "lost")}}, v1.Config{}},
			})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one about %q", err, c.want)
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("left %v, error %v", left, err)
			}
		})
	}
}

// unpack returns a directory with the files of an archive.
func unpack(t *testing.T, file string) string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	dir := t.TempDir()
	for archive := tar.NewReader(f); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return dir
		}
		if err != nil {
			t.Fatal(err)
		}
		target := filepath.Join(dir, h.Name)
		if h.Typeflag == tar.TypeDir {
			if err := os.MkdirAll(target, 0o755); err != nil {
				t.Fatal(err)
			}
			continue
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(target, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
