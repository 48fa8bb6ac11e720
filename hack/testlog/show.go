package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// progress marks a line of a test's output that is shown at once.
const progress = "progress: "

// show prints a line for each package that passes, all output of tests and
// packages that fail, and the errors of packages that don't compile.
func show(in io.Reader, out io.Writer) error {
	v := view{out: out, output: map[id][]string{}}
	return events(in, v.add)
}

// id names a test, or a package where the test is empty.
type id struct{ pkg, test string }

// view holds the output of the tests that haven't ended.
type view struct {
	out    io.Writer
	output map[id][]string
}

func (v *view) add(e event) error {
	name := id{e.Package, e.Test}
	switch {
	case e.Action == "build-output":
		return v.print(e.Output)
	case e.Action == "output":
		v.output[name] = append(v.output[name], e.Output)
		if _, text, ok := strings.Cut(e.Output, progress); ok {
			return v.print(text)
		}
		return nil
	case !e.ended():
		return nil
	case e.Test == "":
		return v.packageEnded(e)
	}
	lines := v.output[name]
	delete(v.output, name)
	if e.Action != "fail" {
		return nil
	}
	return v.print(lines...)
}

// packageEnded prints the verdict. A package that ends in a panic or at its time
// limit leaves tests without one: their output comes first.
func (v *view) packageEnded(e event) error {
	var unfinished []id
	for name := range v.output {
		if name.pkg == e.Package {
			unfinished = append(unfinished, name)
		}
	}
	slices.SortFunc(unfinished, func(a, b id) int { return -strings.Compare(a.test, b.test) })
	for _, name := range unfinished {
		lines := v.output[name]
		delete(v.output, name)
		if e.Action != "fail" {
			continue
		}
		if err := v.print(lines...); err != nil {
			return err
		}
	}
	switch e.Action {
	case "fail":
		return v.print(fmt.Sprintf("FAIL  %s  %.1f s\n", e.Package, e.Elapsed))
	case "pass":
		return v.print(fmt.Sprintf("ok    %s  %.1f s\n", e.Package, e.Elapsed))
	default: // no test files, or none that runs
		return nil
	}
}

func (v *view) print(lines ...string) error {
	for _, line := range lines {
		if _, err := io.WriteString(v.out, line); err != nil {
			return fmt.Errorf("print: %w", err)
		}
	}
	return nil
}
