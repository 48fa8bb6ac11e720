package docs_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// TestMigrationManifests checks that every manifest and every values file of
// user/migrate.md is part of one that runs: in a story or in the demo. Blocks that
// begin with "```text" are those of other programs.
func TestMigrationManifests(t *testing.T) {
	page, err := os.ReadFile("user/migrate.md")
	if err != nil {
		t.Fatal(err)
	}
	run := runManifests(t)
	blocks := regexp.MustCompile("(?ms)^ *```yaml\n(.*?)^ *```$").FindAllStringSubmatch(string(page), -1)
	if len(blocks) < 5 {
		t.Fatalf("found only %d blocks on the page", len(blocks))
	}
	for _, block := range blocks {
		for _, want := range parse(t, "user/migrate.md", []byte(block[1])) {
			if !isPartOfAny(want, run) {
				t.Errorf("no story and no file of the demo has this manifest: correct the page, or add it to a story\n%s", block[1])
			}
		}
	}
}

// runManifests returns the documents of all manifests and values files that
// stories and the demo apply.
func runManifests(t *testing.T) []any {
	t.Helper()
	var all []any
	for _, pattern := range []string{"../test/e2e/testdata/*.txtar", "../demo/*/*.yaml", "../demo/*/*/*.yaml"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		if len(paths) == 0 {
			t.Fatalf("no file matches %s", pattern)
		}
		for _, path := range paths {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			files := []txtar.File{{Name: path, Data: data}}
			if filepath.Ext(path) == ".txtar" {
				files = txtar.Parse(data).Files
			}
			for _, file := range files {
				if ext := filepath.Ext(file.Name); ext == ".yaml" || ext == ".yml" {
					all = append(all, parse(t, path, file.Data)...)
				}
			}
		}
	}
	return all
}

// parse returns a file's YAML documents.
func parse(t *testing.T, path string, data []byte) []any {
	t.Helper()
	var all []any
	for r := yamlutil.NewYAMLReader(bufio.NewReader(bytes.NewReader(data))); ; {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		var parsed any
		if err == nil {
			err = yaml.Unmarshal(doc, &parsed)
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		all = append(all, parsed)
	}
}

func isPartOfAny(want any, have []any) bool {
	for _, h := range have {
		if isPartOf(want, h, "") {
			return true
		}
	}
	return false
}

// isPartOf reports whether have has all that want has. Lists have to be equally
// long. Images differ: those of stories are there without a registry.
func isPartOf(want, have any, key string) bool {
	switch want := want.(type) {
	case map[string]any:
		have, ok := have.(map[string]any)
		for k, v := range want {
			ok = ok && isPartOf(v, have[k], k)
		}
		return ok
	case []any:
		have, ok := have.([]any)
		ok = ok && len(want) == len(have)
		for i := range want {
			ok = ok && isPartOf(want[i], have[i], key)
		}
		return ok
	case string:
		have, ok := have.(string)
		return ok && (key == "image" || strings.TrimSpace(want) == strings.TrimSpace(have))
	}
	return want == have
}

// TestIsPartOf checks the comparison itself.
func TestIsPartOf(t *testing.T) {
	have := parse(t, "have", []byte("{a: 1, image: x, list: [{b: yes, c: no}, 2]}"))[0]
	for text, want := range map[string]bool{
		"{a: 1}":                          true,
		"{image: other, a: 1}":            true,
		"{list: [{b: yes}, 2]}":           true,
		"{a: 2}":                          false,
		"{d: 1}":                          false,
		"{list: [{b: yes}]}":              false,
		"{list: [{b: yes, c: maybe}, 2]}": false,
	} {
		if got := isPartOf(parse(t, "want", []byte(text))[0], have, ""); got != want {
			t.Errorf("isPartOf(%s): %t, want %t", text, got, want)
		}
	}
}
