package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// block is a block of a page that a reader runs, or applies.
type block struct {
	// Line of the page on which it begins.
	Line int
	// Script for a shell.
	Script string
	// First is run before it: commands that the page supposes and does not show.
	First string
	// Then is run after it, to check its effect.
	Then string
	// LeftOut says why it isn't run; empty for one that is.
	LeftOut string
	// Ends is how long a command that doesn't end by itself runs; 0 for others.
	Ends time.Duration
}

var (
	fence = regexp.MustCompile("^( *)(```+)([a-z]*)(.*)$")
	// unfenced is a line of an indented block, which can't say that it is a command.
	unfenced = regexp.MustCompile(`^ {4,}(kubectl|helm|docker|make|nvidia-smi) `)
	// mark is a comment that says how the next block is run.
	mark = regexp.MustCompile(`^(not run from here|not run|run first|run then|run with|run for|apply)(?:: *((?s:.*)))?$`)
	// shown are the languages of blocks that nobody runs.
	shown = []string{"text", "yaml", "json", "promql", "toml", "nix"}
)

// node is the node that pages call NODE.
const node = "node-0"

var errPage = errors.New("correct the page")

// parser reads a page from top to bottom.
type parser struct {
	lines  []string
	marks  map[string]string // of the next block
	rest   string            // why all that follow are left out
	blocks []block
}

// parse returns the blocks of a page.
func parse(page string) ([]block, error) {
	p := parser{lines: strings.Split(page, "\n"), marks: map[string]string{}}
	for at := 0; at < len(p.lines); {
		next, err := p.read(at)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", at+1, err)
		}
		at = next
	}
	return p.blocks, nil
}

// read reads the mark or block that begins on a line, and returns the line after it.
func (p *parser) read(at int) (int, error) {
	line := p.lines[at]
	text := strings.TrimSpace(line)
	if m := fence.FindStringSubmatch(line); m != nil {
		if strings.TrimSpace(m[4]) != "" {
			return 0, fmt.Errorf("text behind the language of a fence isn't shown: %w", errPage)
		}
		end := p.find(at+1, func(l string) bool { return strings.TrimSpace(l) == m[2] })
		return end + 1, p.add(at+1, m[3], dedented(p.lines[at+1:end], m[1]))
	}
	switch {
	case strings.HasPrefix(text, "<!--"):
		end := p.find(at, func(l string) bool { return strings.Contains(l, "-->") })
		return end + 1, p.note(strings.Join(p.lines[at:min(end+1, len(p.lines))], "\n"))
	case unfenced.MatchString(line):
		return 0, fmt.Errorf("a command that isn't in a block between fences: %w", errPage)
	case text != "" && len(p.marks) > 0:
		return 0, fmt.Errorf("a mark isn't above a block: %w", errPage)
	}
	return at + 1, nil
}

// find returns the first line from one on that is so, or how many there are.
func (p *parser) find(from int, is func(string) bool) int {
	if i := slices.IndexFunc(p.lines[from:], is); i >= 0 {
		return from + i
	}
	return len(p.lines)
}

// dedented returns lines without the indentation of their list.
func dedented(lines []string, by string) []string {
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = strings.TrimPrefix(l, by)
	}
	return out
}

// note keeps a comment that is a mark.
func (p *parser) note(comment string) error {
	text := strings.TrimSpace(strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(comment), "<!--"), "-->"))
	m := mark.FindStringSubmatch(text)
	switch {
	case m == nil:
	case strings.HasPrefix(m[1], "not run") && m[2] == "":
		return fmt.Errorf("the mark %q without the reason: %w", m[1], errPage)
	case m[1] == "not run from here":
		p.rest = m[2]
	default:
		lines := strings.Split(strings.TrimSpace(m[2]), "\n")
		for i := range lines {
			lines[i] = strings.TrimSpace(lines[i])
		}
		p.marks[m[1]] = strings.Join(lines, "\n")
	}
	return nil
}

// add keeps a block of a language, with its marks.
func (p *parser) add(line int, language string, lines []string) error {
	marks := p.marks
	p.marks = map[string]string{}
	b := block{Line: line, Script: strings.Join(lines, "\n"), First: marks["run first"], Then: marks["run then"], LeftOut: p.rest}
	_, applied := marks["apply"]
	switch {
	case language == "console":
		b.Script = typed(lines)
	case applied:
		b.Script = "kubectl apply -f - <<'MANIFESTS'\n" + b.Script + "\nMANIFESTS"
	case language == "sh":
	case slices.Contains(shown, language) && len(marks) == 0:
		return nil
	default:
		return fmt.Errorf("a block in %q, with marks %q; commands are in sh or, with their output, console, others in one of %q: %w", language, marks, shown, errPage)
	}
	if why, ok := marks["not run"]; ok {
		b.LeftOut = why
	}
	for _, text := range []*string{&b.Script, &b.First, &b.Then} {
		*text = replaced(*text, "NODE", node)
	}
	for pair := range strings.FieldsSeq(marks["run with"]) {
		word, by, _ := strings.Cut(pair, "=")
		b.Script = replaced(b.Script, word, by)
	}
	if text, ok := marks["run for"]; ok {
		ends, err := time.ParseDuration(text)
		if err != nil {
			return err
		}
		b.Ends = ends
	}
	p.blocks = append(p.blocks, b)
	return nil
}

// typed returns what somebody types in a session: the lines after "$ ", and those that go on
// with an unfinished one.
func typed(lines []string) string {
	var out []string
	goesOn := false
	for _, line := range lines {
		command, begins := strings.CutPrefix(line, "$ ")
		if !begins && !goesOn {
			continue
		}
		out = append(out, command)
		goesOn = slices.ContainsFunc([]string{`\`, "|", "&&"}, func(end string) bool { return strings.HasSuffix(command, end) })
	}
	return strings.Join(out, "\n")
}

// replaced replaces a word in a text.
func replaced(text, word, by string) string {
	return regexp.MustCompile(`\b`+regexp.QuoteMeta(word)+`\b`).ReplaceAllLiteralString(text, by)
}
