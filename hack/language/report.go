package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// avoided are words and turns of phrase that have plainer ones, which are named.
var avoided = regexp.MustCompile(`(?i)\b(anew|pretended|for\s+want\s+of|put\s+aside|look(?:s|ed|ing)?\s+after)\b`)

// instead returns plainer words for a match of avoided.
func instead(found string) string {
	switch strings.ToLower(strings.Join(strings.Fields(found), " ")) {
	case "anew":
		return "again"
	case "pretended":
		return "simulated, or a better word for what it is"
	case "for want of":
		return "without, or because there is no"
	case "put aside":
		return "moved, or renamed"
	default: // look after
		return "watch, check, or the verb for what is done"
	}
}

// headless is a "what" that stands for a noun: "tells what is left", "What claims
// have of it". A few read well, so they are counted.
var headless = regexp.MustCompile(`(?im)(^|[.;:,(] |\b(tells|says|and|of|by|from|to|with|is|for|knows|reads|writes|keeps|has|see) )what\b`)

const (
	// headlessPer is how many words of comments there must be for each.
	headlessPer = 1000
	// longest is how many characters a line of a document has.
	longest = 120
)

// report collects what is found in files.
type report struct {
	found    []string
	headless []string
	words    int // in comments of Go files
}

// file reads a file, if it is one that people read.
func (r *report) file(name string) error {
	if strings.HasPrefix(name, "hack/language/") { // which has to name them
		return nil
	}
	isGo := filepath.Ext(name) == ".go"
	if !isGo && !isDocument(name) {
		return nil
	}
	source, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	if !isGo {
		r.texts(name, documentTexts(name, source))
		r.lengths(name, source)
	} else if !isGenerated(source) {
		r.texts(name, goTexts(source))
	}
	return nil
}

func (r *report) texts(name string, texts []text) {
	for _, t := range texts {
		for _, at := range avoided.FindAllStringIndex(t.words, -1) {
			found := t.words[at[0]:at[1]]
			r.found = append(r.found, fmt.Sprintf("%s: %q: write %s", t.at(name, at[0]), found, instead(found)))
		}
		if !t.comment {
			continue
		}
		r.words += len(strings.Fields(t.words))
		for _, at := range headless.FindAllStringIndex(t.words, -1) {
			r.headless = append(r.headless, t.at(name, at[1]))
		}
	}
}

// at is the place of a byte of the text.
func (t text) at(name string, offset int) string {
	return fmt.Sprintf("%s:%d", name, t.line+strings.Count(t.words[:offset], "\n"))
}

var linkTarget = regexp.MustCompile(`\]\([^)]*\)|https?://\S+`)

// lengths finds lines of a page that are too long, but for tables, code and the
// targets of links, which can't be broken.
func (r *report) lengths(name string, source []byte) {
	if filepath.Ext(name) != ".md" {
		return
	}
	code := false
	for i, line := range strings.Split(string(source), "\n") {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "```") {
			code = !code
		}
		n := utf8.RuneCountInString(linkTarget.ReplaceAllString(line, "]"))
		if !code && !strings.HasPrefix(line, "|") && n > longest {
			r.found = append(r.found, fmt.Sprintf("%s:%d: %d characters: end the line before %d", name, i+1, n, longest))
		}
	}
}

// lines are the findings, with the headless ones if they are too many.
func (r *report) lines() []string {
	lines := slices.Clone(r.found)
	if len(r.headless)*headlessPer <= r.words {
		return lines
	}
	for _, place := range r.headless {
		lines = append(lines, place+`: a "what" without a noun: name the thing`)
	}
	return append(lines, fmt.Sprintf(`%d such "what" in %d words of comments; one in %d is allowed`, len(r.headless), r.words, headlessPer))
}
