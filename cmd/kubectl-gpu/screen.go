package main

import (
	"os"

	"golang.org/x/term"
)

// screen is where output goes.
type screen struct {
	width  int
	colour bool
}

// screenOf asks the terminal, if the file is one.
func screenOf(f *os.File) screen {
	s := screen{width: 120}
	if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
		_, no := os.LookupEnv("NO_COLOR")
		s = screen{width: width, colour: !no && os.Getenv("TERM") != "dumb"}
	}
	return s
}

const (
	bold, red, green, plain = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[0m"
)

func (s screen) bold(text string) string  { return s.in(bold, text) }
func (s screen) red(text string) string   { return s.in(red, text) }
func (s screen) green(text string) string { return s.in(green, text) }

func (s screen) in(colour, text string) string {
	if !s.colour {
		return text
	}
	return colour + text + plain
}
