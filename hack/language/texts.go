package main

import (
	"bytes"
	"go/scanner"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
)

// text is a part of a file that people read: a line of a document, a run of
// comment lines, a string.
type text struct {
	line    int // of the file, from 1
	words   string
	comment bool
}

// isGenerated reports whether the first lines of a Go file say that a program
// has written it.
func isGenerated(source []byte) bool {
	head, _, _ := bytes.Cut(source, []byte("\npackage "))
	return bytes.Contains(head, []byte("// Code generated ")) || bytes.HasPrefix(source, []byte("// Code generated "))
}

// goTexts returns the comments and strings of a Go file. Comment lines that
// follow each other are one text, with a line break between them.
func goTexts(source []byte) []text {
	files := token.NewFileSet()
	file := files.AddFile("", -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, scanner.ScanComments)
	var texts []text
	next := 0 // line on which a comment would continue the last text
	for {
		pos, kind, literal := s.Scan()
		line := file.Line(pos)
		if kind == token.EOF {
			return texts
		}
		if kind == token.STRING {
			texts = append(texts, text{line: line, words: literal})
		}
		if kind != token.COMMENT {
			continue
		}
		words := strings.TrimSpace(strings.Trim(literal, "/*"))
		if n := len(texts); line == next && n > 0 && texts[n-1].comment {
			texts[n-1].words += "\n" + words
		} else {
			texts = append(texts, text{line: line, words: words, comment: true})
		}
		next = line + 1 + strings.Count(literal, "\n")
	}
}

// documentTexts returns the lines of a document. Of Markdown, code is left out.
func documentTexts(name string, source []byte) []text {
	var texts []text
	code := false
	for i, line := range strings.Split(string(source), "\n") {
		if filepath.Ext(name) == ".md" {
			if strings.HasPrefix(strings.TrimSpace(line), "```") {
				code = !code
			}
			if code {
				continue
			}
			line = withoutCode(line)
		}
		texts = append(texts, text{line: i + 1, words: line})
	}
	return texts
}

// withoutCode removes what is between backquotes.
func withoutCode(line string) string {
	parts := strings.Split(line, "`")
	var kept []string
	for i, part := range parts {
		if i%2 == 0 || i == len(parts)-1 {
			kept = append(kept, part)
		}
	}
	return strings.Join(kept, "`")
}

// isDocument reports whether people read the file as it is.
func isDocument(name string) bool {
	if filepath.Ext(name) == ".md" {
		return true
	}
	return strings.HasPrefix(name, "deployments/helm/tessera/") && slices.Contains([]string{".yaml", ".tpl", ".txt", ".json"}, filepath.Ext(name))
}
