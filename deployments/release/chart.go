package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/tessera-dra/tessera/deployments/container/contents"
	"github.com/tessera-dra/tessera/sim/cluster"
)

// writeChart packs the chart with the release's version, for the chart and for
// the image's tag.
func writeChart(ctx context.Context, s source, dir string, log io.Writer) error {
	helm, err := cluster.Tool(ctx, "helm", log)
	if err != nil {
		return fmt.Errorf("get Helm: %w", err)
	}
	return packChart(ctx, helm, filepath.Join(s.root, contents.Chart), dir, s.version, s.time)
}

// packChart packs a copy of the chart whose files have one time: Helm puts their
// times into the package.
func packChart(ctx context.Context, helm, chart, dir, version string, at time.Time) (err error) {
	scratch, err := os.MkdirTemp("", "chart-")
	if err != nil {
		return fmt.Errorf("copy the chart: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(scratch)) }()
	copied := filepath.Join(scratch, filepath.Base(chart))
	if err := os.CopyFS(copied, os.DirFS(chart)); err != nil {
		return fmt.Errorf("copy the chart: %w", err)
	}
	err = filepath.WalkDir(copied, func(file string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Chtimes(file, at, at)) //nolint:gosec // the copy is in a directory of its own
	})
	if err != nil {
		return fmt.Errorf("set the times of the chart's files: %w", err)
	}
	out, err := exec.CommandContext(ctx, helm, "package", copied, "--version", version, "--app-version", version, "--destination", dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("helm package: %w\n%s", err, out)
	}
	return nil
}
