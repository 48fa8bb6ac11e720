package cluster

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Images that every node of a cluster has. They exist under the tag local,
// with which Kubernetes doesn't try to pull by default, and as latest.
const (
	// BusyboxImage holds a static busybox with all its commands.
	BusyboxImage = "localhost/tessera/busybox:local"
	// GlibcImage is the same with the host's C and C++ libraries, dynamic
	// loader and ldconfig: injected programs that are linked dynamically run. Where
	// the injected nvidia-smi is the simulator's, nvmlsim is there too: they are one
	// program, known by its name.
	GlibcImage = "localhost/tessera/debian:local"
)

const baseImages = "base-images.tar"

// imagesVersion is part of the cache key: raise it when what is below changes
// the images' contents.
const imagesVersion = "5"

// LoadImage imports an image archive (docker save or OCI layout as tar) into
// every node.
func (c *Cluster) LoadImage(ctx context.Context, archive string) error {
	results := make(chan error)
	nodes := c.Nodes()
	for _, node := range nodes {
		go func() { results <- c.importImage(ctx, node, archive) }()
	}
	var all error
	for range nodes {
		all = errors.Join(all, <-results)
	}
	return all
}

func (c *Cluster) importImage(ctx context.Context, node, archive string) error {
	f, err := os.Open(archive)
	if err != nil {
		return fmt.Errorf("load an image: %w", err)
	}
	defer f.Close()
	overlay, err := c.canOverlay(node)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	err = c.Run(ctx, node, Stdio{In: f, Out: &out, Err: &out}, c.runtime().importing(overlay)...)
	if err != nil {
		return fmt.Errorf("load the image %s: %w: %s", archive, err, lastLines(out.String(), 3))
	}
	return nil
}

// ensureBaseImages puts the archive of base images, made from the host's
// busybox and C library, into dir, from the cache where it can.
func (b *builder) ensureBaseImages(ctx context.Context, dir string) error {
	if err := b.ensurePackages(ctx, needs()); err != nil {
		return err
	}
	libraries, err := glibcFiles()
	if err != nil {
		return err
	}
	key, err := contentKey(append([]string{busyboxPath}, libraries...))
	if err != nil {
		return err
	}
	unlock, err := lockDir(filepath.Join(b.cache, lockDirs, "images"), b.log)
	if err != nil {
		return err
	}
	defer unlock()
	cached := filepath.Join(b.cache, "images-"+key)
	if _, err := os.Stat(cached); err == nil {
		return linkAll(cached, dir)
	}
	fmt.Fprintln(b.log, "building the base images")
	temporary := cached + ".building"
	if err := os.MkdirAll(temporary, 0o755); err != nil {
		return fmt.Errorf("make the cache directory: %w", err)
	}
	if err := writeBaseImages(ctx, filepath.Join(temporary, baseImages), libraries); err != nil {
		return err
	}
	if err := os.Rename(temporary, cached); err != nil {
		return fmt.Errorf("put the base images in place: %w", err)
	}
	if err := dropOthers(b.cache, "images", filepath.Base(cached)); err != nil {
		return err
	}
	return linkAll(cached, dir)
}

func contentKey(paths []string) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, imagesVersion)
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("read what the base images are made of: %w", err)
		}
		fmt.Fprintf(h, "%s %x\n", path, sha256.Sum256(data))
	}
	return hex.EncodeToString(h.Sum(nil))[:12], nil
}

func writeBaseImages(ctx context.Context, path string, libraries []string) error {
	busybox, err := busyboxLayer(ctx)
	if err != nil {
		return err
	}
	glibc, err := glibcLayer(libraries)
	if err != nil {
		return err
	}
	images := map[string]struct {
		command []string
		layers  []v1.Layer
	}{
		// Not sleep: tests kill the sleep of their containers by name, and a pod whose sandbox
		// is killed starts again as a whole.
		"pause":   {[]string{"/bin/tail", "-f", "/dev/null"}, []v1.Layer{busybox}},
		"busybox": {[]string{"/bin/sh"}, []v1.Layer{busybox}},
		"debian":  {[]string{"/bin/sh"}, []v1.Layer{busybox, glibc}},
	}
	tagged := map[name.Tag]v1.Image{}
	for short, content := range images {
		image, err := newImage(content.command, content.layers)
		if err != nil {
			return fmt.Errorf("build the image %s: %w", short, err)
		}
		for _, tag := range []string{"local", "latest"} {
			reference, err := name.NewTag("localhost/tessera/" + short + ":" + tag)
			if err != nil {
				return fmt.Errorf("name the image %s: %w", short, err)
			}
			tagged[reference] = image
		}
	}
	if err := tarball.MultiWriteToFile(path, tagged); err != nil {
		return fmt.Errorf("write the base images: %w", err)
	}
	return nil
}

func newImage(command []string, layers []v1.Layer) (v1.Image, error) {
	image, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		return nil, err
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", runtime.GOARCH
	file.Config.Cmd = command
	file.Config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	return mutate.ConfigFile(image, file)
}

