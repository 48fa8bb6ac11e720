package driverroot

import (
	"bytes"
	"debug/elf"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// The tests of sim/cmd/nvmlsim run Install and Uninstall with real programs; these
// tests cover cases that those can't reach.

func TestEmptyLibraryIsOne(t *testing.T) {
	image := emptyLibrary("libcuda.so.1")
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	if f.Type != elf.ET_DYN || len(f.Progs) != 3 {
		t.Errorf("%+v", f.FileHeader)
	}
	// Without sections the standard reader finds no strings; the loader goes by
	// the dynamic segment.
	if !bytes.Contains(image, []byte("\x00libcuda.so.1\x00")) {
		t.Error("no soname")
	}
}

func TestCheckLibraryRefusesOthers(t *testing.T) {
	program, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		image []byte
		want  string
	}{
		"text":        {[]byte("#!/bin/sh\n"), "not a shared library"},
		"nothing":     {nil, "not a shared library"},
		"program":     {program, "not a library named libnvidia-ml.so.1"},
		"no sections": {emptyLibrary("libcuda.so.1"), "not a library named libnvidia-ml.so.1"},
	} {
		if err := checkLibrary(c.image, "libnvidia-ml.so.1"); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestManifest(t *testing.T) {
	root := t.TempDir()
	if m, err := readManifest(root); err != nil || len(m) != 0 {
		t.Errorf("none: %v, %v", m, err)
	}
	if err := os.MkdirAll(filepath.Dir(filepath.Join(root, manifestFile)), 0o755); err != nil {
		t.Fatal(err)
	}
	want := manifest{"usr/bin/nvidia-smi": true, "dev/nvidia0": true}
	if err := want.write(root); err != nil {
		t.Fatal(err)
	}
	got, err := readManifest(root)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	for _, bad := range []string{"../etc/passwd\n", "/etc/passwd\n", "a/../../b\n", "\n"} {
		if err := os.WriteFile(filepath.Join(root, manifestFile), []byte(bad), 0o644); err != nil {
			t.Fatal(err)
		}
		if m, err := readManifest(root); err == nil {
			t.Errorf("%q: %v", bad, m)
		}
	}
}

// A killed installation has recorded every file that it may have created.
func TestUninstallAfterAKilledInstallation(t *testing.T) {
	root := filepath.Join(t.TempDir(), "driver")
	half := []entry{
		text("proc/driver/nvidia/version", "x"),
		text("usr/bin/nvidia-smi", "never made"),
	}
	in := installer{root: root, made: manifest{}}
	if err := in.announce(half); err != nil {
		t.Fatal(err)
	}
	if err := in.make(half[:1]); err != nil {
		t.Fatal(err)
	}
	if err := Uninstall(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("left: %v", err)
	}
}

func TestRootMustBeADirectoryOfItsOwn(t *testing.T) {
	for _, root := range []string{"", "/", "//", "/usr/.."} {
		if err := Install(Options{Root: root, Machine: nvmlsim.Description{}}); err == nil || !strings.Contains(err.Error(), "not /") {
			t.Errorf("%q: %v", root, err)
		}
	}
}
