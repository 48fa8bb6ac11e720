// Command blocks runs the blocks of commands that README.md and the pages for users have, as a
// new user would: page by page, each on a fresh local cluster with simulated GPUs, with the real
// kubectl, helm and kubectl-gpu on the PATH. A page that installs the chart itself gets a
// cluster without it; on others it is installed.
//
// A block of commands is in the language sh, or console if it shows their output; each is run by
// a shell of its own, in the checkout, and has to succeed. Comments above a block say what is
// special about it; readers of the page don't see them:
//
//	<!-- not run: WHY -->               leave it out
//	<!-- not run from here: WHY -->     leave out all that follow on the page
//	<!-- run first: SCRIPT -->          what the page supposes, such as a pod of that name
//	<!-- run then: SCRIPT -->           checks its effect
//	<!-- run with: NAME=trainer -->     what replaces words of it; NODE is replaced everywhere
//	<!-- run for: 5s -->                it doesn't end by itself
//	<!-- apply -->                      the manifests of a yaml block are applied
//
// Where there is no Docker and no kind, programs of the same names stand in for them: the image
// is built from the Go modules, and loaded into the local cluster.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/tessera-dra/tessera/test/command"
)

func main() {
	only := flag.String("only", "", "run this page only, such as docs/user/sharing.md")
	list := flag.Bool("list", false, "print what is left out, and the counts, and run nothing")
	name := flag.String("cluster", "blocks", "name of the local cluster")
	keep := flag.Bool("keep", false, "leave the cluster of a page that fails, to look around")
	flag.Parse()
	os.Exit(command.Run("blocks", func(ctx context.Context) error {
		return do(ctx, *only, runner{cluster: *name, list: *list, keep: *keep})
	}))
}

// pages returns README.md and the pages for users, or the one with this name.
func pages(only string) ([]string, error) {
	if only != "" {
		return []string{only}, nil
	}
	found, err := filepath.Glob("docs/user/*.md")
	return append([]string{"README.md"}, found...), err
}

func do(ctx context.Context, only string, r runner) error {
	files, err := pages(only)
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		blocks, err := parse(string(text))
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if err := r.page(ctx, file, blocks); err != nil {
			return err
		}
	}
	fmt.Printf("blocks: %d ran, %d failed, %d left out\n", r.ran, r.failed, r.leftOut)
	if r.failed > 0 {
		return errFailed
	}
	return nil
}

var errFailed = errors.New("blocks failed: mend the product, or the page")

// page runs the blocks of a page.
func (r *runner) page(ctx context.Context, file string, blocks []block) error {
	for _, b := range blocks {
		if b.LeftOut != "" {
			r.leftOut++
			fmt.Printf("%s:%d: left out: %s\n", file, b.Line, b.LeftOut)
		}
	}
	blocks = slices.DeleteFunc(blocks, func(b block) bool { return b.LeftOut != "" })
	switch {
	case len(blocks) == 0:
		return nil
	case r.list:
		r.ran += len(blocks)
		return nil
	}
	if err := r.onCluster(ctx, file, blocks); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return ctx.Err()
}
