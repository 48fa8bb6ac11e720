package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/command"
	"github.com/tessera-dra/tessera/test/outcome"
)

const (
	page = "docs/user/consumers.md"
	// recorded has the results of which the page is made.
	recorded = "docs/user/consumers.json"
	logs     = "_output/consumers"
)

func main() {
	only := flag.String("only", "", "systems to run, as kueue,jobset; the others' results stay; default: all")
	list := flag.Bool("list", false, "print the systems that can be run and end")
	write := flag.Bool("write", false, "write the page from the recorded results, without running anything")
	flag.Parse()
	os.Exit(command.Run("consumers", func(ctx context.Context) error { return do(ctx, *only, *list, *write) }))
}

func do(ctx context.Context, only string, list, write bool) error {
	chosen, err := choose(only)
	if err != nil {
		return err
	}
	if list {
		for _, s := range chosen {
			fmt.Printf("%s\t%s\n", s.name, s.title)
		}
		return nil
	}
	results, err := outcome.Read(recorded)
	if err != nil {
		return err
	}
	failed := 0
	if !write {
		if failed, err = runAll(ctx, chosen, results); err != nil {
			return err
		}
	}
	if err := outcome.Fill(page, "consumers table", table(systems(), results)); err != nil {
		return err
	}
	if failed > 0 {
		return fmt.Errorf("%d parts of stories failed; their logs are in %s", failed, logs)
	}
	return nil
}

// choose returns the systems of these names, all that can be run if there are none.
func choose(names string) ([]system, error) {
	if names == "" {
		return slices.DeleteFunc(systems(), func(s system) bool { return s.test == "" }), nil
	}
	var chosen []system
	for name := range strings.SplitSeq(names, ",") {
		s, err := find(name)
		if err == nil && s.test == "" {
			err = fmt.Errorf("there is no story for %s: %s", s.title, s.cannot)
		}
		if err != nil {
			return nil, err
		}
		chosen = append(chosen, s)
	}
	return chosen, nil
}

// runAll runs the stories of the systems, records the outcomes, and returns how many parts
// failed.
func runAll(ctx context.Context, chosen []system, results map[string]outcome.Result) (failed int, err error) {
	for _, s := range chosen {
		began := time.Now()
		fmt.Printf("consumers: %s\n", s.name)
		r, err := run(ctx, s)
		if err != nil {
			return failed, fmt.Errorf("%s: %w", s.name, err)
		}
		fmt.Printf("consumers: %s took %s: %d parts work, %d fail\n",
			s.name, time.Since(began).Round(time.Second), r.Count(outcome.Works), r.Count(outcome.Fails))
		results[s.name] = r
		failed += r.Count(outcome.Fails)
		if err := outcome.Write(recorded, results); err != nil {
			return failed, err
		}
	}
	return failed, nil
}

func run(ctx context.Context, s system) (outcome.Result, error) {
	version, err := s.version(".")
	if err != nil {
		return nil, err
	}
	r, err := outcome.Run{
		Title: "consumers: " + s.name, Stories: s.partNames(), Log: filepath.Join(logs, s.name+".log"),
		Args: []string{"-tags", "consumers", "-timeout", "30m", "-v", "-run", "^" + s.test + "$", "./test/consumers"},
		TakeDown: func() error {
			return cluster.Down(context.Background(), "consumers-"+s.name, os.Stderr)
		},
	}.Do(ctx)
	for part, found := range r {
		found.Version = version
		r[part] = found
	}
	return r, err
}

// table renders the outcomes as a Markdown table, in which a system that was never run has no
// version.
func table(all []system, results map[string]outcome.Result) string {
	var b strings.Builder
	b.WriteString("| system | version | what ran | what can't, and why | run at |\n|---|---|---|---|---|\n")
	for _, s := range all {
		r := results[s.name]
		ran, version := []string{}, ""
		for _, p := range s.parts {
			found := r[p.name]
			version = max(version, found.Version)
			ran = append(ran, p.title+": "+cell(found))
		}
		if len(s.parts) == 0 {
			ran = append(ran, "nothing")
		}
		fmt.Fprintf(&b, "| [%s](%s) | %s | %s | %s | %s |\n", s.title, s.address, version, strings.Join(ran, "<br>"), s.cannot, r.Runs())
	}
	return b.String()
}

// cell renders the outcome of a part.
func cell(found outcome.Entry) string {
	switch found.Outcome {
	case outcome.Works:
		return "works"
	case "":
		return "not run"
	default:
		return "**fails**"
	}
}
