package machine

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// redirected is the attribute by which overlayfs shows a directory of the lower layer in
// another place.
const redirected = "trusted.overlay.redirect"

// linkBelow makes links in the upper layer of the overlay that is about to be mounted over
// the host's root: there a link can hide a directory that isn't empty. Links in file systems
// that are mounted later are made there, by link.
func (r *root) linkBelow() error {
	later := r.emptyPaths()
	for _, path := range slices.Sorted(maps.Keys(r.spec.Links)) {
		if below(path, later) {
			continue
		}
		if err := linkInRoot(filepath.Clean(path), r.spec.Links[path], later); err != nil {
			return fmt.Errorf("make the link %s: %w", path, err)
		}
	}
	return nil
}

// linkInRoot makes a link. If the host has a directory there, and nothing where the link
// leads, the machine has that directory there.
func linkInRoot(path, target string, later []string) error {
	parent, err := makeRootDir(filepath.Dir(path))
	if err != nil {
		return err
	}
	at := parent.child(filepath.Base(path))
	if err := os.Symlink(target, at.upper); err != nil {
		return err
	}
	info, err := os.Lstat(at.host)
	if err != nil || !info.IsDir() {
		return ignoreMissing(err)
	}
	if !filepath.IsAbs(target) {
		target = filepath.Join(parent.path, target)
	}
	if below(filepath.Clean(target), later) {
		return nil
	}
	return showHostDir(at.host, filepath.Clean(target))
}

// showHostDir shows a directory of the host in another place, unless something is there.
func showHostDir(host, path string) error {
	parent, err := makeRootDir(filepath.Dir(path))
	if err != nil {
		return err
	}
	to := parent.child(filepath.Base(path))
	if exists(to.upper) || exists(to.host) {
		return nil
	}
	if err := mkdirLike(to.upper, host); err != nil {
		return err
	}
	if err := unix.Setxattr(to.upper, redirected, []byte(host), 0); err != nil {
		return fmt.Errorf("show %s at %s: %w", host, path, err)
	}
	return nil
}

// rootPath is a file of the machine's root before that is mounted: its path in the machine,
// in the upper layer, and in the host's root.
type rootPath struct{ path, upper, host string }

func (p rootPath) child(name string) rootPath {
	c := rootPath{filepath.Join(p.path, name), filepath.Join(p.upper, name), filepath.Join(p.host, name)}
	buffer := make([]byte, unix.PathMax)
	if n, err := unix.Lgetxattr(c.upper, redirected, buffer); err == nil {
		c.host = string(buffer[:n])
	}
	return c
}

// link returns where a link leads, or nothing if it isn't one.
func (p rootPath) link() string {
	file := p.upper
	if !exists(file) {
		file = p.host
	}
	target, err := os.Readlink(file)
	if err != nil {
		return ""
	}
	if !filepath.IsAbs(target) {
		target = filepath.Join(filepath.Dir(p.path), target)
	}
	return target
}

// mkdir makes the directory in the upper layer, as it is on the host: the machine sees the
// owner and mode of the upper one.
func (p rootPath) mkdir() error {
	switch {
	case exists(p.upper):
		return nil
	case exists(p.host):
		return mkdirLike(p.upper, p.host)
	}
	return os.Mkdir(p.upper, 0o755)
}

// makeRootDir makes a directory and its parents. Links lead where they lead in the machine.
func makeRootDir(path string) (rootPath, error) {
	top := rootPath{path: "/", upper: upperDir, host: "/"}
	const most = 40 // as many as the kernel follows
	for range most {
		at, rest, err := walk(top, path)
		if err != nil || rest == "" {
			return at, err
		}
		path = rest
	}
	return rootPath{}, fmt.Errorf("%s: %w", path, unix.ELOOP)
}

// walk makes the directories of a path up to the first link. If there is one, rest is the
// path where it leads, and otherwise empty.
func walk(at rootPath, path string) (end rootPath, rest string, err error) {
	names := strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
	for i, name := range names {
		at = at.child(name)
		if target := at.link(); target != "" {
			return at, filepath.Join(append([]string{target}, names[i+1:]...)...), nil
		}
		if err := at.mkdir(); err != nil {
			return at, "", err
		}
	}
	return at, "", nil
}

// link makes a link in a file system that was mounted over the root.
func (r *root) link(path, target string) error {
	if found, err := os.Readlink(path); err == nil && found == target {
		return nil
	}
	if !r.ours(path) {
		return fmt.Errorf("make the link %s: the host has mounted a file system there; mount an overlay over it", path)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := ignoreMissing(os.Remove(path)); err != nil {
		return fmt.Errorf("make the link %s: %w", path, err)
	}
	return os.Symlink(target, path)
}

// ours reports whether a path is in a file system that the spec mounts, where the host's files don't change.
func (r *root) ours(path string) bool {
	paths := r.emptyPaths()
	for _, m := range r.spec.Mounts {
		if m.Type == typeOverlay {
			paths = append(paths, m.Path)
		}
	}
	return below(path, paths)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
