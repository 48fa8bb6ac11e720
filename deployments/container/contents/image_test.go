//go:build image

package contents

import (
	"archive/tar"
	"debug/elf"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/tessera-dra/tessera/deployments/container/image"
	"github.com/tessera-dra/tessera/deployments/container/image/imagetest"
)

// TestImage builds the image, and lists all that it has: no shell, nothing that
// changes the user, nothing that others than root may write.
func TestImage(t *testing.T) {
	root, version, err := Checkout()
	if err != nil {
		t.Fatal(err)
	}
	programs := t.TempDir()
	entries, err := Build(t.Context(), Target{Root: root, Dir: programs, Architecture: runtime.GOARCH, Version: version}, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "image.tar")
	if _, err := image.Write(archive, "localhost/tessera:test", entries, Config(version)); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"dir 1777 tmp",
		"file 755 LIB/ld-linux.so",
		"file 755 LIB/libc.so.6",
		"file 755 LIB/libdl.so.2",
		"file 755 LIB/libgcc_s.so.1",
		"file 755 LIB/libm.so.6",
		"file 755 LIB/libpthread.so.0",
		"file 755 LIB/libresolv.so.2",
		"file 755 LIB/librt.so.1",
		"file 755 usr/bin/controller",
		"file 755 usr/bin/kubelet-plugin",
		"file 755 usr/bin/mps-supervisor",
		"file 755 usr/bin/nvidia-cdi-hook",
		"file 755 usr/bin/nvmlsim",
		"file 755 usr/lib/tessera/libnvidia-ml.so.1",
	}
	if diff := cmp.Diff(want, listed(t, archive)); diff != "" {
		t.Errorf("the image (-want +got):\n%s", diff)
	}
	// The container runtime starts the hook on the host, beside a container's files: a
	// loader would open libraries that the container's image chooses.
	hook, err := elf.Open(filepath.Join(programs, "nvidia-cdi-hook"))
	if err != nil {
		t.Fatal(err)
	}
	defer hook.Close()
	for _, segment := range hook.Progs {
		if segment.Type == elf.PT_INTERP || segment.Type == elf.PT_DYNAMIC {
			t.Errorf("the hook has a segment %s: it isn't static", segment.Type)
		}
	}
}

// listed lists an image's files and empty directories. The C library's directories,
// which differ between distributions, are LIB.
func listed(t *testing.T, archive string) []string {
	t.Helper()
	img, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"PATH=/usr/bin"}, config.Config.Env); diff != "" || config.Config.Entrypoint != nil || config.Config.Cmd != nil {
		t.Errorf("configuration %+v", config.Config)
	}
	library := regexp.MustCompile(`^(usr/)?lib(64)?(/[a-z0-9_]+-linux-gnu)?/(lib[a-z_]+\.so\.\d+|ld-linux)[^/]*$`)
	var lines []string
	imagetest.Each(t, img, func(h *tar.Header, _ io.Reader) {
		if h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%s belongs to %d:%d", h.Name, h.Uid, h.Gid)
		}
		kind := map[byte]string{tar.TypeReg: "file", tar.TypeDir: "dir"}[h.Typeflag]
		if h.Typeflag == tar.TypeDir && h.Mode == 0o755 {
			return // above what is listed
		}
		name := library.ReplaceAllString(filepath.Clean(h.Name), "LIB/$4")
		if name == "LIB/ld-linux" {
			name += ".so"
		}
		lines = append(lines, fmt.Sprintf("%s %o %s", kind, h.Mode, name))
	})
	slices.Sort(lines)
	return lines
}
