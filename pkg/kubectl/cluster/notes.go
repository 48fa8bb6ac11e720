package cluster

import (
	"fmt"
	"io"

	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// NotePrinter prints each note when it comes up.
type NotePrinter struct{ printed map[string]bool }

// Print prints those of the notes that weren't among the last ones.
func (p *NotePrinter) Print(out io.Writer, notes []feed.Note) {
	now := make(map[string]bool)
	for _, n := range notes {
		if !p.printed[n.Text] {
			fmt.Fprintln(out, "note: "+terminal.OneLine(n.Text))
		}
		now[n.Text] = true
	}
	p.printed = now
}
