package cluster

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"
)

// kubernetesComponents are the names under which the one Kubernetes binary is
// called.
func kubernetesComponents() []string {
	return []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"}
}

// unit is something that is built once and kept in the cache.
type unit struct {
	// name and dir (relative to the repository's root) of the module or
	// package; for people and for the cache.
	name, dir string
	// sources are directories whose files decide whether a build is needed,
	// relative to the repository's root.
	sources []string
	// files maps the name of each binary to the package it is built from.
	files map[string]string
	flags []string
	cgo   bool
	// sourcesInC maps the name of each C program to a directory of a module, by its import
	// path, all of whose files it is made of.
	sourcesInC map[string]string
	// links are symbolic links to the binary with the name target.
	links  []string
	target string
	// note says how long a first build takes, for people.
	note string
}

func (u *unit) environment() []string {
	cgo := "CGO_ENABLED=0"
	if u.cgo {
		cgo = "CGO_ENABLED=1"
	}
	return append(os.Environ(), cgo, "GOWORK=off")
}

const strip = "-ldflags=-s -w"

// Versions of the programs that a cluster can be made of.
type Versions struct {
	// Kubernetes is a minor version, "1.37".
	Kubernetes string
	// Runtime is one of Runtimes; empty: DefaultRuntime.
	Runtime string
}

// units lists what a cluster of the given versions is made of. kubernetesTag is the
// module's exact version, such as v1.37.1.
func units(versions Versions, kubernetesTag string) []unit {
	runc := moduleUnit("runc", map[string]string{"runc": "github.com/opencontainers/runc"})
	runc.cgo = true
	runc.flags = []string{"-tags=seccomp,netgo,osusergo", strip + " -linkmode external -extldflags -static"}
	helm := moduleUnit("helm", map[string]string{"helm": "helm.sh/helm/v4/cmd/helm"})
	helm.note = "about 3 minutes on 2 cores"
	all := []unit{
		{
			name: "machine", dir: ".", files: map[string]string{"machine-init": "./sim/cluster/machine/init"}, flags: []string{strip},
			sources: []string{"sim/cluster/machine", "sim/cluster/machine/init"},
		},
		runc,
		moduleUnit("etcd", map[string]string{"etcd": "go.etcd.io/etcd/server/v3"}),
		moduleUnit("cni", map[string]string{
			"bridge":     "github.com/containernetworking/plugins/plugins/main/bridge",
			"loopback":   "github.com/containernetworking/plugins/plugins/main/loopback",
			"host-local": "github.com/containernetworking/plugins/plugins/ipam/host-local",
		}),
		moduleUnit("crictl", map[string]string{"crictl": "sigs.k8s.io/cri-tools/cmd/crictl"}),
		kubernetesUnit(versions.Kubernetes, kubernetesTag),
		helm,
	}
	return append(all, versions.runtime().units...)
}

func (v Versions) runtime() containerRuntime {
	return containerRuntimes()[cmp.Or(v.Runtime, DefaultRuntime)]
}

// moduleUnit is a Go module of its own in the directory of that name.
func moduleUnit(name string, files map[string]string) unit {
	dir := "sim/cluster/" + name
	return unit{name: name, dir: dir, sources: []string{dir}, files: files, flags: []string{strip}}
}

func kubernetesUnit(version, tag string) unit {
	dir := "sim/cluster/kubernetes/" + version
	major, rest, _ := strings.Cut(strings.TrimPrefix(tag, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	stamp := "-X k8s.io/component-base/version."
	return unit{
		name: "kubernetes-" + version, dir: dir, sources: []string{dir},
		files:  map[string]string{"kubernetes": ".", "kubectl": "k8s.io/kubernetes/cmd/kubectl"},
		flags:  []string{fmt.Sprintf("%s %sgitVersion=%s %sgitMajor=%s %sgitMinor=%s", strip, stamp, tag, stamp, major, stamp, minor)},
		target: "kubernetes", links: kubernetesComponents(),
		note: "about 9 minutes on 2 cores",
	}
}

var kubernetesRequirement = regexp.MustCompile(`(?m)^\s*k8s\.io/kubernetes (v\S+)`)

// kubernetesTag reads which patch release a version directory pins.
func kubernetesTag(root, version string) (string, error) {
	dir := filepath.Join(root, "sim/cluster/kubernetes")
	data, err := os.ReadFile(filepath.Join(dir, version, "go.mod"))
	if errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("there is no Kubernetes %q to build: sim/cluster/kubernetes has %s", version, strings.Join(entryNames(dir), ", "))
	}
	if err != nil {
		return "", fmt.Errorf("read the pinned Kubernetes version: %w", err)
	}
	match := kubernetesRequirement.FindSubmatch(data)
	if match == nil {
		return "", fmt.Errorf("sim/cluster/kubernetes/%s/go.mod does not require k8s.io/kubernetes", version)
	}
	return string(match[1]), nil
}

func entryNames(dir string) []string {
	entries, _ := os.ReadDir(dir) // an unreadable directory has no names to offer
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

var moduleName = regexp.MustCompile(`(?m)^module .*$`)

// key names a build: it changes with the sources, the Go version and the flags. A
// module's own name doesn't count, so a module that moves isn't built again.
func (u *unit) key(root, goVersion string) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, goVersion, runtime.GOARCH, u.cgo, u.flags, slices.Sorted(maps.Keys(u.files)))
	if len(u.sourcesInC) > 0 {
		fmt.Fprintln(h, slices.Sorted(maps.Keys(u.sourcesInC)))
	}
	for _, dir := range u.sources {
		entries, err := os.ReadDir(filepath.Join(root, dir))
		if err != nil {
			return "", fmt.Errorf("read the sources of %s: %w", u.name, err)
		}
		for _, entry := range entries {
			if !isSource(entry.Name()) {
				continue
			}
			data, err := os.ReadFile(filepath.Join(root, dir, entry.Name()))
			if err != nil {
				return "", fmt.Errorf("read the sources of %s: %w", u.name, err)
			}
			if entry.Name() == "go.mod" {
				data = moduleName.ReplaceAll(data, nil)
			}
			fmt.Fprintf(h, "%s %x\n", entry.Name(), sha256.Sum256(data))
		}
	}
	return hex.EncodeToString(h.Sum(nil))[:12], nil
}

