package files_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/tessera-dra/tessera/pkg/files"
)

func TestReplace(t *testing.T) {
	broken := errors.New("broken")
	for name, tc := range map[string]struct {
		fails error
		want  string
	}{"success": {nil, "new"}, "failure": {broken, "old"}} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "file")
			if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
				t.Fatal(err)
			}
			temp, err := os.CreateTemp(dir, "file.*")
			if err != nil {
				t.Fatal(err)
			}
			_, err = temp.WriteString("new")
			err = files.Replace(path, temp, errors.Join(err, tc.fails))
			if !errors.Is(err, tc.fails) {
				t.Errorf("got %v, want %v", err, tc.fails)
			}
			if got, err := os.ReadFile(path); string(got) != tc.want || err != nil {
				t.Errorf("the file has %q, %v, want %q", got, err, tc.want)
			}
			if left, err := os.ReadDir(dir); len(left) != 1 || err != nil {
				t.Errorf("the directory has %v, %v, want the file alone", left, err)
			}
		})
	}
}

func TestRemove(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := files.RemoveIfEmpty(dir); err != nil {
		t.Errorf("a directory that isn't empty: %v", err)
	}
	for range 2 {
		if err := files.RemoveIfThere(path); err != nil {
			t.Error(err)
		}
	}
	for range 2 {
		if err := files.RemoveIfEmpty(dir); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the empty directory: %v", err)
	}
}