// layer collects the files of an image layer. The first error sticks.
type layer struct {
	buffer bytes.Buffer
	tar    *tar.Writer
	err    error
}

func newLayer() *layer {
	l := &layer{}
	l.tar = tar.NewWriter(&l.buffer)
	return l
}

func (l *layer) add(header tar.Header, data []byte) {
	if l.err != nil {
		return
	}
	header.Size = int64(len(data))
	if l.err = l.tar.WriteHeader(&header); l.err == nil {
		_, l.err = l.tar.Write(data)
	}
}

func (l *layer) dir(path string, mode int64) {
	l.add(tar.Header{Typeflag: tar.TypeDir, Name: path + "/", Mode: mode}, nil)
}

func (l *layer) file(path string, mode int64, data []byte) {
	l.add(tar.Header{Typeflag: tar.TypeReg, Name: path, Mode: mode}, data)
}

func (l *layer) link(path, target string) {
	l.add(tar.Header{Typeflag: tar.TypeSymlink, Name: path, Linkname: target, Mode: 0o777}, nil)
}

func (l *layer) close() (v1.Layer, error) {
	if l.err == nil {
		l.err = l.tar.Close()
	}
	if l.err != nil {
		return nil, fmt.Errorf("write an image layer: %w", l.err)
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(l.buffer.Bytes())), nil
	})
}

func busyboxLayer(ctx context.Context) (v1.Layer, error) {
	program, err := os.ReadFile(busyboxPath)
	if err != nil {
		return nil, fmt.Errorf("read busybox: %w", err)
	}
	applets, err := exec.CommandContext(ctx, busyboxPath, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list the commands of busybox: %w", err)
	}
	l := newLayer()
	for _, dir := range []string{"bin", "dev", "etc", "proc", "root", "sbin", "sys", "usr", "usr/bin", "usr/sbin", "var", "var/log"} {
		l.dir(dir, 0o755)
	}
	l.dir("tmp", 0o1777)
	l.file("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"))
	l.file("etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n"))
	l.file("bin/busybox", 0o755, program)
	for applet := range strings.FieldsSeq(string(applets)) {
		if applet != "busybox" && applet != "ldconfig" {
			l.link("bin/"+applet, "busybox")
		}
	}
	return l.close()
}

// glibcLibraries are what dynamically linked programs of the usual kind need.
func glibcLibraries() []string {
	return []string{
		"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libresolv.so.2", "libgcc_s.so.1", "libstdc++.so.6",
	}
}

// loader and triplet are the dynamic loader's path and the library directory's
// name on this architecture.
func loaderAndTriplet() (loader, triplet string) {
	if runtime.GOARCH == "arm64" {
		return "/lib/ld-linux-aarch64.so.1", "aarch64-linux-gnu"
	}
	return "/lib64/ld-linux-x86-64.so.2", "x86_64-linux-gnu"
}

// glibcFiles lists the host's files that make up the glibc layer. Libraries
// that a host doesn't have are left out, all but the C library itself.
func glibcFiles() ([]string, error) {
	loader, triplet := loaderAndTriplet()
	files := []string{loader, "/sbin/ldconfig"}
	for _, library := range glibcLibraries() {
		for _, dir := range []string{"/lib/" + triplet, "/usr/lib/" + triplet, "/lib64", "/usr/lib64"} {
			if _, err := os.Stat(filepath.Join(dir, library)); err == nil {
				files = append(files, filepath.Join(dir, library))
				break
			}
		}
	}
	if len(files) < 3 || filepath.Base(files[2]) != glibcLibraries()[0] {
		return nil, errors.New("the base images need the host's C library (glibc), and there is none")
	}
	return files, nil
}

func glibcLayer(files []string) (v1.Layer, error) {
	loader, triplet := loaderAndTriplet()
	l := newLayer()
	for _, dir := range []string{"lib", filepath.Dir(loader)[1:], "lib/" + triplet, "usr/lib", "usr/lib/" + triplet, "etc/ld.so.conf.d"} {
		l.dir(dir, 0o755)
	}
	for _, path := range files {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read the host's C library: %w", err)
		}
		l.file(imagePath(path), 0o755, data)
	}
	// Where nvidia-smi is depends on the platform.
	l.file("usr/bin/nvmlsim", 0o755, []byte("#!/bin/sh\nexec -a nvmlsim \"$(command -v nvidia-smi)\" \"$@\"\n"))
	l.file("etc/ld.so.conf", 0o644, []byte("include /etc/ld.so.conf.d/*.conf\n"))
	l.file("etc/ld.so.conf.d/"+triplet+".conf", 0o644, []byte("/lib/"+triplet+"\n/usr/lib/"+triplet+"\n"))
	return l.close()
}

// imagePath is where a host's file goes in the image: libraries all in one
// directory, the loader and ldconfig at their fixed places.
func imagePath(path string) string {
	loader, triplet := loaderAndTriplet()
	if path == loader || path == "/sbin/ldconfig" {
		return path[1:]
	}
	return "lib/" + triplet + "/" + filepath.Base(path)
}
