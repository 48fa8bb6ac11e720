package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/tessera-dra/tessera/sim/nvmlsim/library"
)

// platformPrograms are the programs of this checkout that the nodes of a platform run, with
// their packages.
func (c *Cluster) platformPrograms() map[string]string {
	programs := map[string]string{}
	if c.hasDriver() {
		programs["nvmlsim"] = "./sim/cmd/nvmlsim"
	}
	if c.platform.Node.DevicePlugin {
		programs["deviceplugin"] = "./sim/cmd/deviceplugin"
	}
	return programs
}

// buildPlatformPrograms puts the programs of a platform's nodes, and the simulator's library, into
// the nodes' directory of programs. Go's own cache makes it quick the second time.
func (c *Cluster) buildPlatformPrograms(ctx context.Context) error {
	if c.options.BinDir != "" {
		return c.checkPlatformPrograms()
	}
	for name, pkg := range c.platformPrograms() {
		root, err := repositoryRoot()
		if err != nil {
			return err
		}
		done := progress(c.options.Log, fmt.Sprintf("building %s (platform %s)", name, c.Platform()))
		build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", strip, "-o", c.nodeBinary(name), pkg)
		build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
		out, err := build.CombinedOutput()
		done()
		if err != nil {
			return fmt.Errorf("build %s: %w: %s", pkg, err, lastLines(string(out), 20))
		}
	}
	if !c.hasDriver() {
		return nil
	}
	return library.Build(ctx, c.nodeBinary(library.Name))
}

// checkPlatformPrograms wants what buildPlatformPrograms builds.
func (c *Cluster) checkPlatformPrograms() error {
	programs := c.platformPrograms()
	if c.hasDriver() {
		programs[library.Name] = "./sim/cmd/nvmlsim/lib"
	}
	var errs []error
	for name, pkg := range programs {
		if _, err := os.Stat(c.nodeBinary(name)); err != nil {
			errs = append(errs, fmt.Errorf("%s has no %s, which nodes of platform %s need: build it there from %s", c.options.BinDir, name, c.Platform(), pkg))
		}
	}
	return errors.Join(errs...)
}

func (c *Cluster) nodeBinary(name string) string { return filepath.Join(c.nodeBinDir(), name) }
