package terminal

import (
	"io"
	"strings"
	"unicode/utf8"
)

// Writer writes texts without characters that a terminal acts on: nodes and other
// programs than this one have written parts of them. Line breaks and tabs stay, and, if
// it has colours, those of this program.
type Writer struct {
	io.Writer

	Colour bool
}

// Write implements io.Writer.
func (t Writer) Write(p []byte) (int, error) {
	var out strings.Builder
	for text := string(p); text != ""; {
		if own := ownColour(text); t.Colour && own != "" {
			out.WriteString(own)
			text = text[len(own):]
			continue
		}
		r, n := utf8.DecodeRuneInString(text)
		if r == '\n' || r == '\t' {
			out.WriteRune(r)
		} else {
			out.WriteRune(visible(r))
		}
		text = text[n:]
	}
	if _, err := io.WriteString(t.Writer, out.String()); err != nil {
		return 0, err
	}
	return len(p), nil
}

// ownColour returns the colour of this program that the text begins with; "" if there is none.
func ownColour(text string) string {
	for _, c := range []string{bold, red, green, plain} {
		if strings.HasPrefix(text, c) {
			return c
		}
	}
	return ""
}
