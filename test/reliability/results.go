package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// result is the result of a test.
type result struct {
	dir    string // of the package
	test   string // with the names of subtests
	passed bool
	// cases that the test says it has tried; 1 if it says nothing, and 0 if it has subtests,
	// which have their own.
	cases int
	at    time.Time
}

// event is a line of go test -json; see go doc test2json.
type event struct {
	Time                          time.Time
	Action, Package, Test, Output string
}

// said finds the number of cases that a test has logged.
var said = regexp.MustCompile(`: (\d+) cases$`)

func readFile(name string) ([]result, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	results, err := read(file)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return results, nil
}

// read returns the results of tests in the order of their ends.
func read(in io.Reader) ([]result, error) {
	type id struct{ dir, test string }
	var all []result
	parents, cases := map[id]bool{}, map[id]int{}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.Test == "" {
			continue // the go command's own messages, and results of packages
		}
		of := id{strings.TrimPrefix(e.Package, "github.com/tessera-dra/tessera/"), e.Test}
		for parent, _, ok := cutLast(e.Test); ok; parent, _, ok = cutLast(parent) {
			parents[id{of.dir, parent}] = true
		}
		switch e.Action {
		case "output":
			if m := said.FindStringSubmatch(strings.TrimSpace(e.Output)); m != nil {
				cases[of], _ = strconv.Atoi(m[1]) // digits
			}
		case "pass", "fail":
			all = append(all, result{of.dir, of.test, e.Action == "pass", 1, e.Time})
		}
	}
	for i, r := range all {
		of := id{r.dir, r.test}
		if n, ok := cases[of]; ok {
			all[i].cases = n
		}
		if parents[of] {
			all[i].cases = 0
		}
	}
	return all, lines.Err()
}

// cutLast splits the last component from a test's name.
func cutLast(test string) (parent, last string, ok bool) {
	i := strings.LastIndexByte(test, '/')
	if i < 0 {
		return "", test, false
	}
	return test[:i], test[i+1:], true
}
