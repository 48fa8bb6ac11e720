package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestMetrics checks that user/monitor.md names the metrics of the programs, no more and no
// fewer.
func TestMetrics(t *testing.T) {
	page, err := os.ReadFile("user/monitor.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := names("`(tessera_\\w+)`", string(page))
	var served []string
	err = filepath.WalkDir("../pkg", func(path string, _ fs.DirEntry, err error) error {
		if path == "../pkg/kubectl" {
			return fs.SkipDir // it serves none, and reads those of plugins
		}
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		served = append(served, names(`"(tessera_\w+)"`, string(source))...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(served)
	if len(served) < 20 {
		t.Fatalf("found only %q in the sources", served)
	}
	if diff := cmp.Diff(slices.Compact(served), documented); diff != "" {
		t.Errorf("user/monitor.md and the programs have different metrics (-programs +page):\n%s", diff)
	}
}

// names returns the first group of each match, sorted, each once.
func names(pattern, text string) []string {
	var found []string
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		found = append(found, m[1])
	}
	slices.Sort(found)
	return slices.Compact(found)
}
