package docs_test

import (
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// section returns a section of dev/add.md, or all of it for "".
func section(t *testing.T, title string) string {
	t.Helper()
	page, err := os.ReadFile("dev/add.md")
	if err != nil {
		t.Fatal(err)
	}
	if title == "" {
		return string(page)
	}
	_, after, ok := strings.Cut(string(page), "\n## "+title+"\n")
	if !ok {
		t.Fatalf("dev/add.md has no section %q", title)
	}
	text, _, _ := strings.Cut(after, "\n## ")
	return text
}

// paths returns the paths of the repository in a text.
func paths(text string) []string {
	var found []string
	for _, m := range regexp.MustCompile("`([A-Za-z0-9_./-]+)`").FindAllStringSubmatch(text, -1) {
		top, _, nested := strings.Cut(m[1], "/")
		isTop := slices.Contains([]string{"api", "cmd", "demo", "deployments", "docs", "hack", "pkg", "sim", "test"}, top)
		if (isTop && nested) || m[1] == "Makefile" || m[1] == "README.md" {
			found = append(found, m[1])
		}
	}
	return found
}

// TestHowtoPaths checks that every path on the page exists.
func TestHowtoPaths(t *testing.T) {
	found := paths(section(t, ""))
	if len(found) < 50 {
		t.Fatalf("found only %d paths on the page: %q", len(found), found)
	}
	for _, path := range found {
		if _, err := os.Stat(filepath.Join("..", path)); err != nil {
			t.Errorf("docs/dev/add.md names %s, which doesn't exist: correct the page", path)
		}
	}
}

// TestHowtoSharingStrategy checks that the page lists exactly the files of
// production code whose identifiers name time-slicing or its replicas.
func TestHowtoSharingStrategy(t *testing.T) {
	var want []string
	for _, dir := range []string{"api", "cmd", "pkg"} {
		err := filepath.WalkDir(filepath.Join("..", dir), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !isProduction(filepath.ToSlash(path)) {
				return err
			}
			names, err := namesTimeSlicing(path)
			if names {
				want = append(want, strings.TrimPrefix(filepath.ToSlash(path), "../"))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	// The text after the table lists files that don't name it.
	table, _, _ := strings.Cut(section(t, "A sharing strategy"), "\nBesides these")
	got := paths(table)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files that name time-slicing (-code +docs/dev/add.md): correct the page, or let fewer files name it:\n%s", diff)
	}
}

// isProduction reports whether a file is Go code that is neither a test nor
// generated.
func isProduction(path string) bool {
	dir := filepath.Base(filepath.Dir(path))
	return strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") && !strings.HasSuffix(dir, "test") &&
		!strings.HasPrefix(filepath.Base(path), "zz_generated")
}

// namesTimeSlicing reports whether an identifier in a Go file names time-slicing.
func namesTimeSlicing(path string) (bool, error) {
	source, err := os.ReadFile(path)
	if err != nil {
		return false, err
	}
	pattern := regexp.MustCompile(`(?i)timeslic|replica`)
	files := token.NewFileSet()
	var s scanner.Scanner
	s.Init(files.AddFile(path, files.Base(), len(source)), source, nil, 0)
	for {
		_, kind, literal := s.Scan()
		if kind == token.EOF {
			return false, nil
		}
		if kind == token.IDENT && pattern.MatchString(literal) {
			return true, nil
		}
	}
}
