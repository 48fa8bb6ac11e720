// Language keeps words and turns of phrase out of the project's texts that a
// reader whose first language isn't English has to read twice. It reads the
// comments and strings of Go files, documents, and the chart.
//
//	git ls-files | language
//
// It prints what it finds as FILE:LINE, and ends with 1 if there is anything.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
)

func main() {
	found, err := run(os.Stdin, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "language:", err)
	}
	if found || err != nil {
		os.Exit(1)
	}
}

func run(names io.Reader, out io.Writer) (found bool, err error) {
	var r report
	lines := bufio.NewScanner(names)
	for lines.Scan() {
		if err := r.file(lines.Text()); err != nil {
			return false, err
		}
	}
	if err := lines.Err(); err != nil {
		return false, fmt.Errorf("read the names of files: %w", err)
	}
	for _, line := range r.lines() {
		if _, err := fmt.Fprintln(out, line); err != nil {
			return false, fmt.Errorf("print: %w", err)
		}
		found = true
	}
	return found, nil
}
