package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/deployments/container/image"
)

func TestSBOM(t *testing.T) {
	program, err := os.Executable() // this test, whose modules are go.mod's
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write(t, dir, "library", "C library")
	sum, err := checksum(dir + "/library")
	if err != nil {
		t.Fatal(err)
	}
	s := source{version: "0.2.0", time: time.Unix(1795348800, 0).UTC()}
	p := image.Platform{Architecture: "arm64", Entries: []image.Entry{
		{Path: "/tmp"},
		{Path: "/usr/lib/tessera/libnvidia-ml.so.1", Source: dir + "/library"},
		{Path: "/usr/bin/program", Source: program},
		{Path: "/lib/libc.so.6", Source: dir + "/library"},
		{Path: "/lib/libgcc_s.so.1", Source: dir + "/library"},
	}}
	packages := map[string]cdx.Component{"": {BOMRef: "libc6"}, "libgcc_s.so.1": {BOMRef: "libgcc-s1"}}
	bom, err := sbom(s, p, "sha256:abc", packages)
	if err != nil {
		t.Fatal(err)
	}
	if bom.Metadata.Timestamp != "2026-11-22T12:00:00Z" || bom.Metadata.Component.PackageURL != "pkg:oci/tessera@sha256%3Aabc?arch=arm64&tag=0.2.0" {
		t.Errorf("metadata %+v", bom.Metadata)
	}
	needs := map[string][]string{}
	for _, d := range *bom.Dependencies {
		needs[d.Ref] = *d.Dependencies
	}
	ofProgram := needs["/usr/bin/program"]
	delete(needs, "/usr/bin/program")
	want := map[string][]string{
		"image":                              {"/lib/libc.so.6", "/lib/libgcc_s.so.1", "/usr/bin/program", "/usr/lib/tessera/libnvidia-ml.so.1"},
		"/lib/libc.so.6":                     {"libc6"},
		"/lib/libgcc_s.so.1":                 {"libgcc-s1"},
		"/usr/lib/tessera/libnvidia-ml.so.1": {"pkg:golang/github.com/tessera-dra/tessera@0.2.0"},
	}
	if diff := cmp.Diff(want, needs); diff != "" {
		t.Errorf("dependencies (-want +got):\n%s", diff)
	}
	for _, module := range []string{"pkg:golang/github.com/tessera-dra/tessera@0.2.0", "pkg:golang/github.com/CycloneDX/cyclonedx-go@v", "pkg:golang/stdlib@1."} {
		if !slices.ContainsFunc(ofProgram, func(ref string) bool { return strings.HasPrefix(ref, module) }) {
			t.Errorf("the program's modules lack %s: %q", module, ofProgram)
		}
	}
	for _, c := range *bom.Components {
		if c.BOMRef == "/lib/libc.so.6" && (*c.Hashes)[0].Value != sum {
			t.Errorf("checksum of the library: %+v", *c.Hashes)
		}
	}
}

// TestSBOMOfProgram describes this test as an archive's program.
func TestSBOMOfProgram(t *testing.T) {
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file := t.TempDir() + "/sbom"
	s := source{version: "0.2.0", time: time.Unix(1795348800, 0).UTC()}
	if err := writeProgramSBOM(s, "kubectl-gpu.exe", program, "pkg:generic/kubectl-gpu@0.2.0?arch=amd64&os=windows", file); err != nil {
		t.Fatal(err)
	}
	text, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer text.Close()
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(text, cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		t.Fatal(err)
	}
	sum, err := checksum(program)
	if err != nil {
		t.Fatal(err)
	}
	has := map[string]bool{}
	for _, c := range *bom.Components {
		has[c.Name] = true
		if c.Name == "kubectl-gpu.exe" && (*c.Hashes)[0].Value != sum {
			t.Errorf("checksum of the program: %+v", *c.Hashes)
		}
	}
	for _, name := range []string{"kubectl-gpu.exe", "stdlib", "github.com/tessera-dra/tessera", "github.com/CycloneDX/cyclonedx-go"} {
		if !has[name] {
			t.Errorf("%s is missing", name)
		}
	}
}

func TestSBOMRefusesAProgramWithoutModules(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "script", "#!/bin/sh\n")
	p := image.Platform{Entries: []image.Entry{{Path: "/usr/bin/script", Source: dir + "/script"}}}
	if _, err := sbom(source{}, p, "", nil); err == nil {
		t.Error("a script was taken for a Go program")
	}
}