func isSource(name string) bool {
	return name == "go.mod" || name == "go.sum" || strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go")
}

// build makes dir with the unit's binaries. It leaves nothing half done: dir
// appears complete or not at all.
func (u *unit) build(ctx context.Context, root, dir string, log io.Writer) error {
	temporary := dir + ".building"
	if err := os.RemoveAll(temporary); err != nil {
		return fmt.Errorf("clear %s: %w", temporary, err)
	}
	if err := os.MkdirAll(temporary, 0o755); err != nil {
		return fmt.Errorf("make the cache directory: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(u.files)) {
		if err := u.compile(ctx, root, filepath.Join(temporary, name), u.files[name], log); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(u.sourcesInC)) {
		if err := u.compileC(ctx, root, filepath.Join(temporary, name), u.sourcesInC[name], log); err != nil {
			return err
		}
	}
	for _, link := range u.links {
		if err := os.Symlink(u.target, filepath.Join(temporary, link)); err != nil {
			return fmt.Errorf("link %s: %w", link, err)
		}
	}
	if err := os.Rename(temporary, dir); err != nil {
		return fmt.Errorf("put the build of %s in place: %w", u.name, err)
	}
	return nil
}

func (u *unit) compile(ctx context.Context, root, output, pkg string, log io.Writer) error {
	done := progress(log, fmt.Sprintf("building %s (%s)%s", filepath.Base(output), u.name, parenthesis(u.note)))
	args := append([]string{"build", "-trimpath", "-buildvcs=false", "-o", output}, u.flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	cmd.Dir, cmd.Env = filepath.Join(root, u.dir), u.environment()
	out, err := cmd.CombinedOutput()
	done()
	if err != nil {
		return fmt.Errorf("build %s in %s: %w\n%s", pkg, u.dir, err, lastLines(string(out), 20))
	}
	return nil
}

// compileC builds a C program, linked statically.
func (u *unit) compileC(ctx context.Context, root, output, pkg string, log io.Writer) error {
	done := progress(log, fmt.Sprintf("building %s (%s)", filepath.Base(output), u.name))
	defer done()
	dir, err := u.moduleDir(ctx, root, pkg)
	if err != nil {
		return err
	}
	sources, err := filepath.Glob(filepath.Join(dir, "*.c"))
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, "gcc", append([]string{"-std=c99", "-O2", "-s", "-static", "-o", output}, sources...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, lastLines(string(out), 20))
	}
	return nil
}

// moduleDir is where a directory of a module is on this host. pkg is no Go package.
func (u *unit) moduleDir(ctx context.Context, root, pkg string) (string, error) {
	parts := strings.SplitN(pkg, "/", 4) // host, owner, repository and the rest
	dir, err := u.modulePath(ctx, root, strings.Join(parts[:3], "/"))
	return filepath.Join(dir, parts[3]), err
}

// modulePath is where a module is on this host.
func (u *unit) modulePath(ctx context.Context, root, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module)
	cmd.Dir, cmd.Env = filepath.Join(root, u.dir), u.environment()
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("find the module %s: %w", module, err)
	}
	return strings.TrimSpace(string(out)), nil
}

func parenthesis(note string) string {
	if note == "" {
		return ""
	}
	return ", the first time " + note
}

