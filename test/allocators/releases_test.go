//go:build allocators

package allocators_test

import (
	"errors"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/test/allocators"
)

var (
	states = flag.Int("states", 10000, "states that are played with each release")
	first  = flag.Uint64("seed", 0, "the first seed")
	update = flag.Bool("update", false, "write the table of docs/user/compatibility.md")
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
	for _, r := range append(allocators.Releases(), allocators.Others()...) {
		if programs[r.Module] != "" {
			continue
		}
		if programs[r.Module], err = allocators.Build(folder, r.Module); err != nil {
			panic(err)
		}
	}
	return m.Run()
}

func start(t *testing.T, r allocators.Release) *allocators.Program {
	t.Helper()
	p, err := r.Start(t.Context(), programs[r.Module])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// play plays all states, and returns the first error.
func play(t *testing.T, stage allocators.Stage) (allocators.Tally, error) {
	t.Helper()
	var all allocators.Tally
	for seed := *first; seed < *first+uint64(*states/steps); seed++ {
		tally, err := allocators.Play(t.Context(), stage, seed, steps)
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
	for _, r := range allocators.Releases() {
		t.Run(r.String(), func(t *testing.T) {
			t.Parallel()
			stage := allocators.Stage{Allocator: start(t, r), Server: r.Server, Downgrades: true, PrioritizedList: r.PrioritizedList, All: r.All}
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
// older than the API server by which the controller judges them, or have fewer gates.
// If one allocates silicon twice, the controller withdraws the node's counters, and nothing
// may be allocated twice any more.
func TestOlderSchedulers(t *testing.T) {
	lines := make([]string, len(allocators.Skews()))
	t.Run("play", func(t *testing.T) {
		for i, skew := range allocators.Skews() {
			t.Run(skew.Server+" with "+skew.Scheduler, func(t *testing.T) {
				t.Parallel()
				server, scheduler := find(t, skew.Server), find(t, skew.Scheduler)
				program, err := scheduler.StartBeside(t.Context(), programs[scheduler.Module])
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = program.Close() })
				stage := allocators.Stage{Allocator: program, Server: server.Server}
				var overlaps []*allocators.OverlapError
				for {
					_, err := play(t, stage)
					var overlap *allocators.OverlapError
					if errors.As(err, &overlap) && overlaps == nil {
						overlaps = append(overlaps, overlap)
						stage.Server = stage.Server.Withdraw()
						continue
					}
					if err != nil {
						t.Fatal(err)
					}
					break
				}
				if lines[i], err = allocators.SkewRow(t.Context(), server, scheduler, program, overlaps); err != nil {
					t.Fatal(err)
				}
			})
		}
	})
	compareTable(t, "make allocators UPDATE=1, older", append([]string{allocators.SkewHeader()}, lines...))
}

func find(t *testing.T, name string) allocators.Release {
	t.Helper()
	r, err := allocators.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestTable compares the table in the docs with the allocators' results.
func TestTable(t *testing.T) {
	lines := []string{allocators.Header()}
	for _, r := range allocators.Releases() {
		row, err := allocators.Row(t.Context(), r, start(t, r))
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, row)
	}
	compareTable(t, "make allocators UPDATE=1", lines)
}

// compareTable compares a table in the docs, or writes it.
func compareTable(t *testing.T, name string, lines []string) {
	t.Helper()
	const path, end = "../../docs/user/compatibility.md", "<!-- end of the table -->\n"
	begin, table := "<!-- table: "+name+" -->\n", strings.Join(lines, "\n")+"\n"
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, _ := strings.Cut(string(data), begin)
	have, after, found := strings.Cut(rest, end)
	switch {
	case !found:
		t.Fatalf("%s has no table %q", path, name)
	case *update:
		if err := os.WriteFile(path, []byte(before+begin+table+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	case have != table:
		t.Errorf("the allocators do something else than %s says; make allocators UPDATE=1 writes it:\n%s", path, table)
	}
}
