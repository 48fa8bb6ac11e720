package main

import (
	"bytes"
	"cmp"
	"context"
	"debug/buildinfo"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"

	"github.com/tessera-dra/tessera/deployments/container/image"
)

// writeSBOM writes a CycloneDX document of one platform's image: its files, the
// Go modules that the linker recorded in each program, and the Debian packages
// that the C library is of. Licenses and the graph between modules aren't in
// there, since a program doesn't record them.
func writeSBOM(ctx context.Context, s source, p image.Platform, digest, file string) error {
	packages, err := debianPackages(ctx, p.Architecture)
	if err != nil {
		return err
	}
	bom, err := sbom(s, p, digest, packages)
	if err != nil {
		return err
	}
	return writeBOM(bom, file)
}

// writeProgramSBOM writes a CycloneDX document of a program in Go without C.
func writeProgramSBOM(s source, name, program, purl, file string) error {
	modules, err := goModules(program, s.version)
	if err != nil {
		return fmt.Errorf("read the modules of %s: %w", name, err)
	}
	root := cdx.Component{BOMRef: "program", Type: cdx.ComponentTypeApplication, Name: kubectlGPU, Version: s.version, PackageURL: purl}
	bom, err := newBOM(s, root, []described{{path: name, source: program, madeOf: modules}})
	if err != nil {
		return err
	}
	return writeBOM(bom, file)
}

func writeBOM(bom *cdx.BOM, file string) error {
	var text bytes.Buffer
	// Tools are slow to learn a new version of the specification.
	encoder := cdx.NewBOMEncoder(&text, cdx.BOMFileFormatJSON).SetPretty(true).SetEscapeHTML(false)
	if err := encoder.EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	if err := os.WriteFile(file, text.Bytes(), 0o644); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

// sbom describes an image. packages maps the file name of a library to its package, and ""
// to the package of all other libraries.
func sbom(s source, p image.Platform, digest string, packages map[string]cdx.Component) (*cdx.BOM, error) {
	root := cdx.Component{
		BOMRef: "image", Type: cdx.ComponentTypeContainer, Name: "tessera", Version: s.version,
		PackageURL: fmt.Sprintf("pkg:oci/tessera@%s?arch=%s&tag=%s", url.QueryEscape(digest), p.Architecture, s.version),
	}
	var files []described
	for _, entry := range p.Entries {
		if entry.Source == "" {
			continue
		}
		modules, err := modulesOf(entry, s.version, packages)
		if err != nil {
			return nil, err
		}
		files = append(files, described{entry.Path, entry.Source, modules})
	}
	return newBOM(s, root, files)
}

// described is a file, and the components that it was made of.
type described struct {
	path, source string
	madeOf       []cdx.Component
}

// newBOM describes files that belong to root.
func newBOM(s source, root cdx.Component, files []described) (*cdx.BOM, error) {
	components := map[string]cdx.Component{}
	needs := map[string][]string{}
	for _, f := range files {
		sum, err := checksum(f.source)
		if err != nil {
			return nil, err
		}
		c := cdx.Component{
			BOMRef: f.path, Type: cdx.ComponentTypeFile, Name: f.path,
			Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: sum}},
		}
		for _, m := range f.madeOf {
			components[m.BOMRef] = m
			needs[c.BOMRef] = append(needs[c.BOMRef], m.BOMRef)
		}
		components[c.BOMRef] = c
		needs[root.BOMRef] = append(needs[root.BOMRef], c.BOMRef)
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{
		Timestamp: s.time.Format("2006-01-02T15:04:05Z"),
		Component: &root,
	}
	list := slices.SortedFunc(maps.Values(components), func(a, b cdx.Component) int { return cmp.Compare(a.BOMRef, b.BOMRef) })
	bom.Components = &list
	var dependencies []cdx.Dependency
	for _, ref := range slices.Sorted(maps.Keys(needs)) {
		slices.Sort(needs[ref])
		of := slices.Compact(needs[ref])
		dependencies = append(dependencies, cdx.Dependency{Ref: ref, Dependencies: &of})
	}
	bom.Dependencies = &dependencies
	return bom, nil
}

// modulesOf returns what a file of the image was made of.
func modulesOf(entry image.Entry, version string, packages map[string]cdx.Component) ([]cdx.Component, error) {
	if path.Dir(entry.Path) == "/usr/lib/tessera" { // in C, of this repository
		return []cdx.Component{goModule("github.com/tessera-dra/tessera", version)}, nil
	}
	modules, err := goModules(entry.Source, version)
	if err != nil {
		if path.Dir(entry.Path) == "/usr/bin" {
			return nil, fmt.Errorf("read the modules of %s: %w", entry.Path, err)
		}
		c, found := packages[path.Base(entry.Path)]
		if !found {
			c = packages[""]
		}
		return []cdx.Component{c}, nil
	}
	return modules, nil
}

// goModules returns the modules that the linker recorded in a program, and Go's own.
func goModules(program, version string) ([]cdx.Component, error) {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return nil, err
	}
	modules := []cdx.Component{goModule("stdlib", strings.TrimPrefix(info.GoVersion, "go"))}
	for _, m := range append([]*debug.Module{&info.Main}, info.Deps...) {
		if m.Replace != nil {
			m = m.Replace
		}
		if m.Version == "" || m.Version == "(devel)" {
			m.Version = version // of this repository
		}
		modules = append(modules, goModule(m.Path, m.Version))
	}
	return modules, nil
}

func goModule(name, version string) cdx.Component {
	purl := "pkg:golang/" + name + "@" + url.PathEscape(version)
	return cdx.Component{BOMRef: purl, Type: cdx.ComponentTypeLibrary, Name: name, Version: version, PackageURL: purl}
}

// debianPackages returns the packages that the libraries of an architecture come
// from: the machine's own, or the cross compiler's.
func debianPackages(ctx context.Context, architecture string) (map[string]cdx.Component, error) {
	suffix := ""
	if architecture != runtime.GOARCH {
		suffix = "-" + architecture + "-cross"
	}
	packages := map[string]cdx.Component{}
	for file, name := range map[string]string{"": "libc6", "libgcc_s.so.1": "libgcc-s1"} {
		name += suffix
		out, err := exec.CommandContext(ctx, "dpkg-query", "--show", "--showformat=${Version}", name).Output()
		if err != nil {
			return nil, fmt.Errorf("ask dpkg for the version of %s: %w (a release is made on Debian)", name, err)
		}
		purl := fmt.Sprintf("pkg:deb/debian/%s@%s", name, url.QueryEscape(string(out)))
		packages[file] = cdx.Component{BOMRef: purl, Type: cdx.ComponentTypeLibrary, Name: name, Version: string(out), PackageURL: purl}
	}
	return packages, nil
}
