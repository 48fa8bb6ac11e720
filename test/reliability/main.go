// Command reliability counts the failures that the tests of a recorded run tried, and
// writes them into docs/reliability.md.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

const page = "docs/reliability.md"

// usage: reliability LOG..., each written by go test -json.
func main() {
	if err := run(page, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "reliability:", err)
		os.Exit(1)
	}
}

func run(page string, logs []string) error {
	if len(logs) == 0 {
		return errors.New("name the logs of a run, as make test leaves them in _output/test")
	}
	var all []result
	for _, log := range logs {
		results, err := readFile(log)
		if err != nil {
			return err
		}
		all = append(all, results...)
	}
	text, err := tables(groups(), all)
	if err != nil {
		return err
	}
	old, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	content, err := replace(old, text)
	if err != nil {
		return fmt.Errorf("%s: %w", page, err)
	}
	return os.WriteFile(page, content, 0o644)
}

// Marks around the part of the page that is generated.
const (
	begin = "<!-- tried -->\n"
	end   = "<!-- end of tried -->\n"
)

// replace returns the page with the text between the marks.
func replace(page []byte, text string) ([]byte, error) {
	before, rest, found := bytes.Cut(page, []byte(begin))
	_, after, closed := bytes.Cut(rest, []byte(end))
	if !found || !closed {
		return nil, fmt.Errorf("no %s … %s", strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	return slices.Concat(before, []byte(begin+"\n"+text+"\n"+end), after), nil
}

// tables has one table for each group.
func tables(groups []group, all []result) (string, error) {
	var text strings.Builder
	total, last := 0, time.Time{}
	for _, g := range groups {
		table, cases, err := g.table(all)
		if err != nil {
			return "", err
		}
		text.WriteString("\n" + table)
		total += cases
	}
	for _, r := range all {
		if r.at.After(last) {
			last = r.at
		}
	}
	return fmt.Sprintf("%d cases passed in the run of %s.\n", total, last.UTC().Format(time.DateOnly)) + text.String(), nil
}
