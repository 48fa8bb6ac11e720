// Package terminal prints for kubectl gpu: texts of other programs without the characters
// that a terminal acts on, colours, JSON and YAML, and the words that tables share.
package terminal

import (
	"os"

	"golang.org/x/term"
)

// Screen is where output goes.
type Screen struct {
	Width  int
	Colour bool
}

// ScreenOf asks the terminal, if the file is one.
func ScreenOf(f *os.File) Screen {
	s := Screen{Width: 120}
	if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
		_, no := os.LookupEnv("NO_COLOR")
		s = Screen{Width: width, Colour: !no && os.Getenv("TERM") != "dumb"}
	}
	return s
}

const (
	bold, red, green, plain = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[0m"
)

// Bold returns the text in bold, on a screen with colours.
func (s Screen) Bold(text string) string { return s.in(bold, text) }

// Red returns the text in red, on a screen with colours.
func (s Screen) Red(text string) string { return s.in(red, text) }

// Green returns the text in green, on a screen with colours.
func (s Screen) Green(text string) string { return s.in(green, text) }

func (s Screen) in(colour, text string) string {
	if !s.Colour {
		return text
	}
	return colour + text + plain
}
