// Package contents builds Tessera's programs and lists the files of its image,
// for one architecture. The image holds what deployments/container/Dockerfile
// puts into it, with the C compiler's glibc in place of a base image's.
//
// It serves the builders of this repository (deployments/container/build and
// deployments/release); the product does not import it.
package contents

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/tessera-dra/tessera/deployments/container/image"
)

// Target describes a build.
type Target struct {
	// Root is the checkout.
	Root string
	// Dir receives the programs, of one architecture only.
	Dir string
	// Architecture is one of Architectures.
	Architecture string
	// Version is the product's, without a "v".
	Version string
}

// Build compiles the programs and lists everything that goes into the image. It
// logs each program, because one may take minutes.
func Build(ctx context.Context, t Target, log io.Writer) ([]image.Entry, error) {
	platform, err := platformOf(t.Architecture)
	if err != nil {
		return nil, err
	}
	if _, err := exec.LookPath(platform.compiler()); err != nil {
		return nil, fmt.Errorf("find the C compiler for %s: %w (%s)", t.Architecture, err, platform.install())
	}
	entries := []image.Entry{{Path: "/tmp", Mode: 0o777 | os.ModeSticky}}
	var built []string
	for _, p := range programs(t.Version) {
		fmt.Fprintf(log, "building %s for %s\n", p.path, t.Architecture)
		begin := time.Now()
		file := filepath.Join(t.Dir, filepath.Base(p.path))
		if err := p.build(ctx, t.Root, file, platform); err != nil {
			return nil, err
		}
		if took := time.Since(begin); took > 5*time.Second {
			fmt.Fprintf(log, "building %s took %s\n", p.path, took.Round(time.Second))
		}
		entries = append(entries, image.Entry{Path: p.path, Source: file})
		built = append(built, file)
	}
	libraries, err := glibc(ctx, platform, built)
	if err != nil {
		return nil, err
	}
	return append(entries, libraries...), nil
}

// user is the image's user and group. From a number the kubelet knows that it isn't root
// (runAsNonRoot).
const user = "65532:65532"

// Config is the image's configuration.
func Config(version string) v1.Config {
	return v1.Config{User: user, Env: []string{"PATH=/usr/bin"}, Labels: labels(version)}
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

// Chart is the chart's directory in a checkout.
const Chart = "deployments/helm/tessera"

// Checkout finds the repository's root above the working directory, and the
// product's version in the chart.
func Checkout() (root, version string, err error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", "", fmt.Errorf("find the checkout: %w", err)
	}
	const chart = Chart + "/Chart.yaml"
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
