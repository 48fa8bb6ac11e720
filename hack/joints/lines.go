package main

import (
	"fmt"
	"go/scanner"
	"go/token"
	"os"
	"strings"

	"golang.org/x/tools/go/packages"
)

// lines is how many lines of the packages' files have code.
func (t *tree) lines(in []*packages.Package) (lines int, _ error) {
	for _, p := range in {
		for _, file := range p.Syntax {
			n, err := linesOf(p.Fset.File(file.FileStart).Name())
			if err != nil {
				return 0, err
			}
			lines += n
		}
	}
	return lines, nil
}

// linesOf returns how many lines of a Go file have code: neither blank nor comments alone.
func linesOf(name string) (int, error) {
	source, err := os.ReadFile(name)
	if err != nil {
		return 0, fmt.Errorf("count lines: %w", err)
	}
	var s scanner.Scanner
	file := token.NewFileSet().AddFile(name, -1, len(source))
	s.Init(file, source, nil, 0)
	lines := map[int]bool{}
	for {
		pos, tok, text := s.Scan()
		if tok == token.EOF {
			return len(lines), nil
		}
		if tok == token.SEMICOLON { // mostly the end of a line, after a comment that ends there
			continue
		}
		first := file.Line(pos)
		for line := first; line <= first+strings.Count(text, "\n"); line++ {
			lines[line] = true
		}
	}
}
