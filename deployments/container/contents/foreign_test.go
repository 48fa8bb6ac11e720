//go:build foreign

package contents

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/deployments/container/image"
)

// TestForeignPrograms builds the image for the architectures that this machine doesn't have, and
// starts its programs under qemu-user, with the image's own loader and C library. What they do
// on such a machine, docs/dev/testing.md lists as not run.
func TestForeignPrograms(t *testing.T) {
	root, version, err := Checkout()
	if err != nil {
		t.Fatal(err)
	}
	for _, on := range platforms() {
		if on.native() {
			continue
		}
		t.Run(on.architecture, func(t *testing.T) {
			entries, err := Build(t.Context(), Target{Root: root, Dir: t.TempDir(), Architecture: on.architecture, Version: version}, t.Output())
			if err != nil {
				t.Fatal(err)
			}
			dir := layOut(t, entries)
			kubectl := program{path: "/usr/bin/kubectl-gpu", pkg: "./cmd/kubectl-gpu", flags: []string{"-ldflags=-s -w -X main.version=" + version}}
			if err := kubectl.build(t.Context(), root, filepath.Join(dir, kubectl.path), on); err != nil {
				t.Fatal(err)
			}
			for name, commands := range map[string][]struct{ args, want string }{
				"controller":      {{"--version", version}, {"--help", "--leader-elect"}},
				"kubelet-plugin":  {{"--version", version}, {"--help", "--data-dir"}, {"doctor --help", "Usage"}},
				"mps-supervisor":  {{"--version", version}, {"--help", "--run-dir"}},
				"nvidia-cdi-hook": {{"--help", "update-ldcache"}, {"update-ldcache --help", "--folder"}},
				"nvmlsim":         {{"--help", "install"}},
				"kubectl-gpu":     {{"--version", version}, {"template --help", "gb300"}},
			} {
				for _, c := range commands {
					t.Run(name+" "+c.args, func(t *testing.T) {
						if out := on.emulate(t, dir, name, strings.Fields(c.args)...); !strings.Contains(out, c.want) {
							t.Errorf("%q isn't in\n%s", c.want, out)
						}
					})
				}
			}
		})
	}
}

// layOut writes the image's files into a directory.
func layOut(t *testing.T, entries []image.Entry) string {
	t.Helper()
	dir := t.TempDir()
	for _, e := range entries {
		if e.Source == "" {
			continue // a directory
		}
		path := filepath.Join(dir, e.Path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := copyFile(path, e.Source); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func copyFile(path, source string) error {
	in, err := os.Open(source)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	defer out.Close()
	_, err = io.Copy(out, in)
	return err
}

// emulate runs a program of the image and returns what it prints.
func (p platform) emulate(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	arch, _, _ := strings.Cut(p.triple, "-")
	cmd := exec.CommandContext(t.Context(), "qemu-"+arch, append([]string{"-L", dir, filepath.Join(dir, "usr/bin", name)}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s %s: %v (on Debian: apt-get install qemu-user)", name, strings.Join(args, " "), err)
	}
	return string(out)
}
