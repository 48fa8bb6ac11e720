package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// event is a line of go test -json; see go doc test2json.
type event struct {
	Action     string
	Package    string
	ImportPath string // of build-output
	Test       string
	Output     string
	Elapsed    float64 // seconds
}

// ended reports whether the event is the last of its test or package.
func (e event) ended() bool {
	return e.Action == "pass" || e.Action == "fail" || e.Action == "skip"
}

// events calls do for each event. It passes a line that is none, as the go
// command's own messages, as an output that belongs to nothing.
func events(in io.Reader, do func(event) error) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) != nil {
				e = event{Action: "build-output", Output: line}
			}
			if err := do(e); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read events: %w", err)
		}
	}
}
