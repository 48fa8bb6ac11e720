package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"
)

// terminal writes texts without characters that a terminal acts on: nodes and other
// programs than this one have written parts of them. Line breaks and tabs stay, and, if
// it has colours, those of this program.
type terminal struct {
	io.Writer

	colour bool
}

// Write implements io.Writer.
func (t terminal) Write(p []byte) (int, error) {
	var out strings.Builder
	for text := string(p); text != ""; {
		if own := ownColour(text); t.colour && own != "" {
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

// visible returns a printable character as it is, a space for white space, and U+FFFD for others.
func visible(r rune) rune {
	switch {
	case unicode.IsPrint(r):
		return r
	case unicode.IsSpace(r):
		return ' '
	default:
		return utf8.RuneError
	}
}

// oneLine returns a text that another program has written as one line, without characters
// that a terminal acts on.
func oneLine(s string) string { return strings.Map(visible, s) }

// document returns v as JSON. Characters that a terminal acts on, or that YAML doesn't have,
// are escaped.
func document(v any, indent string) ([]byte, error) {
	var raw, out bytes.Buffer
	e := json.NewEncoder(&raw)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	for _, r := range raw.String() { // outside of strings, line breaks are the only such characters
		if unicode.IsPrint(r) || r == '\n' || r > 0xffff { // those that terminals act on are among the first
			out.WriteRune(r)
		} else {
			fmt.Fprintf(&out, `\u%04x`, r)
		}
	}
	return out.Bytes(), nil
}

// oneLines makes each text in a value one line, so that no node's text can pass for other
// lines or columns. The value is a pointer; its maps stay as they are: their keys and values
// are names and labels, which API servers check.
func oneLines(v any) { makeOneLines(reflect.ValueOf(v)) }

func makeOneLines(v reflect.Value) {
	switch v.Kind() { //nolint:exhaustive // the others have no texts
	case reflect.String:
		if v.CanSet() {
			v.SetString(oneLine(v.String()))
		}
	case reflect.Pointer:
		makeOneLines(v.Elem())
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			makeOneLines(v.Index(i))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				makeOneLines(v.Field(i))
			}
		}
	}
}
