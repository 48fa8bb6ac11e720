package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestShow(t *testing.T) {
	for name, tc := range map[string]struct{ in, want string }{
		"a package that passes is one line": {
			`{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"noise\n"}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":1}
{"Action":"output","Package":"p","Output":"PASS\n"}
{"Action":"pass","Package":"p","Elapsed":1.25}
`,
			"ok    p  1.2 s\n",
		},
		"a test that fails is shown, its neighbour isn't": {
			`{"Action":"output","Package":"p","Test":"TestA","Output":"why\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"noise\n"}
{"Action":"pass","Package":"p","Test":"TestB","Elapsed":1}
{"Action":"fail","Package":"p","Test":"TestA","Elapsed":1}
{"Action":"output","Package":"p","Output":"FAIL\n"}
{"Action":"fail","Package":"p","Elapsed":2}
`,
			"why\nFAIL\nFAIL  p  2.0 s\n",
		},
		"a test that never ended is shown": {
			`{"Action":"output","Package":"p","Test":"TestA","Output":"panic: test timed out\n"}
{"Action":"fail","Package":"p","Elapsed":2}
`,
			"panic: test timed out\nFAIL  p  2.0 s\n",
		},
		"a package without tests is nothing": {
			`{"Action":"output","Package":"p","Output":"?   p [no test files]\n"}
{"Action":"skip","Package":"p","Elapsed":0}
`,
			"",
		},
		"what doesn't compile is shown": {
			`{"ImportPath":"p","Action":"build-output","Output":"p.go:1: bad\n"}
go: not JSON
{"Action":"fail","Package":"p","Elapsed":0,"FailedBuild":"p"}
`,
			"p.go:1: bad\ngo: not JSON\nFAIL  p  0.0 s\n",
		},
		"progress is shown at once": {
			`{"Action":"output","Package":"p","Test":"TestA","Output":"    a.go:1: progress: one of two\n"}
`,
			"one of two\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := show(strings.NewReader(tc.in), &out); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, out.String()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSlowest(t *testing.T) {
	dir := t.TempDir()
	files := []string{filepath.Join(dir, "unit"), filepath.Join(dir, "e2e")}
	for i, text := range []string{
		`{"Action":"pass","Package":"p","Test":"TestA/x/y","Elapsed":3}
{"Action":"pass","Package":"p","Test":"TestA/x","Elapsed":4}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":5}
{"Action":"fail","Package":"p","Test":"TestB","Elapsed":2}
{"Action":"pass","Package":"p","Elapsed":9}
`,
		`{"Action":"pass","Package":"q","Test":"TestA","Elapsed":100.5}
{"Action":"pass","Package":"q","Test":"TestC","Elapsed":1}
`,
	} {
		if err := os.WriteFile(files[i], []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	if err := slowest(&out, 3, files); err != nil {
		t.Fatal(err)
	}
	want := "  100.5 s  q TestA\n    3.0 s  p TestA/x/y\n    2.0 s  p TestB\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}