// progress prints what is being done and, every ten seconds, for how long. The
// returned function ends it.
func progress(log io.Writer, what string) (done func()) {
	fmt.Fprintln(log, what)
	begin := time.Now()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		ticker := time.NewTicker(10 * time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-stop:
				return
			case <-ticker.C:
				fmt.Fprintf(log, "%s: %s\n", what, time.Since(begin).Round(time.Second))
			}
		}
	}()
	return func() { close(stop); <-stopped }
}

// CacheDir is where built binaries are kept: $TESSERA_CACHE, or "tessera" in
// the user's cache directory.
func CacheDir() (string, error) {
	if dir := os.Getenv("TESSERA_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache directory: %w (set TESSERA_CACHE)", err)
	}
	return filepath.Join(dir, "tessera"), nil
}

// repositoryRoot finds the checkout that the working directory is in.
func repositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the checkout: %w", err)
	}
	for ; ; dir = filepath.Dir(dir) {
		data, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(data), "module github.com/tessera-dra/tessera\n") {
			return dir, nil
		}
		if dir == "/" {
			return "", errors.New("not inside a checkout of github.com/tessera-dra/tessera, from which the binaries are built: change to one, or name a directory of built binaries with --bin-dir or TESSERA_BIN_DIR")
		}
	}
}

// lockDirs is the directory of the cache with the locks, each of which is a directory.
const lockDirs = "locks"

// builder builds units from this checkout into the cache.
type builder struct {
	root, cache, goVersion string
	log                    io.Writer
}

func newBuilder(ctx context.Context, log io.Writer) (*builder, error) {
	root, err := repositoryRoot()
	if err != nil {
		return nil, err
	}
	cache, err := CacheDir()
	if err != nil {
		return nil, err
	}
	goVersion, err := exec.CommandContext(ctx, "go", "env", "GOVERSION").Output()
	if err != nil {
		return nil, fmt.Errorf("run go, which builds the cluster's binaries: %w", err)
	}
	return &builder{root: root, cache: cache, goVersion: strings.TrimSpace(string(goVersion)), log: log}, nil
}

// Build makes sure that the binaries of these versions and the base images are in
// the cache, and lays them out in dir, which then works on any host of this
// architecture as a --bin-dir. Several processes may build at once; each waits for
// the units that another is building. log gets lines for people.
func Build(ctx context.Context, versions Versions, dir string, log io.Writer) error {
	b, err := newBuilder(ctx, log)
	if err != nil {
		return err
	}
	tag, err := kubernetesTag(b.root, versions.Kubernetes)
	if err != nil {
		return err
	}
	if err := b.ensurePackages(ctx, versions.runtime().packages); err != nil {
		return err
	}
	for _, u := range units(versions, tag) {
		if _, err := b.ensure(ctx, &u, dir); err != nil {
			return err
		}
	}
	return b.ensureBaseImages(ctx, dir)
}

// ensure returns the cache directory that holds the unit's binaries, building
// them first if they aren't there, and drops its earlier builds. It also puts them
// into dir, unless that is empty: once the unit isn't locked, somebody with other
// sources may drop them.
func (b *builder) ensure(ctx context.Context, u *unit, dir string) (string, error) {
	key, err := u.key(b.root, b.goVersion)
	if err != nil {
		return "", err
	}
	unlock, err := lockDir(filepath.Join(b.cache, lockDirs, u.name), b.log)
	if err != nil {
		return "", err
	}
	defer unlock()
	built := filepath.Join(b.cache, u.name+"-"+key)
	if _, err := os.Stat(built); err != nil {
		if err := b.make(ctx, u, built); err != nil {
			return "", err
		}
	}
	if dir == "" {
		return built, nil
	}
	return built, linkAll(built, dir)
}

// make builds a unit into a directory of the cache.
func (b *builder) make(ctx context.Context, u *unit, dir string) error {
	if u.cgo {
		if err := b.ensurePackages(ctx, needs()); err != nil {
			return err
		}
	}
	if err := u.build(ctx, b.root, dir, b.log); err != nil {
		return err
	}
	return dropOthers(b.cache, u.name, filepath.Base(dir))
}

// ensurePackages installs distribution packages, one process at a time.
func (b *builder) ensurePackages(ctx context.Context, wanted []need) error {
	unlock, err := lockDir(filepath.Join(b.cache, lockDirs, "packages"), b.log)
	if err != nil {
		return err
	}
	defer unlock()
	return ensurePackages(ctx, wanted, b.log)
}

func dropOthers(cache, name, keep string) error {
	for _, entry := range entryNames(cache) {
		rest, isBuild := strings.CutPrefix(entry, name+"-")
		if !isBuild || entry == keep || len(rest) != 12 {
			continue
		}
		if err := os.RemoveAll(filepath.Join(cache, entry)); err != nil {
			return fmt.Errorf("drop an old build: %w", err)
		}
	}
	return nil
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
