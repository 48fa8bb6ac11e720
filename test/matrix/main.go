// Command matrix runs the stories of each feature on real clusters of every
// Kubernetes version and writes the outcomes to docs/user/compatibility.md.
// Stories that have passed for the same files of the tree aren't run again, so that
// a run that was interrupted goes on.
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

	"github.com/tessera-dra/tessera/test/command"
	"github.com/tessera-dra/tessera/test/outcome"
)

const (
	page = "docs/user/compatibility.md"
	// recorded has the results of which the page is made.
	recorded  = "docs/user/compatibility.json"
	passedDir = "_output/matrix"
)

func main() {
	only := flag.String("only", "", "columns to run, as 1.33-on,1.34-all, or versions, as 1.33; default: all")
	stories := flag.String("stories", "", "stories to run, as one-gpu,gpu-health, each where it is a row; the others' results stay; default: all")
	lanes := flag.Int("lanes", 2, "how many stories run at the same time")
	list := flag.Bool("list", false, "print the columns and end")
	write := flag.Bool("write", false, "write the page from the recorded results, without running anything")
	flag.Parse()
	os.Exit(command.Run("matrix", func(ctx context.Context) error { return do(ctx, *only, *stories, *lanes, *list, *write) }))
}

func do(ctx context.Context, only, stories string, lanes int, list, write bool) error {
	if list {
		for _, c := range columns() {
			fmt.Println(c.id())
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
	began, failed := time.Now(), 0
	for _, c := range columns() {
		if !c.wanted(only) {
			continue
		}
		r, err := c.runMissing(ctx, c.chosen(stories), lanes, filepath.Join(passedDir, tree))
		if err != nil {
			return fmt.Errorf("%s: %w", c.id(), err)
		}
		results[c.id()] = c.merge(results[c.id()], r)
		failed += r.Count(outcome.Fails)
		if err := errors.Join(outcome.Write(recorded, results), writePage(results)); err != nil {
			return err
		}
	}
	fmt.Printf("matrix: took %s; %s is written\n", time.Since(began).Round(time.Second), page)
	if failed > 0 {
		return fmt.Errorf("%d stories failed; their logs are in %s", failed, filepath.Join(passedDir, tree))
	}
	return nil
}

func (c column) wanted(only string) bool {
	return only == "" || slices.ContainsFunc(strings.Split(only, ","), func(s string) bool { return s == c.id() || s == c.kubernetes })
}

// chosen returns the stories of the column that are in the list; all if it is empty.
func (c column) chosen(list string) []string {
	return slices.DeleteFunc(c.stories(), func(s string) bool { return list != "" && !slices.Contains(strings.Split(list, ","), s) })
}

// merge adds newer results to older ones, and leaves out stories that aren't rows any more.
func (c column) merge(older, newer outcome.Result) outcome.Result {
	merged := outcome.Result{}
	for _, story := range append(c.stories(), withoutDRA) {
		for _, r := range []outcome.Result{older, newer} {
			if found, ran := r[story]; ran {
				merged[story] = found
			}
		}
	}
	return merged
}

// runMissing runs the stories that haven't passed for this tree.
func (c column) runMissing(ctx context.Context, stories []string, lanes int, dir string) (outcome.Result, error) {
	passedFile := filepath.Join(dir, c.id()+".json")
	stories, passed, err := outcome.Missing(passedFile, stories)
	if err != nil {
		return nil, err
	}
	if len(stories) == 0 {
		fmt.Printf("matrix: %s: nothing to run: the stories have passed for these files, or aren't rows of this column\n", c.id())
		return passed, nil
	}
	fmt.Printf("matrix: %s\n", c.id())
	began := time.Now()
	r, err := c.run(ctx, stories, lanes, filepath.Join(dir, c.id()+".log"))
	if err != nil {
		return nil, err
	}
	fmt.Printf("matrix: %s took %s: %d work, %d aren't on this server, %d fail\n",
		c.id(), time.Since(began).Round(time.Second), r.Count(outcome.Works), r.Count(outcome.Absent), r.Count(outcome.Fails))
	r = c.merge(passed, r)
	return r, r.Keep(passedFile)
}

// writePage replaces what is between the markers of the pages' tables.
func writePage(results map[string]outcome.Result) error {
	for _, kind := range []string{"default", "all", "others"} {
		if err := outcome.Fill(page, "matrix "+kind, table(kind, results)); err != nil {
			return err
		}
	}
	return outcome.Fill(page, "matrix needs", needs(results))
}
