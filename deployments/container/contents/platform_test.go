package contents

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestBuildRefusesAnArchitecture(t *testing.T) {
	_, err := Build(t.Context(), Target{Architecture: "riscv64"}, nil)
	if err == nil || !strings.Contains(err.Error(), "no NVIDIA driver for riscv64: build for amd64 or arm64") {
		t.Errorf("error %v", err)
	}
}

// The same source gives the same program wherever the checkout and the output
// are: no path goes into it.
func TestProgramsHaveNoPaths(t *testing.T) {
	for _, on := range platforms() {
		t.Run(on.architecture, func(t *testing.T) {
			if _, err := exec.LookPath(on.compiler()); err != nil {
				t.Skipf("no %s here; make release installs it", on.compiler())
			}
			program := func() []byte {
				root, file := t.TempDir(), filepath.Join(t.TempDir(), "program")
				write(t, root, "go.mod", "module example.com/program\n\ngo 1.26\n")
				write(t, root, "main.go", "package main\n\n// int one(void) { return 1; }\nimport \"C\"\n\nfunc main() { println(C.one()) }\n")
				p := program{path: "/program", pkg: ".", cgo: true, flags: []string{"-ldflags=-s -w"}}
				if err := p.build(t.Context(), root, file, on); err != nil {
					t.Fatal(err)
				}
				data, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				return data
			}
			one, two := program(), program()
			if string(one) != string(two) {
				t.Error("two directories gave two programs")
			}
			f, err := elf.NewFile(strings.NewReader(string(one)))
			if err != nil {
				t.Fatal(err)
			}
			want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[on.architecture]
			if f.Machine != want {
				t.Errorf("the program is for %s", f.Machine)
			}
		})
	}
}

func write(t *testing.T, dir, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}
