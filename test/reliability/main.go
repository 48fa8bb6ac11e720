// Command reliability counts the failures that the tests of a recorded run tried, and
// writes them into docs/dev/reliability.md. make reliability makes such a run.
//
//	reliability -tests      print the arguments of go test for the tests that it counts
//	reliability LOG...      count them in logs of go test -json
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

const page = "docs/dev/reliability.md"

func main() {
	list := flag.Bool("tests", false, "print the arguments of go test for the tests that are counted, and do nothing else")
	flag.Parse()
	if *list {
		fmt.Println(arguments(groups()))
		return
	}
	if err := run(page, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "reliability:", err)
		os.Exit(1)
	}
}

// arguments are those of go test for the groups' tests.
func arguments(groups []group) string {
	var tests, dirs []string
	for _, g := range groups {
		tests, dirs = append(tests, g.tests...), append(dirs, "./"+g.dir)
	}
	unique := func(s []string) []string { return slices.Compact(slices.Sorted(slices.Values(s))) }
	return "-run ^(" + strings.Join(unique(tests), "|") + ")$ " + strings.Join(unique(dirs), " ")
}

func run(page string, logs []string) error {
	if len(logs) == 0 {
		return errors.New("name the logs of a run, as go test -json writes them")
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
