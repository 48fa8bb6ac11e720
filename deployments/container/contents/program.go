package contents

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
)

// program is one file that is built for the image.
type program struct {
	// path in the image.
	path string
	// pkg is the package to build, or to run if it builds the file itself.
	pkg   string
	run   bool
	cgo   bool
	flags []string
}

// programs lists what deployments/container/Dockerfile builds too.
func programs(version string) []program {
	const strip = "-s -w"
	stamped := "-ldflags=" + strip + " -X main.version=" + version
	return []program{
		{path: "/usr/bin/controller", pkg: "./cmd/controller", flags: []string{stamped}},
		// go-nvml opens the driver's library with dlopen, hence cgo and glibc.
		{path: "/usr/bin/kubelet-plugin", pkg: "./cmd/kubelet-plugin", cgo: true, flags: []string{"-tags=netgo,osusergo,grpcnotrace", stamped}},
		// Static: it needs no C library.
		{path: "/usr/bin/mps-supervisor", pkg: "./cmd/mps-supervisor", flags: []string{stamped}},
		// The hook runs on the host, whose C library may be older than ours or
		// another one: static, it needs none.
		{
			path: "/usr/bin/nvidia-cdi-hook", pkg: "./cmd/cdi-hook", cgo: true,
			flags: []string{"-tags=netgo,osusergo", "-ldflags=" + strip + " -linkmode=external -extldflags=-static"},
		},
		{path: "/usr/bin/nvmlsim", pkg: "./sim/cmd/nvmlsim", flags: []string{stamped}},
		{path: "/usr/lib/tessera/libnvidia-ml.so.1", pkg: "./sim/cmd/nvmlsim/lib", run: true},
	}
}

// args returns the arguments of go. Version control's state stays out of the
// program, so that a commit without a change to it changes nothing.
func (p program) args(file string) []string {
	if p.run {
		return []string{"run", p.pkg, file}
	}
	return slices.Concat([]string{"build", "-trimpath", "-buildvcs=false"}, p.flags, []string{"-o", file, p.pkg})
}

// build compiles the program into file. A package that builds the file itself
// runs on this machine and is told the compiler only.
func (p program) build(ctx context.Context, root, file string, on platform) error {
	environment := on.environment(p.cgo)
	if p.run {
		environment = append(environment, "GOARCH="+runtime.GOARCH)
	}
	cmd := exec.CommandContext(ctx, "go", p.args(file)...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), environment...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s for %s: %w\n%s", p.pkg, on.architecture, err, out)
	}
	return nil
}
