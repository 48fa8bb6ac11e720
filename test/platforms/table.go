package main

import (
	"fmt"
	"strings"

	"github.com/tessera-dra/tessera/sim/cluster/platform"
	"github.com/tessera-dra/tessera/test/outcome"
)

// titles of the parts of a story, as the table has them.
var titles = map[string]string{
	"install": "install", "whole": "whole GPU", "share": "MPS shares", "timeslice": "time slices", "partition": "MIG partitions", "userns": "user namespaces",
	"restart": "plugin restart", "reboot": "reboot", "upgrade": "upgrade", "uninstall": "uninstall",
}

// table renders the outcomes of each platform as a Markdown table with links to their sections and
// profiles, and the reasons below it.
func table(platforms []*platform.Platform, results map[string]outcome.Result) string {
	var b strings.Builder
	b.WriteString("| |")
	for _, part := range platform.Parts() {
		b.WriteString(" " + titles[part] + " |")
	}
	b.WriteString(" run at | facts |\n|---|" + strings.Repeat("---|", len(titles)+2) + "\n")
	var notes []string
	for _, p := range platforms {
		fmt.Fprintf(&b, "| [%s](#%s) |", p.Title, p.Name)
		r := results[p.Name]
		if p.Use.Cannot != "" && r[platform.Refused].Outcome == outcome.Works {
			notes = append(notes, p.Use.Cannot)
			b.WriteString(strings.Repeat(fmt.Sprintf(" can't (%d) |", len(notes)), len(titles)))
		} else {
			for _, part := range platform.Parts() {
				b.WriteString(" " + cell(p, r, part, &notes) + " |")
			}
		}
		fmt.Fprintf(&b, " %s | [%s](../../sim/cluster/platform/profiles/%s.yaml) |\n", r.Runs(), p.Name, p.Name)
	}
	b.WriteString("\n")
	for i, note := range notes {
		fmt.Fprintf(&b, "%d. %s\n", i+1, note)
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

// cell renders the outcome of a part, and notes why it can't be.
func cell(p *platform.Platform, r outcome.Result, part string, notes *[]string) string {
	switch {
	case p.Use.Lacks[part] != "":
		*notes = append(*notes, p.Title+": "+p.Use.Lacks[part])
		return fmt.Sprintf("can't (%d)", len(*notes))
	case r[part].Outcome == outcome.Works:
		return "works"
	case r[part].Outcome == "":
		return "not run"
	default:
		return "**fails**"
	}
}
