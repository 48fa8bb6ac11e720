package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime/trace"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestJoints counts testdata/module, whose lines say what is to be counted in them.
func TestJoints(t *testing.T) {
	dir, err := filepath.Abs(filepath.Join("testdata", "module"))
	if err != nil {
		t.Fatal(err)
	}
	counts, err := joints(dir)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]string{}
	for _, c := range counts {
		for _, place := range c.places {
			at, _, _ := strings.Cut(place, " ")
			got[c.name] = append(got[c.name], at)
		}
		slices.Sort(got[c.name])
		if len(c.places) == 0 {
			delete(got, c.name)
		}
	}
	wanted := marks(t, dir)
	want := map[string][]string{
		"interfaces in pkg/node":         wanted["interface"],
		"interfaces in all that ships":   slices.Sorted(slices.Values(slices.Concat(wanted["interface"], wanted["interface outside node"]))),
		"function fields in pkg/node":    wanted["function field"],
		"locks in the plugin":            wanted["lock"],
		"goroutine starts in the plugin": wanted["goroutine"],
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("places (-want +got):\n%s", diff)
	}
}

// marks returns the places of the comments "want: KIND, KIND", by kind.
func marks(t *testing.T, dir string) map[string][]string {
	t.Helper()
	mark := regexp.MustCompile(`// want: (.+)$`)
	places := map[string][]string{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		source, err := os.ReadFile(filepath.Join(dir, name))
		for i, line := range strings.Split(string(source), "\n") {
			if found := mark.FindStringSubmatch(line); found != nil {
				for kind := range strings.SplitSeq(found[1], ", ") {
					places[kind] = append(places[kind], fmt.Sprintf("%s:%d", name, i+1))
				}
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for kind := range maps.Keys(places) {
		slices.Sort(places[kind])
	}
	return places
}

func TestLinesOf(t *testing.T) {
	name := filepath.Join(t.TempDir(), "lines.go")
	source := "// Package p has\n// a comment.\npackage p // 1\n\n/* none\n*/\nvar a = `2\n\n// 4: a string's\n`\n\nfunc f() { // 6\n\t// none\n\tf(\n\t\t// none\n\t) /* 8\n*/\n}\n"
	if err := os.WriteFile(name, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := linesOf(name); got != 9 || err != nil {
		t.Errorf("linesOf: got %d, %v; want 9 lines", got, err)
	}
}

// server has a method with the name of the gRPC handler.
type server struct{ file *os.File }

func (s server) NodePrepareResources() {
	done := make(chan error)
	func() {
		go func() {
			_, err := s.file.WriteString("x")
			done <- err
		}()
	}()
	<-done
}

// TestWays looks at a write that a handler starts a goroutine for, in a closure.
func TestWays(t *testing.T) {
	s := server{}
	var err error
	if s.file, err = os.Create(filepath.Join(t.TempDir(), "file")); err != nil {
		t.Fatal(err)
	}
	defer s.file.Close()
	var out bytes.Buffer
	if err := trace.Start(&out); err != nil {
		t.Fatal(err)
	}
	_, _ = s.file.WriteString("outside of the handler")
	s.NodePrepareResources()
	trace.Stop()
	all, err := ways(&out, "github.com/tessera-dra/tessera")
	if err != nil {
		t.Fatal(err)
	}
	all = slices.DeleteFunc(all, func(w way) bool { return w.call != "syscall.write" })
	want := []string{"hack/joints.server.NodePrepareResources.func1.1", "hack/joints.server.NodePrepareResources.func1"}
	if len(all) != 1 || !slices.Equal(all[0].module, want) {
		t.Errorf("ways: got %q; want one with %q", all, want)
	}
}

func TestReport(t *testing.T) {
	limits := map[string]limit{
		"at its ceiling": {Name: "at its ceiling", Base: 10, Wanted: .55, Ceiling: 8},
		"above":          {Name: "above", Base: 10, Most: 7, Ceiling: 8},
		"lines":          {Name: "lines", Base: 10},
	}
	counts := []count{{"at its ceiling", 8, []string{"x.go:1"}}, {"above", 9, []string{"y.go:2"}}, {"lines", 11, nil}}
	var out strings.Builder
	err := report(counts, limits, true, &out)
	if err == nil || !strings.HasPrefix(err.Error(), "above: 9, and the ceiling is 8") || strings.Contains(err.Error(), "\n") {
		t.Errorf("report: got error %v; want it for \"above\" alone", err)
	}
	want := `                now  base  ratio  wanted  ceiling
at its ceiling  8    10    0.80   5       8
above           9    10    0.90   7       8
lines           11   10    1.10   -       -

at its ceiling: 8
  x.go:1

above: 9
  y.go:2

lines: 11
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
}

// TestLimits reads the file that ships with the program.
func TestLimits(t *testing.T) {
	limits, err := readLimits()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range limits {
		if l.Base == 0 || l.wanted() > l.Base {
			t.Errorf("%s: base %d, wanted %d", l.Name, l.Base, l.wanted())
		}
	}
}
