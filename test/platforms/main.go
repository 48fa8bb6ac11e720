// Command platforms runs the story of each platform on a cluster that imitates it, and writes
// the outcomes to docs/user/platforms.md. Platforms whose parts have all passed for the same files
// of the tree aren't run again, so that a run that was interrupted goes on with the next platform.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/sim/cluster/platform"
	"github.com/tessera-dra/tessera/test/command"
	"github.com/tessera-dra/tessera/test/outcome"
)

const (
	page = "docs/user/platforms.md"
	// recorded has the results of which the page is made.
	recorded  = "docs/user/platforms.json"
	passedDir = "_output/platforms"
)

func main() {
	only := flag.String("only", "", "platforms to run, as gke-cos,talos-1.14; the others' results stay; default: all")
	list := flag.Bool("list", false, "print the platforms and end")
	write := flag.Bool("write", false, "write the page from the recorded results, without running anything")
	at := flag.Int("parallel", 2, "how many platforms run at the same time")
	flag.Parse()
	os.Exit(command.Run("platforms", func(ctx context.Context) error { return do(ctx, *only, *list, *write, *at) }))
}

func do(ctx context.Context, only string, list, write bool, parallel int) error {
	platforms, err := choose(only)
	if err != nil {
		return err
	}
	if list {
		for _, p := range platforms {
			fmt.Printf("%s\t%s\n", p.Name, p.Title)
		}
		return nil
	}
	results, err := outcome.Read(recorded)
	if err != nil {
		return err
	}
	if write {
		return writePage(results)
	}
	tree, err := outcome.Tree(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	failed, err := runAll(ctx, platforms, parallel, filepath.Join(passedDir, tree), results)
	if err != nil {
		return err
	}
	fmt.Printf("platforms: took %s; %s is written\n", time.Since(began).Round(time.Second), page)
	if failed > 0 {
		return fmt.Errorf("%d parts of stories failed; their logs are in %s", failed, filepath.Join(passedDir, tree))
	}
	return nil
}

// choose returns the platforms with these names, all if there are none.
func choose(names string) ([]*platform.Platform, error) {
	var chosen []*platform.Platform
	all := platform.Names()
	if names != "" {
		all = strings.Split(names, ",")
	}
	for _, name := range all {
		p, err := platform.Find(name)
		if err != nil {
			return nil, err
		}
		chosen = append(chosen, p)
	}
	return chosen, nil
}

// done has the outcomes of a platform.
type done struct {
	name   string
	result outcome.Result
	err    error
}

// runAll runs the platforms, so many at a time, and records the outcomes of each as soon as
// they are there. It returns how many parts have failed.
func runAll(ctx context.Context, platforms []*platform.Platform, parallel int, dir string, results map[string]outcome.Result) (failed int, err error) {
	queue, finished := make(chan *platform.Platform), make(chan done)
	for range parallel {
		go func() {
			for p := range queue {
				r, err := runMissing(ctx, p, dir)
				finished <- done{p.Name, r, err}
			}
		}()
	}
	go func() {
		defer close(queue)
		for _, p := range platforms {
			queue <- p
		}
	}()
	var errs []error
	for range platforms {
		d := <-finished
		if d.err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d.name, d.err))
			continue
		}
		results[d.name] = d.result
		failed += d.result.Count(outcome.Fails)
		errs = append(errs, outcome.Write(recorded, results), writePage(results))
	}
	return failed, errors.Join(errs...)
}

// runMissing runs the story, unless all of its parts have passed for this tree.
func runMissing(ctx context.Context, p *platform.Platform, dir string) (outcome.Result, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	passedFile := filepath.Join(dir, p.Name+".json")
	missing, passed, err := outcome.Missing(passedFile, p.Story())
	if err != nil {
		return nil, err
	}
	if len(missing) == 0 {
		fmt.Printf("platforms: %s: nothing to run: it has passed for these files\n", p.Name)
		return passed, nil
	}
	fmt.Printf("platforms: %s: %s\n", p.Name, p.Title)
	began := time.Now()
	r, err := run(ctx, p, filepath.Join(dir, p.Name+".log"))
	if err != nil {
		return nil, err
	}
	fmt.Printf("platforms: %s took %s: %d parts work, %d fail\n", p.Name, time.Since(began).Round(time.Second), r.Count(outcome.Works), r.Count(outcome.Fails))
	return r, r.Keep(passedFile)
}

func run(ctx context.Context, p *platform.Platform, log string) (outcome.Result, error) {
	const clusters = "p" // short: some platforms have long names of nodes
	return outcome.Run{
		Title: "platforms: " + p.Name, Stories: p.Story(), Log: log,
		Args: []string{"-timeout", "30m", "-run", "^TestPlatform$", "./test/e2e", "-clusters", clusters, "-platform", p.Name},
		TakeDown: func() error {
			return cluster.Down(context.Background(), clusters+"-"+strings.ReplaceAll(p.Name, ".", ""), os.Stderr)
		},
	}.Do(ctx)
}

// writePage replaces the table of the page.
func writePage(results map[string]outcome.Result) error {
	all, err := choose("")
	if err != nil {
		return err
	}
	slices.SortStableFunc(all, func(a, b *platform.Platform) int { return strings.Compare(a.Title, b.Title) })
	return outcome.Fill(page, "platforms table", table(all, results))
}
