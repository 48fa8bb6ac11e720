// Command build makes Tessera's container image without Docker, for the local
// cluster and for anybody who has Go and a C compiler but no container tool:
//
//	go run ./deployments/container/build
//
// The image is of this machine's architecture, and holds what package contents
// lists. It is written to _output/images/tessera.tar, and only when something in
// it changed; `go build` does the rest of the caching.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/deployments/container/contents"
	"github.com/tessera-dra/tessera/deployments/container/image"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		os.Exit(1) //nolint:gocritic // stop() only restores signals
	}
}

func run(ctx context.Context, args []string, log io.Writer) error {
	root, version, err := contents.Checkout()
	if err != nil {
		return err
	}
	flags := flag.NewFlagSet("build", flag.ContinueOnError)
	flags.SetOutput(log)
	output := flags.String("output", filepath.Join(root, "_output/images/tessera.tar"), "archive to write")
	name := flags.String("image", "localhost/tessera:"+version, "name of the image, for the chart's image.repository and image.tag")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("flags: %w", err)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	dir := filepath.Join(root, "_output/images/build")
	unlock, err := lock(dir)
	if err != nil {
		return err
	}
	defer unlock()
	entries, err := contents.Build(ctx, contents.Target{Root: root, Dir: dir, Architecture: runtime.GOARCH, Version: version}, log)
	if err != nil {
		return err
	}
	written, err := image.Write(*output, *name, entries, contents.Config(version))
	if err != nil {
		return err
	}
	state := "unchanged"
	if written {
		state = "written"
	}
	fmt.Fprintf(log, "%s: %s %s\n", *name, *output, state)
	return nil
}

// lock makes the build directory and keeps others that build in the same
// checkout out of it.
func lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the build directory: %w", err)
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("lock the build directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return func() { _ = f.Close() }, nil // closing unlocks
}
