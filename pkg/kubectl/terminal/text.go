package terminal

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"

	"sigs.k8s.io/yaml"
)

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

// OneLine returns a text that another program has written as one line, without characters
// that a terminal acts on.
func OneLine(s string) string { return strings.Map(visible, s) }

// Document returns v as JSON. Characters that a terminal acts on, or that YAML doesn't have,
// are escaped.
func Document(v any, indent string) ([]byte, error) {
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

// OneLines makes each text in a value one line, so that no node's text can pass for other
// lines or columns. The value is a pointer; its maps stay as they are: their keys and values
// are names and labels, which API servers check.
func OneLines(v any) { makeOneLines(reflect.ValueOf(v)) }

func makeOneLines(v reflect.Value) {
	switch v.Kind() { //nolint:exhaustive // the others have no texts
	case reflect.String:
		if v.CanSet() {
			v.SetString(OneLine(v.String()))
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

// Write prints v as JSON or YAML.
func Write(w io.Writer, form string, v any) error {
	raw, err := Document(v, "  ")
	if err == nil && form == "yaml" {
		raw, err = yaml.JSONToYAML(raw)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", strings.ToUpper(form), err)
	}
	if t, ok := w.(Writer); ok {
		w = t.Writer // a document has the texts of nodes as they are
	}
	_, err = w.Write(raw)
	return err
}
