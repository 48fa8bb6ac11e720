// Command gen writes the table of what keeps a pod from starting into a page of documentation,
// between two comments. It runs by "go generate" in pkg/obstacle.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"

	"github.com/tessera-dra/tessera/pkg/obstacle"
)

const begin, end = "<!-- obstacles: make generate -->\n", "<!-- end of the obstacles -->\n"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return errors.New("usage: gen PAGE")
	}
	page, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	before, rest, ok := bytes.Cut(page, []byte(begin))
	_, after, ended := bytes.Cut(rest, []byte(end))
	if !ok || !ended {
		return fmt.Errorf("%s lacks the lines %q and %q", args[0], begin, end)
	}
	f, err := os.Create(args[0])
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "%s%s%s%s%s", before, begin, tables(), end, after)
	return errors.Join(err, f.Close())
}

// pages matches paths of docs/user in a text. The generated page is in that directory, so that
// its links are relative.
var pages = regexp.MustCompile(`docs/user/(([a-z-]+)\.md(?:#[a-z0-9-]+)?)`)

// tables returns a table for each stage.
func tables() string {
	titles := map[obstacle.Stage]string{
		obstacle.Prepare: "The claim isn't prepared", obstacle.Start: "A container doesn't start, or its programs wait", obstacle.Release: "An ended pod's devices aren't released",
	}
	var out strings.Builder
	stage := obstacle.Stage("")
	for _, o := range obstacle.All() {
		if o.Clear {
			continue
		}
		if o.Stage != stage {
			stage = o.Stage
			fmt.Fprintf(&out, "\n### %s\n\n| message | of the | meaning | how it ends, and what to do |\n| --- | --- | --- | --- |\n", titles[stage])
		}
		fmt.Fprintf(&out, "| %s | %s | %s | %s |\n", messages(o.Texts), o.Class, o.Means, pages.ReplaceAllString(o.Do, "[$2]($1)"))
	}
	return out.String() + "\n"
}

// messages quotes parts of messages.
func messages(texts []string) string {
	var all []string
	for _, t := range texts {
		quoted := strings.Trim(t, " :;")
		if t != quoted {
			quoted = strings.TrimSpace("… " + quoted + " …")
		}
		all = append(all, "`"+quoted+"`")
	}
	return strings.Join(all, ", ")
}
