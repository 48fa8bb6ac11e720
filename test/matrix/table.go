package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/outcome"
)

// table renders the columns of a kind that have results as a Markdown table, with
// the reasons below it.
func table(kind string, results map[string]outcome.Result) string {
	var shown []column
	for _, c := range columns() {
		if c.kind() == kind && results[c.id()] != nil {
			shown = append(shown, c)
		}
	}
	if len(shown) == 0 {
		return "Nothing has run yet.\n"
	}
	var b strings.Builder
	b.WriteString("| |")
	for _, c := range shown {
		b.WriteString(" " + c.title() + " |")
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(shown)) + "\n")
	notes := &notes{numbers: map[string]int{}}
	for _, f := range features() {
		if !f.in(kind) {
			continue
		}
		fmt.Fprintf(&b, "| %s |", f.name)
		for _, c := range shown {
			b.WriteString(" " + notes.mark(c, results[c.id()], f.story) + " |")
		}
		b.WriteString("\n")
	}
	b.WriteString("| run at |")
	for _, c := range shown {
		b.WriteString(" " + results[c.id()].Runs() + " |")
	}
	b.WriteString("\n\n" + notes.String())
	return b.String()
}

// title is a column's head.
func (c column) title() string {
	switch {
	case c.kubelet != "":
		return fmt.Sprintf("%s with kubelets of %s", c.kubernetes, c.kubelet)
	case c.runtime == cluster.OldContainerd:
		return c.kubernetes + " with containerd 1.7"
	case c.runtime == cluster.CRIO:
		return c.kubernetes + " with CRI-O"
	case c.dra == cluster.DRADefault:
		return c.kubernetes + " as it is"
	default:
		return c.kubernetes
	}
}

// notes numbers the reasons for which something isn't on a server.
type notes struct {
	texts   []string
	numbers map[string]int
}

func (n *notes) mark(c column, r outcome.Result, story string) string {
	found, ran := r[story]
	if c.dra == cluster.DRADefault {
		found, ran = r[withoutDRA]
		if found.Outcome == outcome.Works { // the test: helm install fails and says why
			found = outcome.Entry{Outcome: outcome.Absent, Reason: "Dynamic Resource Allocation is off: `helm install` fails and names the flags that turn it on"}
		}
	}
	switch {
	case !ran:
		return "–"
	case found.Outcome == outcome.Absent:
		return fmt.Sprintf("no<sup>%d</sup>", n.number(reason(found.Reason)))
	case found.Outcome == outcome.Works:
		return "works"
	}
	return "**fails**"
}

// reason leaves out what the head of the column says.
func reason(text string) string {
	if _, needs, found := strings.Cut(text, "needs "); found {
		return "needs " + needs
	}
	return text
}

func (n *notes) number(text string) int {
	if n.numbers[text] == 0 {
		n.texts = append(n.texts, text)
		n.numbers[text] = len(n.texts)
	}
	return n.numbers[text]
}

func (n *notes) String() string {
	var b strings.Builder
	for i, text := range n.texts {
		fmt.Fprintf(&b, "%d. Not on this server: %s.\n", i+1, text)
	}
	return b.String()
}

// needs renders for each feature the oldest Kubernetes on which it works, with
// default feature gates and with more of them.
func needs(results map[string]outcome.Result) string {
	for _, c := range columns() {
		if c.kind() != "others" && results[c.id()] == nil {
			return "See [docs/user/compatibility.md](docs/user/compatibility.md): not every version has run yet.\n"
		}
	}
	var b strings.Builder
	b.WriteString("| | from Kubernetes, with Dynamic Resource Allocation on | or, with more feature gates that are off by default, from |\n|---|---|---|\n")
	for _, f := range features() {
		if f.fault {
			continue
		}
		plain, gated := oldest(results, "default", f), oldest(results, "all", f)
		if plain == gated {
			gated = ""
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", f.name, plain, gated)
	}
	return b.String()
}

// oldest returns the oldest version of the columns of a kind from which on the
// feature works; "–" if none does.
func oldest(results map[string]outcome.Result, kind string, f feature) string {
	version := "–"
	for _, c := range slices.Backward(columns()) {
		r := results[c.id()]
		if c.kind() != kind || c.dra == cluster.DRADefault || r == nil {
			continue
		}
		if r[f.story].Outcome != outcome.Works {
			break
		}
		version = c.kubernetes
	}
	return version
}
