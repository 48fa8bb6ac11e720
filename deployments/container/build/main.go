// Command build makes Tessera's container image without Docker, for the local
// cluster and for anybody who has Go and a C compiler but no container tool:
//
//	go run ./deployments/container/build
//
// The image holds what deployments/container/Dockerfile puts into it, with this
// machine's glibc in place of a base image's. It is written to
// _output/images/tessera.tar, and only when something in it changed; `go build`
// does the rest of the caching.
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
	"strings"
	"syscall"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

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
	root, version, err := checkout()
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
	entries, err := contents(ctx, root, dir, version, log)
	if err != nil {
		return err
	}
	written, err := image.Write(*output, *name, entries, v1.Config{
		Env:    []string{"PATH=/usr/bin"},
		Labels: labels(version),
	})
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

// labels are those of the OCI image specification, as the Dockerfile has them.
func labels(version string) map[string]string {
	const prefix = "org.opencontainers.image."
	return map[string]string{
		prefix + "title":       "Tessera",
		prefix + "description": "A Kubernetes DRA driver for NVIDIA GPUs",
		prefix + "source":      "https://github.com/tessera-dra/tessera",
		prefix + "licenses":    "Apache-2.0",
		prefix + "version":     version,
	}
}

// checkout finds the repository's root above the working directory, and the
// product's version in the chart.
func checkout() (root, version string, err error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", "", fmt.Errorf("find the checkout: %w", err)
	}
	const chart = "deployments/helm/tessera/Chart.yaml"
	for ; ; dir = filepath.Dir(dir) {
		data, err := os.ReadFile(filepath.Join(dir, chart))
		if err == nil {
			version, err := appVersion(string(data))
			return dir, version, err
		}
		if dir == filepath.Dir(dir) {
			return "", "", fmt.Errorf("no %s here or above: run this inside a checkout of Tessera", chart)
		}
	}
}

func appVersion(chart string) (string, error) {
	for line := range strings.Lines(chart) {
		if value, found := strings.CutPrefix(line, "appVersion:"); found {
			return strings.Trim(strings.TrimSpace(value), `"`), nil
		}
	}
	return "", fmt.Errorf("the file Chart.yaml has no appVersion")
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

// contents builds the programs in dir and lists everything that goes into the
// image.
func contents(ctx context.Context, root, dir, version string, log io.Writer) ([]image.Entry, error) {
	entries := []image.Entry{{Path: "/tmp", Mode: 0o777 | os.ModeSticky}}
	var built []string
	for _, p := range programs(version) {
		fmt.Fprintf(log, "building %s\n", p.path)
		begin := time.Now()
		file := filepath.Join(dir, filepath.Base(p.path))
		if err := p.build(ctx, root, file); err != nil {
			return nil, err
		}
		if took := time.Since(begin); took > 5*time.Second {
			fmt.Fprintf(log, "building %s took %s\n", p.path, took.Round(time.Second))
		}
		entries = append(entries, image.Entry{Path: p.path, Source: file})
		built = append(built, file)
	}
	libraries, err := glibc(ctx, built)
	if err != nil {
		return nil, err
	}
	return append(entries, libraries...), nil
}
