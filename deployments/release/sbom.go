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

// sbom describes an image. The packages are the ones that a library can be of,
// by its file name; "" is of all others.
func sbom(s source, p image.Platform, digest string, packages map[string]cdx.Component) (*cdx.BOM, error) {
	root := cdx.Component{
		BOMRef: "image", Type: cdx.ComponentTypeContainer, Name: "tessera", Version: s.version,
		PackageURL: fmt.Sprintf("pkg:oci/tessera@%s?arch=%s&tag=%s", url.QueryEscape(digest), p.Architecture, s.version),
	}
	components := map[string]cdx.Component{}
	needs := map[string][]string{}
	for _, entry := range p.Entries {
		if entry.Source == "" {
			continue
		}
		sum, err := checksum(entry.Source)
		if err != nil {
			return nil, err
		}
		c := cdx.Component{
			BOMRef: entry.Path, Type: cdx.ComponentTypeFile, Name: entry.Path,
			Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: sum}},
		}
		modules, err := modulesOf(entry, s.version, packages)
		if err != nil {
			return nil, err
		}
		for _, m := range modules {
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
	info, err := buildinfo.ReadFile(entry.Source)
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
