package contents

import (
	"fmt"
	"runtime"
	"strings"
)

// platform is an architecture that NVIDIA has a Linux driver for.
type platform struct {
	architecture string
	// triple names the C compiler, and the directory where the loader looks for
	// libraries, as Debian does.
	triple string
}

func platforms() []platform {
	return []platform{{"amd64", "x86_64-linux-gnu"}, {"arm64", "aarch64-linux-gnu"}}
}

// Architectures lists what the image can be built for, as Go names them.
func Architectures() []string {
	var names []string
	for _, p := range platforms() {
		names = append(names, p.architecture)
	}
	return names
}

func platformOf(architecture string) (platform, error) {
	for _, p := range platforms() {
		if p.architecture == architecture {
			return p, nil
		}
	}
	return platform{}, fmt.Errorf("there is no NVIDIA driver for %s: build for %s", architecture, strings.Join(Architectures(), " or "))
}

// native reports whether programs of the platform run on this machine.
func (p platform) native() bool { return p.architecture == runtime.GOARCH }

// compiler is the C compiler for the platform.
func (p platform) compiler() string {
	if p.native() {
		return "gcc"
	}
	return p.triple + "-gcc"
}

// install says how to get the compiler and its C library on Debian.
func (p platform) install() string {
	if p.native() {
		return "on Debian: apt-get install gcc libc6-dev"
	}
	return fmt.Sprintf("on Debian: apt-get install gcc-%s libc6-dev-%s-cross", strings.ReplaceAll(p.triple, "_", "-"), p.architecture)
}

// cgoFlags are the Makefile's: other ones would give other programs.
const cgoFlags = "-O2 -g -Wno-deprecated-declarations"

// environment returns the variables of go for a program. They take the place of
// the user's own, so that everybody builds the same.
func (p platform) environment(cgo bool) []string {
	enabled := "0"
	if cgo {
		enabled = "1"
	}
	return []string{
		"GOOS=linux", "GOARCH=" + p.architecture, "GOAMD64=v1", "GOARM64=v8.0", "GOFLAGS=-mod=readonly",
		"CGO_ENABLED=" + enabled, "CC=" + p.compiler(), "CGO_CFLAGS=" + cgoFlags, "CGO_LDFLAGS=-O2 -g",
	}
}
