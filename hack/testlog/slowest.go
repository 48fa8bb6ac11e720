package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// slowest prints the tests of the files that took longest, of those that have no
// subtests.
func slowest(out io.Writer, count int, files []string) error {
	took := map[id]float64{}
	for _, file := range files {
		if err := readTimes(file, took); err != nil {
			return err
		}
	}
	for name := range took {
		for parent, ok := parentOf(name); ok; parent, ok = parentOf(parent) {
			delete(took, parent)
		}
	}
	var names []id
	for name := range took {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b id) int {
		return cmp.Or(cmp.Compare(took[b], took[a]), cmp.Compare(a.pkg, b.pkg), cmp.Compare(a.test, b.test))
	})
	for _, name := range names[:min(count, len(names))] {
		if _, err := fmt.Fprintf(out, "%7.1f s  %s %s\n", took[name], name.pkg, name.test); err != nil {
			return fmt.Errorf("print: %w", err)
		}
	}
	return nil
}

func readTimes(path string, took map[id]float64) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	return events(file, func(e event) error {
		if e.ended() && e.Test != "" {
			took[id{e.Package, e.Test}] = e.Elapsed
		}
		return nil
	})
}

func parentOf(name id) (id, bool) {
	i := strings.LastIndex(name.test, "/")
	return id{name.pkg, name.test[:max(i, 0)]}, i > 0
}
