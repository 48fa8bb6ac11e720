package gpumap

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// TestColours: a terminal gets the same text with colours, and nothing else does.
func TestColours(t *testing.T) {
	plain := kubectltest.New(t).Run(t, Command, terminal.Screen{Width: 80}, "", "map")
	coloured := kubectltest.New(t).Run(t, Command, terminal.Screen{Width: 80, Colour: true}, "", "map")
	if strings.Contains(plain, "\x1b") || !strings.Contains(coloured, "\x1b[31m") {
		t.Errorf("plain %q, coloured %q", plain, coloured)
	}
	for _, c := range []string{"\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[0m"} {
		coloured = strings.ReplaceAll(coloured, c, "")
	}
	if coloured != plain {
		t.Error(cmp.Diff(plain, coloured))
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	if s := terminal.ScreenOf(file); s.Colour {
		t.Error("a file has colours")
	}
}

// TestPages: lists are read page by page.
func TestPages(t *testing.T) {
	s := kubectltest.New(t)
	s.Run(t, Command, terminal.Screen{Width: 80}, "", "map")
	if n := s.Pages.Load(); n < 2 {
		t.Errorf("%d further pages were asked for, want those of slices and claims", n)
	}
}
