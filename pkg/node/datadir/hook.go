package datadir

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/files"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
)

// InstallHook puts the program where the container runtime, on the host, can start it: in
// the data directory, or in the first of the other directories where the host lets programs
// be started. Containers may be starting with the present one: it is replaced whole, and only
// by another. unusable is why no runtime can start it at path: no directory will do.
func (d *Dir) InstallHook(from string, host driverroot.Host, others ...string) (path string, unusable, err error) {
	d.hooks = others
	dir, err := d.chooseHookDir(host)
	if err != nil {
		return "", nil, err
	}
	if dir == "" {
		dir = d.path
		unusable = &NoExecError{Dirs: d.hookDirs()}
	}
	path, err = install(from, dir)
	return path, unusable, err
}

// NoExecError means that the host lets no program be started in the directories that may have
// the hook program.
type NoExecError struct{ Dirs []string }

func (e *NoExecError) Error() string {
	return fmt.Sprintf("container runtimes can't start %s: the host mounts all directories for it noexec (%s); choose a --data-dir where programs can be started (chart value node.dataDir)",
		filepath.Base(hookFile), strings.Join(e.Dirs, ", "))
}

// CheckHookDirs returns a NoExecError if the host lets no program be started in the directories
// that may have the hook program: a data directory and others.
func CheckHookDirs(host driverroot.Host, dataDir string, others ...string) error {
	d := Dir{path: dataDir, hooks: others}
	if dir, err := d.chooseHookDir(host); dir != "" || err != nil {
		return err
	}
	return &NoExecError{Dirs: d.hookDirs()}
}

// hookDirs returns the directories that may have the hook program, the preferred one first.
func (d *Dir) hookDirs() []string { return append([]string{d.path}, d.hooks...) }

// chooseHookDir returns the directory for the hook program, "" if the host lets no program
// be started in any of them.
func (d *Dir) chooseHookDir(host driverroot.Host) (string, error) {
	for _, dir := range d.hookDirs() {
		noexec, err := host.NoExec(dir)
		if err != nil {
			return "", fmt.Errorf("choose a directory for the hook program: %w", err)
		}
		if !noexec {
			return dir, nil
		}
	}
	return "", nil
}

func install(from, dir string) (string, error) {
	path := filepath.Join(dir, hookFile)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", fmt.Errorf("install %s: %w", path, err)
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
	temp := filepath.Join(dir, hookTemp)
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

// RemoveOldHooks removes hook programs that were installed when the choice of their directory
// was another, once no specification names them: until then containers may start with them.
func (d *Dir) RemoveOldHooks(current string, specs *cdi.Specs) error {
	used, err := specs.HooksInUse()
	if err != nil {
		return nil //nolint:nilerr // they stay
	}
	for _, dir := range d.hookDirs() {
		if path := filepath.Join(dir, hookFile); path != current && !slices.Contains(used, path) {
			err = errors.Join(err, removeHook(dir))
		}
	}
	if err != nil {
		return fmt.Errorf("remove a hook program that nothing uses: %w", err)
	}
	return nil
}

// removeHook removes the hook program, and its directory if it is empty.
func removeHook(dir string) error {
	return errors.Join(
		files.RemoveIfThere(filepath.Join(dir, hookFile)),
		files.RemoveIfThere(filepath.Join(dir, hookTemp)),
		files.RemoveIfEmpty(filepath.Join(dir, filepath.Dir(hookFile))),
	)
}

func replaceProgram(path, temp string, program io.ReadSeeker) error {
	if _, err := program.Seek(0, io.SeekStart); err != nil {
		return err
	}
	tmp, err := os.OpenFile(temp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o700)
	if err != nil {
		return err
	}
	_, err = io.Copy(tmp, program)
	return files.Replace(path, tmp, errors.Join(err, tmp.Chmod(0o755)))
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

// Check returns an error if claims were prepared by a plugin with another data
// directory: that one's journal says who has which GPU and which partitions are
// ours. The claims' CDI specifications name their marks, and so that directory.
// After a reboot, specifications, partitions and prepared claims are gone.
func (d *Dir) Check(specs *cdi.Specs) error {
	claims, err := specs.Claims()
	if err != nil || len(claims) == 0 {
		return nil //nolint:nilerr // specifications that can't be read are in no container's way, nor removed
	}
	was := d.otherDataDir(claims, specs)
	if was == "" {
		return nil
	}
	return fmt.Errorf("--data-dir: %d claims were prepared with the journal in %s, and %s knows nothing of them: start with that directory again (chart value node.dataDir), or drain the node before it is changed",
		len(claims), was, d.path)
}

// otherDataDir returns the data directory of the plugin that prepared the claims if it is
// another, as far as the specifications say.
func (d *Dir) otherDataDir(claims []string, specs *cdi.Specs) string {
	for _, uid := range claims {
		mark, err := specs.MarkInUse(uid)
		switch marks := filepath.Dir(mark); {
		case err != nil || mark == "":
		case marks == filepath.Clean(d.Marks()):
			return ""
		default:
			return filepath.Dir(marks) // see marksDir
		}
	}
	// Old specifications have no marks, and name a hook in the data directory.
	hooks, err := specs.HooksInUse()
	if err != nil {
		return "" // as in Check
	}
	for _, hook := range hooks {
		if was := filepath.Dir(filepath.Dir(hook)); !slices.Contains(d.hookDirs(), was) { // see hookFile
			return was
		}
	}
	return ""
}
