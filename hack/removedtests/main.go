// Removedtests reports tests and stories that commits removed without saying so.
// A tree that was out of date when it was committed removes other people's work
// that way.
//
//	removedtests [git log's arguments: a range, --since]
//
// A test is a function Test…, Fuzz… or Benchmark… of a _test.go file, and a story a
// file *.txtar. One that was moved isn't removed. The message of any of the commits may
// name what was removed and why. A paragraph that begins with "Removes" may name groups,
// too, by a pattern, or by the file or directory that had them:
//
//	Removes TestStop* and pkg/mps/old/: daemons are never stopped.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
)

func main() {
	found, err := run(".", os.Args[1:], os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "removedtests:", err)
	}
	if found || err != nil {
		os.Exit(1)
	}
}

// removal is a test or a story that a commit removed from a file.
type removal struct{ name, file, commit string }

// run prints what the selected commits of the repository at dir removed and don't name.
func run(dir string, selection []string, out io.Writer) (found bool, err error) {
	removed, messages, err := read(dir, selection)
	if err != nil {
		return false, err
	}
	kept, err := present(dir)
	if err != nil {
		return false, err
	}
	names, groups := named(messages)
	for _, r := range removed {
		if kept[r.name] || slices.Contains(names, r.name) || slices.ContainsFunc(groups, r.isOf) {
			continue
		}
		found = true
		if _, err := fmt.Fprintf(out, "%s: %s of %s is gone: name it in a commit's body with the reason, or restore it\n",
			r.commit, r.name, r.file); err != nil {
			return false, fmt.Errorf("print: %w", err)
		}
	}
	return found, nil
}

// named returns the words of messages, and those of the paragraphs that say what is removed.
func named(messages string) (all, removing []string) {
	for paragraph := range strings.SplitSeq(messages, "\n\n") {
		words := strings.FieldsFunc(paragraph, func(r rune) bool { return strings.ContainsRune(" \t\n,;:()`\"'", r) })
		for i := range words {
			words[i] = strings.TrimRight(words[i], ".")
		}
		all = append(all, words...)
		if strings.HasPrefix(strings.TrimSpace(paragraph), "Removes ") {
			removing = append(removing, words...)
		}
	}
	return all, removing
}

// isOf reports whether a word names a group that has the test.
func (r removal) isOf(word string) bool {
	if strings.Contains(word, "/") {
		return word == r.file || strings.HasPrefix(r.file, strings.TrimRight(word, "/")+"/")
	}
	matches, err := path.Match(word, r.name)
	return err == nil && matches && len(strings.Trim(word, "*?")) > len("Test")
}

// commitMark begins the line of a commit in the log.
const commitMark = "commit "

// read returns what the selected commits removed, and their messages.
func read(dir string, selection []string) (removed []removal, messages string, err error) {
	args := []string{"log", "--no-merges", "--format=" + commitMark + "%h%n%w(0,8,8)%B", "--patch", "--unified=0", "--no-color"}
	log, err := git(dir, append(args, selection...)...)
	if err != nil {
		return nil, "", err
	}
	var commit, file string
	var text strings.Builder
	lines := bufio.NewScanner(bytes.NewReader(log))
	lines.Buffer(nil, 64<<20) // generated lines are long
	for lines.Scan() {
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, commitMark):
			commit = strings.TrimPrefix(line, commitMark)
			text.WriteString("\n")
		case strings.HasPrefix(line, "        "):
			text.WriteString(strings.TrimSpace(line) + "\n")
		case strings.HasPrefix(line, "diff --git a/"):
			file, _, _ = strings.Cut(strings.TrimPrefix(line, "diff --git a/"), " b/")
		case strings.HasPrefix(line, "deleted file"), strings.HasPrefix(line, "rename from"):
			if strings.HasSuffix(file, ".txtar") {
				removed = append(removed, removal{path.Base(file), file, commit})
			}
		case strings.HasPrefix(line, "-") && strings.HasSuffix(file, "_test.go"):
			if name := test(line[1:]); name != "" {
				removed = append(removed, removal{name, file, commit})
			}
		}
	}
	return removed, text.String(), lines.Err()
}

var declaration = regexp.MustCompile(`^func ((?:Test|Fuzz|Benchmark)\w+)\(`)

// test returns the name of the test that a line of a file declares.
func test(line string) string {
	if m := declaration.FindStringSubmatch(line); m != nil {
		return m[1]
	}
	return ""
}

// present returns the names of the tests and stories that HEAD has.
func present(dir string) (map[string]bool, error) {
	names := map[string]bool{}
	files, err := git(dir, "ls-tree", "-r", "--name-only", "HEAD")
	if err != nil {
		return nil, err
	}
	for file := range strings.Lines(string(files)) {
		names[path.Base(strings.TrimSpace(file))] = true
	}
	declared, err := git(dir, "grep", "--no-color", "-hE", `^func (Test|Fuzz|Benchmark)`, "HEAD", "--", "*_test.go")
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == 1 { // no match
		err = nil
	}
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(declared)) {
		names[test(line)] = true
	}
	return names, nil
}

func git(dir string, args ...string) ([]byte, error) {
	out, err := exec.Command("git", append([]string{"-C", dir}, args...)...).Output() //nolint:gosec // a checked command of this program
	if err != nil {
		return nil, fmt.Errorf("git %s: %w", args[0], err)
	}
	return out, nil
}
