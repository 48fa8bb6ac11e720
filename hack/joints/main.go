// Joints counts where the parts of the programs that ship meet: interfaces, fields that hold
// functions, locks, places that start goroutines; and the lines of the programs. With -prepare it
// counts what the prepare of a claim runs through instead.
//
//	joints [-C DIR] [-list] [-prepare]
//
// It prints each count beside its limits, which are in limits.yaml, and ends with 1 if one is above
// its ceiling. What is counted exactly is said at interfaces, functionFields, locks, goroutines,
// linesOf, covered and ways.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	dir := flag.String("C", ".", "the module's `directory`, which may be another version's")
	list := flag.Bool("list", false, "list what is counted")
	prepare := flag.Bool("prepare", false, "count what a prepare runs through; needs root")
	flag.Parse()
	if err := run(*dir, *list, *prepare, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "joints:", err)
		os.Exit(1)
	}
}

func run(dir string, list, prepare bool, out io.Writer) error {
	limits, err := readLimits()
	if err != nil {
		return err
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return fmt.Errorf("find %s: %w", dir, err)
	}
	measure := joints
	if prepare {
		measure = prepares
	}
	counts, err := measure(dir)
	if err != nil {
		return err
	}
	return report(counts, limits, list, out)
}

// joints counts what the code of the module at dir has, without running it.
func joints(dir string) ([]count, error) {
	t, err := load(dir)
	if err != nil {
		return nil, err
	}
	all := t.behind(programs()...)
	counts := []count{
		counted("interfaces in pkg/node", dir, t.interfaces(t.below("pkg/node"))),
		counted("interfaces in all that ships", dir, t.interfaces(all)),
		counted("function fields in pkg/node", dir, t.functionFields(t.below("pkg/node"))),
		counted("locks in the plugin", dir, t.locks(t.behind(plugin))),
		counted("goroutine starts in the plugin", dir, t.goroutines(t.behind(plugin))),
	}
	lines, err := t.lines(t.behind(daemons()...))
	if err != nil {
		return nil, err
	}
	counts = append(counts, count{name: "lines of the daemons", n: lines})
	for _, program := range daemons() {
		if lines, err = t.lines(t.behind(program)); err != nil {
			return nil, err
		}
		counts = append(counts, count{name: "lines of " + program, n: lines})
	}
	return counts, nil
}

func counted(name, dir string, places []place) count {
	c := count{name: name, n: len(places)}
	for _, p := range places {
		c.places = append(c.places, fmt.Sprintf("%s:%d %s", strings.TrimPrefix(p.at.Filename, dir+"/"), p.at.Line, p.what))
	}
	return c
}
