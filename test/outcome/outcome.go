// Package outcome runs end-to-end stories with go test, keeps their outcomes, so that
// a run that was interrupted goes on, and writes tables of them into documents.
package outcome

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Outcomes of a story.
const (
	Works  = "works"
	Fails  = "fails"
	Absent = "not on this server"
)

// Entry is the outcome of a story on clusters of one kind.
type Entry struct {
	Outcome string `json:"outcome"`
	// Reason why it is absent.
	Reason string `json:"reason,omitempty"`
	// Seconds that the story took.
	Seconds float64 `json:"seconds,omitempty"`
	// Version of the program of others that ran in it.
	Version string `json:"version,omitempty"`
	// Commit and Date of the run.
	Commit string `json:"commit"`
	Date   string `json:"date"`
}

// Result has the outcome of each story, by the story's name.
type Result map[string]Entry

// Count returns how many stories have the outcome.
func (r Result) Count(outcome string) int {
	n := 0
	for _, c := range r {
		if c.Outcome == outcome {
			n++
		}
	}
	return n
}

// Runs lists the commits and dates of the runs, the oldest date first.
func (r Result) Runs() string {
	byDate := map[string][]string{}
	for _, found := range r {
		if !slices.Contains(byDate[found.Date], found.Commit) {
			byDate[found.Date] = append(byDate[found.Date], found.Commit)
		}
	}
	var all []string
	for _, date := range slices.Sorted(maps.Keys(byDate)) {
		all = append(all, strings.Join(slices.Sorted(slices.Values(byDate[date])), ", ")+", "+date)
	}
	return strings.Join(all, "; ")
}

// Missing returns the stories that a file of results lacks, and those results. Stories that
// failed aren't kept in such files: they are missing.
func Missing(passedFile string, stories []string) ([]string, Result, error) {
	passed := Result{}
	if err := readJSON(passedFile, &passed); err != nil {
		return nil, nil, fmt.Errorf("%w; delete it to run the stories again", err)
	}
	return slices.DeleteFunc(slices.Clone(stories), func(s string) bool { _, has := passed[s]; return has }), passed, nil
}

// Keep writes the results of stories that haven't failed to a file, for Missing.
func (r Result) Keep(passedFile string) error {
	passed := maps.Clone(r)
	maps.DeleteFunc(passed, func(_ string, found Entry) bool { return found.Outcome == Fails })
	return writeJSON(passedFile, passed)
}

// Read reads the results of all kinds of clusters; none if there is no file.
func Read(file string) (map[string]Result, error) {
	results := map[string]Result{}
	return results, readJSON(file, &results)
}

// Write writes them.
func Write(file string, results map[string]Result) error { return writeJSON(file, results) }

func readJSON(file string, into any) error {
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	return nil
}

func writeJSON(path string, value any) error {
	data, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o644)
}

// Fill replaces the text between the markers of that name in a Markdown file.
func Fill(file, name, text string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	begin, end := "<!-- "+name+" -->\n", "<!-- end of "+name+" -->\n"
	before, rest, found := strings.Cut(string(data), begin)
	_, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		return fmt.Errorf("%s has no lines %q and %q", file, begin, end)
	}
	return os.WriteFile(file, []byte(before+begin+"\n"+text+"\n"+end+after), 0o644)
}

// Tree returns a hash of the checkout's files, except documents, to which results are
// written.
func Tree(ctx context.Context) (string, error) {
	const script = `git ls-files -co --exclude-standard -z | grep -zvE '^(docs/|README.md$)' | xargs -0 sha1sum | sha1sum | cut -c1-12`
	out, err := exec.CommandContext(ctx, "bash", "-c", script).Output()
	if err != nil {
		return "", fmt.Errorf("name the tree: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// commitOf names the checkout's commit; "-dirty" if files differ from it that aren't
// documents.
func commitOf(ctx context.Context) (string, error) {
	const script = `echo "$(git rev-parse --short HEAD)$(git diff --quiet HEAD -- . ':!*.md' ':!docs' || echo -dirty)"`
	out, err := exec.CommandContext(ctx, "bash", "-c", script).Output()
	if err != nil {
		return "", fmt.Errorf("name the commit: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}
