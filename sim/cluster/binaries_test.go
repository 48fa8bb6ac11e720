package cluster

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func writeTree(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func TestBuildKey(t *testing.T) {
	type change struct {
		unit  func(*unit)
		files map[string]string
		goVer string
		same  bool
	}
	for name, tc := range map[string]change{
		"nothing":           {same: true},
		"a test":            {files: map[string]string{"d/main_test.go": "x"}, same: true},
		"a document":        {files: map[string]string{"d/README.md": "x"}, same: true},
		"the module's name": {files: map[string]string{"d/go.mod": "module example.com/n\n\ngo 1.26\n"}, same: true},
		"a requirement":     {files: map[string]string{"d/go.mod": "module example.com/m\n\ngo 1.26\n\nrequire example.com/x v1.0.0\n"}},
		"go.sum":            {files: map[string]string{"d/go.sum": "x"}},
		"the program":       {files: map[string]string{"d/main.go": "x"}},
		"Go":                {goVer: "go2"},
		"the flags":         {unit: func(u *unit) { u.flags = []string{"-tags=x"} }},
		"cgo":               {unit: func(u *unit) { u.cgo = true }},
		"the binaries":      {unit: func(u *unit) { u.files["y"] = "." }},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			writeTree(t, root, map[string]string{"d/go.mod": "module example.com/m\n\ngo 1.26\n", "d/go.sum": "", "d/main.go": "package main"})
			key := func(u unit, goVersion string) string {
				got, err := u.key(root, goVersion)
				if err != nil {
					t.Fatal(err)
				}
				return got
			}
			u := unit{name: "x", dir: "d", sources: []string{"d"}, files: map[string]string{"x": "."}}
			before := key(u, "go1")
			writeTree(t, root, tc.files)
			if tc.unit != nil {
				tc.unit(&u)
			}
			goVersion := "go1"
			if tc.goVer != "" {
				goVersion = tc.goVer
			}
			if same := key(u, goVersion) == before; same != tc.same {
				t.Errorf("key unchanged: %t, want %t", same, tc.same)
			}
		})
	}
}

func TestKubernetesTag(t *testing.T) {
	root := t.TempDir()
	writeTree(t, root, map[string]string{
		"sim/cluster/kubernetes/1.37/go.mod": "module m\n\nrequire (\n\tk8s.io/api v0.37.1\n\tk8s.io/kubernetes v1.37.1\n)\n",
		"sim/cluster/kubernetes/1.36/go.mod": "module m\n",
	})
	for version, want := range map[string]struct{ tag, err string }{
		"1.37": {tag: "v1.37.1"},
		"1.36": {err: "does not require k8s.io/kubernetes"},
		"1.20": {err: "1.36, 1.37"},
	} {
		got, err := kubernetesTag(root, version)
		if got != want.tag {
			t.Errorf("%s: got %q, want %q", version, got, want.tag)
		}
		if want.err != "" && (err == nil || !strings.Contains(err.Error(), want.err)) {
			t.Errorf("%s: got error %v, want one with %q", version, err, want.err)
		}
	}
}

// The pinned version directories must be buildable as they are.
func TestPinnedVersions(t *testing.T) {
	root, err := repositoryRoot()
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range entryNames(filepath.Join(root, "sim/cluster/kubernetes")) {
		tag, err := kubernetesTag(root, version)
		if err != nil {
			t.Error(err)
		}
		if !strings.HasPrefix(tag, "v"+version+".") {
			t.Errorf("directory %s pins Kubernetes %s", version, tag)
		}
		for _, u := range units(Versions{Kubernetes: version}, tag) {
			if _, err := u.key(root, "go1"); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestLinkAll(t *testing.T) {
	from, dir := t.TempDir(), filepath.Join(t.TempDir(), "bin")
	writeTree(t, from, map[string]string{"a": "new"})
	if err := os.Symlink("a", filepath.Join(from, "b")); err != nil {
		t.Fatal(err)
	}
	writeTree(t, dir, map[string]string{"a": "old"})
	for range 2 { // the second time changes nothing
		if err := linkAll(from, dir); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a", "b"} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != "new" {
			t.Errorf("%s holds %q", name, got)
		}
	}
}

func TestDropOthersKeepsOtherUnits(t *testing.T) {
	cache := t.TempDir()
	for _, name := range []string{"runc-aaaaaaaaaaaa", "runc-bbbbbbbbbbbb", "kubernetes-1.37-aaaaaaaaaaaa", "kubernetes-1.36-aaaaaaaaaaaa"} {
		if err := os.Mkdir(filepath.Join(cache, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := dropOthers(cache, "runc", "runc-bbbbbbbbbbbb"); err != nil {
		t.Fatal(err)
	}
	want := []string{"kubernetes-1.36-aaaaaaaaaaaa", "kubernetes-1.37-aaaaaaaaaaaa", "runc-bbbbbbbbbbbb"}
	if diff := cmp.Diff(want, entryNames(cache)); diff != "" {
		t.Error(diff)
	}
}

func TestLockDirOutlivesRemoval(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "locked")
	unlock, err := lockDir(dir, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	second := make(chan func())
	go func() {
		again, err := lockDir(dir, io.Discard)
		if err != nil {
			t.Error(err)
		}
		second <- again
	}()
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	unlock()
	again := <-second
	defer again()
	if _, err := os.Stat(dir); err != nil {
		t.Errorf("the second holder has no directory: %v", err)
	}
}
