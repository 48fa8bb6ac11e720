package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"sigs.k8s.io/yaml"
)

// clientPlatforms are those of people's own machines, for which kubectl-gpu is built.
func clientPlatforms() []clientPlatform {
	return []clientPlatform{
		{os: "linux", architecture: "amd64"}, {os: "linux", architecture: "arm64"},
		{os: "darwin", architecture: "amd64"}, {os: "darwin", architecture: "arm64"},
		{os: "windows", architecture: "amd64", suffix: ".exe"},
	}
}

type clientPlatform struct{ os, architecture, suffix string }

func (p clientPlatform) archive(version string) string {
	return fmt.Sprintf("kubectl-gpu-%s-%s-%s.tar.gz", version, p.os, p.architecture)
}

const kubectlGPU = "kubectl-gpu"

func (p clientPlatform) sbom(version string) string {
	return fmt.Sprintf("kubectl-gpu-%s-%s-%s.cdx.json", version, p.os, p.architecture)
}

// writePlugin builds kubectl-gpu for all platforms, packs each with the license, and
// writes an SBOM of each and krew's manifest of the archives.
func writePlugin(ctx context.Context, s source, dir string, log io.Writer) error {
	license, err := os.ReadFile(filepath.Join(s.root, "LICENSE"))
	if err != nil {
		return fmt.Errorf("read the license: %w", err)
	}
	for _, p := range clientPlatforms() {
		fmt.Fprintf(log, "building kubectl-gpu for %s/%s\n", p.os, p.architecture)
		if err := writeForPlatform(ctx, s, p, license, dir); err != nil {
			return err
		}
	}
	return writeManifest(s.version, dir)
}

// writeForPlatform writes the archive of a platform, and its SBOM.
func writeForPlatform(ctx context.Context, s source, p clientPlatform, license []byte, dir string) error {
	scratch, err := os.MkdirTemp("", "kubectl-gpu-")
	if err != nil {
		return fmt.Errorf("make the build directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	name := kubectlGPU + p.suffix
	file := filepath.Join(scratch, name)
	if err := buildPlugin(ctx, s, p, file); err != nil {
		return err
	}
	program, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the program: %w", err)
	}
	files := []packed{{"LICENSE", 0o644, license}, {name, 0o755, program}}
	if err := writeArchive(filepath.Join(dir, p.archive(s.version)), s.time, files); err != nil {
		return err
	}
	purl := fmt.Sprintf("pkg:generic/%s@%s?arch=%s&os=%s", kubectlGPU, s.version, p.architecture, p.os)
	return writeProgramSBOM(s, name, file, purl, filepath.Join(dir, p.sbom(s.version)))
}

// buildPlugin builds the program with the flags of the image's programs.
func buildPlugin(ctx context.Context, s source, p clientPlatform, file string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -X main.version="+s.version, "-o", file, "./cmd/"+kubectlGPU)
	cmd.Dir = s.root
	cmd.Env = append(os.Environ(), "GOOS="+p.os, "GOARCH="+p.architecture, "GOAMD64=v1", "GOARM64=v8.0", "GOFLAGS=-mod=readonly", "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build kubectl-gpu for %s/%s: %w\n%s", p.os, p.architecture, err, out)
	}
	return nil
}

// packed is a file of an archive.
type packed struct {
	name string
	mode int64
	data []byte
}

// writeArchive packs the files, which all have the time.
func writeArchive(file string, at time.Time, files []packed) error {
	var out bytes.Buffer
	compressed := gzip.NewWriter(&out)
	archive := tar.NewWriter(compressed)
	for _, f := range files {
		err := archive.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), ModTime: at, Format: tar.FormatUSTAR})
		if err == nil {
			_, err = archive.Write(f.data)
		}
		if err != nil {
			return fmt.Errorf("pack %s: %w", f.name, err)
		}
	}
	if err := archive.Close(); err != nil {
		return fmt.Errorf("pack %s: %w", file, err)
	}
	if err := compressed.Close(); err != nil {
		return fmt.Errorf("pack %s: %w", file, err)
	}
	if err := os.WriteFile(file, out.Bytes(), 0o644); err != nil {
		return fmt.Errorf("write an archive: %w", err)
	}
	return nil
}

// downloads is where krew's manifest says that the archives of a release are.
const downloads = "https://github.com/tessera-dra/tessera/releases/download/v"

// krewPlugin is krew's kind of manifest.
type krewPlugin struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Metadata   krewName `json:"metadata"`
	Spec       krewSpec `json:"spec"`
}

type krewName struct {
	Name string `json:"name"`
}

type krewSpec struct {
	Version          string         `json:"version"`
	Homepage         string         `json:"homepage"`
	ShortDescription string         `json:"shortDescription"`
	Description      string         `json:"description"`
	Platforms        []krewPlatform `json:"platforms"`
}

type krewPlatform struct {
	URI      string       `json:"uri"`
	SHA256   string       `json:"sha256"`
	Bin      string       `json:"bin"`
	Files    []krewFile   `json:"files"`
	Selector krewSelector `json:"selector"`
}

type krewFile struct {
	From string `json:"from"`
	To   string `json:"to"`
}

type krewSelector struct {
	MatchLabels map[string]string `json:"matchLabels"`
}

// krewManifest is the file of krew's manifest: krew wants it to have the plugin's name.
const krewManifest = "tessera.yaml"

// writeManifest writes krew's manifest of the archives in the directory.
func writeManifest(version, dir string) error {
	m := krewPlugin{APIVersion: "krew.googlecontainertools.github.com/v1alpha2", Kind: "Plugin", Metadata: krewName{"tessera"}, Spec: krewSpec{
		Version: "v" + version, Homepage: "https://github.com/tessera-dra/tessera",
		ShortDescription: "Show who has which part of which GPU",
		Description: `Show who has which part of which GPU of a cluster with Tessera, a DRA driver for
NVIDIA GPUs: a map of GPUs with their MIG partitions and shares, how many more claims fit
where, why a pod waits, memory and utilization by pod, and what is wrong. It works with the
rights of your kubeconfig.
`,
	}}
	for _, p := range clientPlatforms() {
		sum, err := checksum(filepath.Join(dir, p.archive(version)))
		if err != nil {
			return err
		}
		bin := kubectlGPU + p.suffix
		m.Spec.Platforms = append(m.Spec.Platforms, krewPlatform{
			URI: downloads + version + "/" + p.archive(version), SHA256: sum, Bin: bin,
			Files:    []krewFile{{From: bin, To: "."}, {From: "LICENSE", To: "."}},
			Selector: krewSelector{map[string]string{"os": p.os, "arch": p.architecture}},
		})
	}
	text, err := yaml.Marshal(m)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, krewManifest), text, 0o644)
	}
	if err != nil {
		return fmt.Errorf("write krew's manifest: %w", err)
	}
	return nil
}
