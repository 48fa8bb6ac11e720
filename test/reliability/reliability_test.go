package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const recorded = `
{"Time":"2026-11-23T15:00:00Z","Action":"run","Package":"github.com/tessera-dra/tessera/pkg/a","Test":"TestCrash"}
{"Time":"2026-11-23T15:00:01Z","Action":"pass","Package":"github.com/tessera-dra/tessera/pkg/a","Test":"TestCrash/prepare/00_first/killed"}
{"Time":"2026-11-23T15:00:01Z","Action":"pass","Package":"github.com/tessera-dra/tessera/pkg/a","Test":"TestCrash/prepare/00_first/CDI_wiped"}
{"Time":"2026-11-23T15:00:02Z","Action":"pass","Package":"github.com/tessera-dra/tessera/pkg/a","Test":"TestCrash/prepare/01_second/killed"}
{"Time":"2026-11-23T15:00:02Z","Action":"pass","Package":"github.com/tessera-dra/tessera/pkg/a","Test":"TestCrash/prepare"}
{"Time":"2026-11-23T15:00:02Z","Action":"pass","Package":"github.com/tessera-dra/tessera/pkg/a","Test":"TestCrash"}
{"Time":"2026-11-23T15:00:02Z","Action":"output","Package":"github.com/tessera-dra/tessera/pkg/a","Test":"TestCut/restart","Output":"    a_test.go:1: 12 cases\n"}
{"Time":"2026-11-23T15:00:03Z","Action":"VERDICT","Package":"github.com/tessera-dra/tessera/pkg/a","Test":"TestCut/restart"}
{"Time":"2026-11-23T15:00:03Z","Action":"PARENT","Package":"github.com/tessera-dra/tessera/pkg/a","Test":"TestCut"}
ok  	github.com/tessera-dra/tessera/pkg/a
`

// results reads the record with these ends of a case and of its test.
func results(t *testing.T, verdict, parent string) []result {
	t.Helper()
	all, err := read(strings.NewReader(strings.NewReplacer("VERDICT", verdict, "PARENT", parent).Replace(recorded)))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func groupsOfTest() []group {
	return []group{
		{"Steps", "pkg/a", []string{"TestCrash"}, last, "nothing is left."},
		{"Disk", "pkg/a", []string{"TestCut"}, func(string) string { return "power cut" }, "answers are true."},
	}
}

func TestTables(t *testing.T) {
	got, err := tables(groupsOfTest(), results(t, "pass", "pass"))
	if err != nil {
		t.Fatal(err)
	}
	want := `15 cases passed in the run of 2026-11-23.

### Steps

§pkg/a: TestCrash§: nothing is left.

| operation | CDI wiped | killed |
|---|---:|---:|
| prepare | 1 | 2 |

### Disk

§pkg/a: TestCut§: answers are true.

| operation | power cut |
|---|---:|
| restart | 12 |
`
	if diff := cmp.Diff(strings.ReplaceAll(want, "§", "`"), got); diff != "" {
		t.Errorf("tables (-want +got):\n%s", diff)
	}
}

func TestTablesRefuse(t *testing.T) {
	for name, ends := range map[string]struct{ verdict, parent string }{
		"a case that failed":                 {"fail", "fail"},
		"no result":                          {"run", "pass"},
		"a test that failed by itself":       {"pass", "fail"},
		"a test that didn't end":             {"pass", "run"},
		"a test with a case that is skipped": {"skip", "pass"},
	} {
		t.Run(name, func(t *testing.T) {
			if text, err := tables(groupsOfTest(), results(t, ends.verdict, ends.parent)); err == nil {
				t.Errorf("no error, but:\n%s", text)
			}
		})
	}
}

func TestReplace(t *testing.T) {
	got, err := replace([]byte("before\n"+begin+"old\n"+end+"after\n"), "new\n")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff("before\n"+begin+"\nnew\n\n"+end+"after\n", string(got)); diff != "" {
		t.Errorf("page (-want +got):\n%s", diff)
	}
	if _, err := replace([]byte("no marks\n"), "new\n"); err == nil {
		t.Error("a page without marks was replaced")
	}
}
