package image

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

const reference = "docker.io/tessera-dra/test:1.0"

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	program := writeFile(t, dir, "program", "#!ELF", 0o700)
	entries := []Entry{
		{Path: "/usr/bin/program", Source: program},
		{Path: "/bin", Link: "usr/bin"},
		{Path: "/tmp", Mode: 0o777 | os.ModeSticky},
	}
	archive := filepath.Join(dir, "out", "image.tar")
	written, err := Write(archive, reference, entries, v1.Config{Entrypoint: []string{"/usr/bin/program"}})
	if err != nil || !written {
		t.Fatalf("first write: written %v, error %v", written, err)
	}

	img, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"bin 777 2 0 -> usr/bin", "tmp/ 1777 5 0", "usr/ 755 5 0", "usr/bin/ 755 5 0", "usr/bin/program 755 0 0: #!ELF",
	}
	if diff := cmp.Diff(want, list(t, img)); diff != "" {
		t.Errorf("layer (-want +got):\n%s", diff)
	}
	manifest, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(archive) })
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{reference}, manifest[0].RepoTags); diff != "" {
		t.Errorf("name (-want +got):\n%s", diff)
	}
}

func TestWriteIsReproducible(t *testing.T) {
	dir := t.TempDir()
	entries := []Entry{
		{Path: "/b", Source: writeFile(t, dir, "b", "b", 0o600)},
		{Path: "/a", Source: writeFile(t, dir, "a", "a", 0o755)},
	}
	reversed := []Entry{
		{Path: "/a", Source: writeFile(t, dir, "a2", "a", 0o600)},
		{Path: "/b", Source: writeFile(t, dir, "b2", "b", 0o644)},
	}
	one, two := filepath.Join(dir, "one.tar"), filepath.Join(dir, "two.tar")
	for archive, entries := range map[string][]Entry{one: entries, two: reversed} {
		if _, err := Write(archive, reference, entries, v1.Config{}); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(read(t, one), read(t, two)); diff != "" {
		t.Error("equal content gave different archives")
	}
}

func TestWriteOnlyOnChange(t *testing.T) {
	dir := t.TempDir()
	archive := filepath.Join(dir, "image.tar")
	file := writeFile(t, dir, "file", "one", 0o644)
	write := func() bool {
		t.Helper()
		written, err := Write(archive, reference, []Entry{{Path: "/file", Source: file}}, v1.Config{})
		if err != nil {
			t.Fatal(err)
		}
		return written
	}
	if !write() {
		t.Error("the first write did nothing")
	}
	if write() {
		t.Error("wrote again without a change")
	}
	writeFile(t, dir, "file", "two", 0o644)
	if !write() {
		t.Error("did not write a changed file")
	}
	if err := os.Remove(archive); err != nil {
		t.Fatal(err)
	}
	if !write() {
		t.Error("did not write a lost archive again")
	}
}

func TestWriteRefuses(t *testing.T) {
	dir := t.TempDir()
	file := writeFile(t, dir, "file", "x", 0o644)
	for name, c := range map[string]struct {
		reference, want string
		entries         []Entry
	}{
		"name":          {reference: "Not A Name", want: "image name"},
		"relative path": {reference: reference, entries: []Entry{{Path: "a", Source: file}}, want: `path "a" is not absolute and clean`},
		"twice":         {reference: reference, entries: []Entry{{Path: "/a", Source: file}, {Path: "/a", Source: file}}, want: "/a is given twice"},
		"no such file":  {reference: reference, entries: []Entry{{Path: "/a", Source: file + "-"}}, want: "no such file"},
		"directory":     {reference: reference, entries: []Entry{{Path: "/a", Source: dir}}, want: "not a regular file"},
	} {
		t.Run(name, func(t *testing.T) {
			archive := filepath.Join(dir, "refused.tar")
			_, err := Write(archive, c.reference, c.entries, v1.Config{})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one about %q", err, c.want)
			}
			if _, err := os.Stat(archive); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("an archive is there: %v", err)
			}
		})
	}
}

func writeFile(t *testing.T, dir, name, content string, mode os.FileMode) string {
	t.Helper()
	file := filepath.Join(dir, name)
	if err := os.WriteFile(file, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	return file
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
