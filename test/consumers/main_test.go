package main

import (
	"os"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/test/outcome"
)

// TestPage checks that the page has the table of the systems and the recorded results.
func TestPage(t *testing.T) {
	text, err := os.ReadFile("../../" + page)
	if err != nil {
		t.Fatal(err)
	}
	results, err := outcome.Read("../../" + recorded)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), table(systems(), results)) {
		t.Errorf("%s has another table: go run ./test/consumers -write", page)
	}
}

// TestPinned checks that sim/cluster pins a version of each system that can be run.
func TestPinned(t *testing.T) {
	for _, s := range systems() {
		if s.test == "" {
			continue
		}
		if version, err := s.version("../.."); err != nil || version == "" {
			t.Errorf("%s: version %q, %v", s.title, version, err)
		}
	}
}
