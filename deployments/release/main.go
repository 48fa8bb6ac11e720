// Command release makes everything that a release of Tessera consists of, from
// a commit:
//
//	make release VERSION=0.2.0
//
// In _output/release/VERSION it writes the image for all platforms as one OCI
// archive, the chart, an SBOM for each platform, archives of kubectl-gpu for
// people's machines with krew's manifest of them, the changelog since the last
// tag, and checksums of these. It publishes nothing. The same commit gives the
// same bytes, in any directory: see docs/dev/release.md.
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
	"syscall"

	"github.com/Masterminds/semver/v3"

	"github.com/tessera-dra/tessera/deployments/container/contents"
	"github.com/tessera-dra/tessera/deployments/container/image"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1) //nolint:gocritic // stop() only restores signals
	}
}

func run(ctx context.Context, args []string, log io.Writer) error {
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	flags.SetOutput(log)
	version := flags.String("version", "", "version to release, such as 0.2.0 or 0.2.0-rc.1")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("flags: %w", err)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if err := checkVersion(*version); err != nil {
		return err
	}
	root, _, err := contents.Checkout()
	if err != nil {
		return err
	}
	source, err := readSource(ctx, root, *version)
	if err != nil {
		return err
	}
	return release(ctx, source, log)
}

// checkVersion accepts a semantic version as the chart and the image's tag can
// both have it.
func checkVersion(version string) error {
	if version == "" {
		return fmt.Errorf("no version: make release VERSION=0.2.0")
	}
	v, err := semver.StrictNewVersion(version)
	if err != nil {
		return fmt.Errorf("version %q: %w: write a semantic version without a v, such as 0.2.0 or 0.2.0-rc.1", version, err)
	}
	if v.Metadata() != "" {
		return fmt.Errorf("version %q: the tag of an image can't have a +: leave out the build metadata", version)
	}
	return nil
}

// release builds everything in a directory beside the final one, so that a
// release is there completely or not at all.
func release(ctx context.Context, s source, log io.Writer) (err error) {
	base := filepath.Join(s.root, "_output/release")
	if err := os.MkdirAll(base, 0o755); err != nil {
		return fmt.Errorf("make the directory of releases: %w", err)
	}
	dir, err := os.MkdirTemp(base, "unfinished-")
	if err != nil {
		return fmt.Errorf("make the directory of the release: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.Chmod(dir, 0o755); err != nil {
		return fmt.Errorf("make the directory of the release readable: %w", err)
	}
	index, err := writeImages(ctx, s, dir, log)
	if err != nil {
		return err
	}
	fmt.Fprintln(log, "packing the chart (Helm is built first if the cache has none: some minutes)")
	if err := writeChart(ctx, s, dir, log); err != nil {
		return err
	}
	if err := writePlugin(ctx, s, dir, log); err != nil {
		return err
	}
	if err := writeChangelog(ctx, s, index.Digest, filepath.Join(dir, "CHANGELOG.md")); err != nil {
		return err
	}
	if err := writeChecksums(dir); err != nil {
		return err
	}
	final := filepath.Join(base, s.version)
	if err := os.RemoveAll(final); err != nil {
		return fmt.Errorf("remove the release that was there: %w", err)
	}
	if err := os.Rename(dir, final); err != nil {
		return fmt.Errorf("finish the release: %w", err)
	}
	fmt.Fprintf(log, "image index %s\nwritten: %s\n", index.Digest, final)
	return nil
}

// writeImages builds the image for each platform, and their SBOMs.
func writeImages(ctx context.Context, s source, dir string, log io.Writer) (index image.Index, err error) {
	build, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return image.Index{}, fmt.Errorf("make the build directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(build)) }()
	var platforms []image.Platform
	for _, architecture := range contents.Architectures() {
		target := contents.Target{Root: s.root, Dir: filepath.Join(build, architecture), Architecture: architecture, Version: s.version}
		entries, err := contents.Build(ctx, target, log)
		if err != nil {
			return image.Index{}, err
		}
		platforms = append(platforms, image.Platform{
			Architecture: architecture, Entries: entries, Config: contents.Config(s.version),
		})
	}
	fmt.Fprintln(log, "packing the images")
	archive := filepath.Join(dir, "tessera-"+s.version+"-image.tar")
	index, err = image.WriteIndex(archive, "localhost/tessera:"+s.version, s.time, platforms)
	if err != nil {
		return image.Index{}, err
	}
	for _, p := range platforms {
		file := filepath.Join(dir, fmt.Sprintf("tessera-%s-linux-%s.cdx.json", s.version, p.Architecture))
		if err := writeSBOM(ctx, s, p, index.Images[p.Architecture], file); err != nil {
			return image.Index{}, fmt.Errorf("SBOM of the image for %s: %w", p.Architecture, err)
		}
	}
	return index, nil
}
