//go:build allocators

package allocator_test

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/test/allocator"
)

var (
	states = flag.Int("states", 10000, "states that are played with each release")
	first  = flag.Uint64("seed", 0, "the first seed")
	update = flag.Bool("update", false, "write the table of docs/allocators.md")
)

// steps of a play.
const steps = 40

// programs are the releases' allocators, by module.
var programs = make(map[string]string)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	folder, err := os.MkdirTemp("", "allocators-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(folder)
	for _, r := range allocator.Releases() {
		if programs[r.Module] != "" {
			continue
		}
		if programs[r.Module], err = allocator.Build(folder, r.Module); err != nil {
			panic(err)
		}
	}
	return m.Run()
}

func start(t *testing.T, r allocator.Release) *allocator.Program {
	t.Helper()
	p, err := r.Start(t.Context(), programs[r.Module])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// play plays all states, and returns the first error.
func play(t *testing.T, stage allocator.Stage) (allocator.Tally, error) {
	t.Helper()
	var all allocator.Tally
	for seed := *first; seed < *first+uint64(*states/steps); seed++ {
		tally, err := allocator.Play(t.Context(), stage, seed, steps)
		all.Add(tally)
		if err != nil {
			return all, err
		}
	}
	return all, nil
}

// TestReleases plays with the allocator of each release over the pools that are
// published for it.
func TestReleases(t *testing.T) {
	for _, r := range allocator.Releases() {
		t.Run(r.String(), func(t *testing.T) {
			t.Parallel()
			stage := allocator.Stage{Allocator: start(t, r), Server: r.Server, Downgrades: true, PrioritizedList: r.PrioritizedList, All: r.All}
			all, err := play(t, stage)
			if err != nil {
				t.Fatal(err)
			}
			for kind, n := range all.Asked {
				if all.Allocated[kind] == 0 {
					t.Errorf("none of %d claims for %s was allocated", n, kind)
				}
			}
			t.Logf("asked %v, allocated %v", all.Asked, all.Allocated)
		})
	}
}

// TestOlderSchedulers plays with schedulers that are a minor version, or a patch,
// older than the API server by which the controller judges them. They allocate
// silicon twice, until the controller offers no shares that consume counters.
func TestOlderSchedulers(t *testing.T) {
	for server, schedulers := range map[string][]string{"1.36.3 default": {"1.36.1 default", "1.35.4 all"}, "1.37.1 default": {"1.36.1 default"}} {
		for _, scheduler := range schedulers {
			t.Run(server+" with "+scheduler, func(t *testing.T) {
				t.Parallel()
				newer, older := find(t, server), find(t, scheduler)
				stage := allocator.Stage{Allocator: start(t, older), Server: newer.Server}
				if _, err := play(t, stage); err == nil || !strings.Contains(err.Error(), "claims have") {
					t.Errorf("got %v, want silicon that is allocated twice", err)
				}
				stage.Server.Charged = false
				if _, err := play(t, stage); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func find(t *testing.T, name string) allocator.Release {
	t.Helper()
	r, err := allocator.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestTable compares the table in the docs with what the allocators do.
func TestTable(t *testing.T) {
	const path, begin, end = "../../docs/allocators.md", "<!-- table: make allocators UPDATE=1 -->\n", "<!-- end of the table -->\n"
	lines := []string{allocator.Header()}
	for _, r := range allocator.Releases() {
		row, err := allocator.Row(t.Context(), r, start(t, r))
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, row)
	}
	table := strings.Join(lines, "\n") + "\n"
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, _ := strings.Cut(string(data), begin)
	have, after, found := strings.Cut(rest, end)
	switch {
	case !found:
		t.Fatalf("%s has no table", path)
	case *update:
		if err := os.WriteFile(path, []byte(before+begin+table+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	case have != table:
		t.Errorf("the allocators do something else than %s says; make allocators UPDATE=1 writes it:\n%s", path, table)
	}
}
