package docs_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// named finds names of tests, as `pkg/node: TestName/of a subtest`.
var named = regexp.MustCompile("`([a-z0-9/-]+): ((?:Test|Fuzz)\\w+)(?:/([^`]+))?`")

// TestNamedTests checks that the tests which a page names exist.
func TestNamedTests(t *testing.T) {
	const file = "dev/reliability.md"
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	all := named.FindAllStringSubmatch(string(page), -1)
	if len(all) < 60 {
		t.Fatalf("found only %d tests on the page", len(all))
	}
	for _, m := range all {
		dir, name, sub := m[1], m[2], m[3]
		want := []string{fmt.Sprintf("func %s(", name)}
		if name == "TestStories" {
			_, err := os.Stat(filepath.Join("..", dir, "testdata", sub+".txtar"))
			_, longErr := os.Stat(filepath.Join("..", dir, "testdata/long", sub+".txtar"))
			if err != nil && longErr != nil {
				t.Errorf("docs/%s names the story %s: %v", file, sub, err)
			}
		} else if sub != "" {
			want = append(want, fmt.Sprintf("t.Run(%q", sub))
		}
		source := testsOf(t, filepath.Join("..", dir))
		for _, text := range want {
			if !strings.Contains(source, text) {
				t.Errorf("docs/%s names %s, and no test in %s has %q: correct the page", file, m[0], dir, text)
			}
		}
	}
}

// testsOf returns the text of a directory's test files.
func testsOf(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(data)
	}
	return all.String()
}
