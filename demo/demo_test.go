// Package demo_test checks the manifests of the demo against the types of their
// APIs. That they work is checked by run.sh.
package demo_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// decoder refuses kinds that it doesn't know, and unknown fields.
func decoder(t *testing.T) runtime.Decoder {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{scheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(s); err != nil {
			t.Fatal(err)
		}
	}
	return serializer.NewCodecFactory(s, serializer.EnableStrict).UniversalDeserializer()
}

// documents splits a file.
func documents(t *testing.T, data []byte) [][]byte {
	t.Helper()
	var all [][]byte
	for r := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data))); ; {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, doc)
	}
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestManifests(t *testing.T) {
	d := decoder(t)
	files := 0
	err := filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" || filepath.Base(path) == "values.yaml" {
			return err
		}
		files++
		data := read(t, path)
		if path == "api-versions/v1alpha3.yaml" {
			data = asV1beta1(data)
		}
		for _, doc := range documents(t, data) {
			if _, _, err := d.Decode(doc, nil, nil); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 20 {
		t.Errorf("found only %d manifests", files)
	}
}

// asV1beta1 turns objects of v1alpha3, whose types k8s.io/api no longer has, into
// those of v1beta1. In claims, templates and classes the two have the same fields,
// but for some that are newer.
func asV1beta1(data []byte) []byte {
	return bytes.ReplaceAll(data, []byte("resource.k8s.io/v1alpha3"), []byte("resource.k8s.io/v1beta1"))
}

// TestAPIVersions checks that the examples of one version of the API have objects of
// that version only, and differ as their README says.
func TestAPIVersions(t *testing.T) {
	text := make(map[string]string)
	for _, version := range []string{"v1alpha3", "v1beta1", "v1beta2", "v1"} {
		data := string(read(t, "api-versions/"+version+".yaml"))
		own := "apiVersion: resource.k8s.io/" + version + "\n"
		if all := strings.Count(data, "apiVersion: resource.k8s.io/"); all != 3 || strings.Count(data, own) != all {
			t.Errorf("%s.yaml has %d objects of resource.k8s.io, %d of this version, want 3 and 3", version, all, strings.Count(data, own))
		}
		_, data, _ = strings.Cut(data, "\n") // the comment
		text[version] = strings.ReplaceAll(data, own, "")
	}
	if text["v1alpha3"] != text["v1beta1"] {
		t.Error("v1alpha3.yaml and v1beta1.yaml differ in more than the version")
	}
	if text["v1beta2"] != text["v1"] {
		t.Error("v1beta2.yaml and v1.yaml differ in more than the version")
	}
	// Without "exactly:" and indentation the newer ones are the older ones.
	if lines(text["v1"], "exactly:") != lines(text["v1beta1"], "") {
		t.Error("v1.yaml and v1beta1.yaml differ in more than exactly")
	}
}

// lines removes indentation and the lines that are left out.
func lines(text, leftOut string) string {
	var out []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != leftOut {
			out = append(out, line)
		}
	}
	return strings.Join(out, "\n")
}
