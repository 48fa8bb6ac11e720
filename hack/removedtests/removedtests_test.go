package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestRun checks which removals are reported: not those that a commit names, alone or in
// a group, and not what is still in the tree.
func TestRun(t *testing.T) {
	const tests = "package a\n\nfunc TestOne(t *testing.T) {}\n\nfunc TestTwo(t *testing.T) {}\n\nfunc FuzzThree(f *testing.F) {}\n"
	for name, c := range map[string]struct {
		change  func(t *testing.T, dir string)
		message string
		want    []string // beginnings of lines, after the commit
	}{
		"nothing is removed":      {func(t *testing.T, dir string) { write(t, dir, "b_test.go", "package a\n") }, "Add a file\n\nWhy.", nil},
		"a file in silence":       {remove("a/a_test.go"), "Speed up the build\n\nWhy.", []string{"TestOne", "TestTwo", "FuzzThree"}},
		"a story in silence":      {remove("testdata/fails.txtar"), "Speed up the build\n\nWhy.", []string{"fails.txtar"}},
		"named":                   {remove("a/a_test.go"), "Remove x\n\nTestOne, TestTwo and FuzzThree tested x.", nil},
		"named in the subject":    {remove("testdata/fails.txtar"), "e2e: Remove fails.txtar\n\nIt can't fail.", nil},
		"some are named":          {remove("a/a_test.go"), "Remove x\n\nTestOne and TestTwo tested x.", []string{"FuzzThree"}},
		"a pattern":               {remove("a/a_test.go"), "Remove x\n\nWhy.\n\nRemoves TestO*, TestT* and Fuzz*Three: they tested x.", nil},
		"a pattern of everything": {remove("a/a_test.go"), "Remove x\n\nRemoves Test* and *.", []string{"TestOne", "TestTwo", "FuzzThree"}},
		"a directory":             {remove("a/a_test.go"), "Remove x\n\nRemoves a/, which\ntested x.", nil},
		"a directory in passing":  {remove("a/a_test.go"), "Change x\n\nThe tests in a/ passed.", []string{"TestOne", "TestTwo", "FuzzThree"}},
		"a file":                  {remove("a/a_test.go"), "Remove x\n\nRemoves a/a_test.go, which tested x.", nil},
		"another file":            {remove("a/a_test.go"), "Remove x\n\nRemoves a/b_test.go, which tested x.", []string{"TestOne", "TestTwo", "FuzzThree"}},
		"moved":                   {move("a/a_test.go", "b/b_test.go"), "Move a\n\nWhy.", nil},
		"a story moved":           {move("testdata/fails.txtar", "testdata/long/fails.txtar"), "Move a story\n\nWhy.", nil},
		"a story renamed":         {move("testdata/fails.txtar", "testdata/succeeds.txtar"), "Move a story\n\nWhy.", []string{"fails.txtar"}},
		"one test renamed": {func(t *testing.T, dir string) {
			write(t, dir, "a/a_test.go", strings.ReplaceAll(tests, "TestOne", "TestFirst"))
		}, "Rename a test\n\nWhy.", []string{"TestOne"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			command(t, dir, "init", "--quiet", "--initial-branch=main")
			write(t, dir, "a/a_test.go", tests)
			write(t, dir, "testdata/fails.txtar", "exec false\n")
			commit(t, dir, "Begin")
			c.change(t, dir)
			commit(t, dir, c.message)
			var out strings.Builder
			found, err := run(dir, []string{"HEAD"}, &out)
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if out.Len() == 0 {
				lines = nil
			}
			if found != (len(c.want) > 0) || len(lines) != len(c.want) {
				t.Fatalf("found %v, printed:\n%s\nwant %v", found, out.String(), c.want)
			}
			for i, want := range c.want {
				if _, said, _ := strings.Cut(lines[i], ": "); !strings.HasPrefix(said, want+" of ") {
					t.Errorf("line %d is %q, want that of %s", i, lines[i], want)
				}
			}
		})
	}
}

func remove(file string) func(*testing.T, string) {
	return func(t *testing.T, dir string) { command(t, dir, "rm", "--quiet", file) }
}

func move(from, to string) func(*testing.T, string) {
	return func(t *testing.T, dir string) {
		write(t, dir, to, "") // makes the directory
		command(t, dir, "mv", "--force", from, to)
	}
}

func write(t *testing.T, dir, file, content string) {
	t.Helper()
	file = filepath.Join(dir, file)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func commit(t *testing.T, dir, message string) {
	t.Helper()
	command(t, dir, "add", "--all")
	command(t, dir, "-c", "user.name=Test", "-c", "user.email=test@example.com", "commit", "--quiet", "--message", message)
}

func command(t *testing.T, dir string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "git", append([]string{"-C", dir}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
}
