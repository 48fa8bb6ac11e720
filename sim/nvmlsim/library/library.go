// Package library builds the libnvidia-ml.so.1 of simulated machines. It is
// written in C (src), without threads or state of the hardware: each function
// passes its arguments to an engine (package engine) in a child process, which
// is the nvidia-smi of the driver root under another name. So the library
// starts no threads and no Go runtime in the process that loads it.
//
// It exports every function that nvml.h of the pinned go-nvml declares,
// including the old unversioned names; functions that aren't simulated answer
// NVML_ERROR_NOT_SUPPORTED. "go generate" in package engine writes the
// generated files.
package library

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

//go:embed src
var sources embed.FS

// Name is the file name of the library.
const Name = "libnvidia-ml.so.1"

// Build compiles the library into file, with the C compiler in $CC, or cc.
func Build(ctx context.Context, file string) (err error) {
	dir, err := os.MkdirTemp("", "nvmlsim-library-")
	if err != nil {
		return fmt.Errorf("build %s: %w", Name, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.CopyFS(dir, sources); err != nil {
		return fmt.Errorf("build %s: %w", Name, err)
	}
	objects, err := fs.Glob(sources, "src/*.c")
	if err != nil {
		return fmt.Errorf("build %s: %w", Name, err)
	}
	file, err = filepath.Abs(file)
	if err != nil {
		return fmt.Errorf("build %s: %w", Name, err)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return fmt.Errorf("build %s: %w", Name, err)
	}
	compiler := os.Getenv("CC")
	if compiler == "" {
		compiler = "cc"
	}
	args := append([]string{
		"-shared", "-fPIC", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden",
		"-Wl,-soname," + Name, "-Wl,-z,defs", "-s", "-o", file,
	}, objects...)
	c := exec.CommandContext(ctx, compiler, append(args, "-ldl", "-pthread")...) //nolint:gosec // whoever builds says with which compiler
	c.Dir = dir
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Run(); err != nil {
		return fmt.Errorf("build %s: %s: %w\n%s", Name, compiler, err, &out)
	}
	return nil
}
