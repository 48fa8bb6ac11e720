package docs_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSecurityTests checks that the tests which security.md names exist.
func TestSecurityTests(t *testing.T) {
	page, err := os.ReadFile("security.md")
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`([a-z0-9/]+): ((?:Test|Fuzz)\\w+)(?:/([^`]+))?`").FindAllStringSubmatch(string(page), -1)
	if len(named) < 20 {
		t.Fatalf("found only %d tests on the page", len(named))
	}
	for _, m := range named {
		dir, name, sub := m[1], m[2], m[3]
		want := []string{fmt.Sprintf("func %s(", name)}
		if name == "TestStories" {
			if _, err := os.Stat(filepath.Join("..", dir, "testdata", sub+".txtar")); err != nil {
				t.Errorf("docs/security.md names the story %s: %v", sub, err)
			}
		} else if sub != "" {
			want = append(want, fmt.Sprintf("t.Run(%q", sub))
		}
		source := testsOf(t, filepath.Join("..", dir))
		for _, text := range want {
			if !strings.Contains(source, text) {
				t.Errorf("docs/security.md names %s, and no test in %s has %q: correct the page", m[0], dir, text)
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
