package datadir

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/files"
)

// InstallHook puts the program where the container runtime, on the host, can
// start it. Containers may be starting with the present one: it is replaced
// whole, and only by another.
func (d *Dir) InstallHook(from string) (string, error) {
	path := filepath.Join(d.path, hookFile)
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("--data-dir: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err == nil && st.Flags&unix.ST_NOEXEC != 0 {
		return "", fmt.Errorf("--data-dir: %s is mounted noexec, but container runtimes have to start %s there: choose another directory", d.path, hookFile)
	}
	program, err := os.Open(from)
	if err != nil {
		return "", fmt.Errorf("--cdi-hook: %w", err)
	}
	defer program.Close()
	want, err := digest(program)
	if err != nil {
		return "", fmt.Errorf("--cdi-hook: %w", err)
	}
	// A power loss may leave the temporary file, perhaps as a second name of the present
	// program, which mustn't be written to.
	temp := filepath.Join(d.path, hookTemp)
	err = files.RemoveIfThere(temp)
	if have, digestErr := digestOf(path); digestErr == nil && have == want {
		return path, nil // if the temporary file couldn't be removed, Clean does it
	}
	if err == nil {
		err = replaceProgram(path, temp, program)
	}
	if err != nil {
		return "", fmt.Errorf("install %s: %w", path, err)
	}
	return path, nil
}

func replaceProgram(path, temp string, program io.ReadSeeker) error {
	if _, err := program.Seek(0, io.SeekStart); err != nil {
		return err
	}
	tmp, err := os.OpenFile(temp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o700)
	if err != nil {
		return err
	}
	return files.Replace(path, tmp, func(f *os.File) error {
		_, err := io.Copy(f, program)
		return errors.Join(err, f.Chmod(0o755))
	})
}

func digest(r io.Reader) (string, error) {
	h := sha256.New()
	_, err := io.Copy(h, r)
	return string(h.Sum(nil)), err
}

// digestOf fails for a file that isn't an executable as it should be.
func digestOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.Mode() != 0o755 {
		return "", errors.Join(err, fs.ErrInvalid)
	}
	return digest(f)
}

// Specs are the CDI specifications on disk (*cdi.Specs).
type Specs interface {
	// Claims returns the UIDs of claims that have one.
	Claims() ([]string, error)
	// HookInUse returns the path of the hook program in the common one, "" if there is
	// none.
	HookInUse() (string, error)
}

// Check returns an error if claims were prepared by a plugin with another data
// directory: that one's journal says who has which GPU and which partitions are
// ours. The common CDI specification names the hook program, and so that directory.
// After a reboot, specifications, partitions and prepared claims are gone.
func (d *Dir) Check(specs Specs) error {
	claims, err := specs.Claims()
	if err != nil || len(claims) == 0 {
		return nil //nolint:nilerr // specifications that can't be read are in no container's way, nor removed
	}
	before, err := specs.HookInUse()
	if err != nil || before == "" || filepath.Clean(before) == filepath.Join(d.path, hookFile) {
		return nil //nolint:nilerr // as above
	}
	was := filepath.Dir(filepath.Dir(before)) // see hookFile
	return fmt.Errorf("--data-dir: %d claims were prepared with the journal in %s, and %s knows nothing of them: start with that directory again (chart value node.dataDir), or drain the node before it is changed",
		len(claims), was, d.path)
}
