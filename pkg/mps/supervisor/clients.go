package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// privileged is the socket by which root changes limits and ends the daemon:
// root in a container, too.
const privileged = "control_privileged"

// admit makes the daemon reachable for clients: it links all files of the pipe
// directory except the privileged socket into the clients' directory. That
// directory stays when the daemon is replaced, because containers have it
// mounted. It is idempotent.
func (p place) admit() error {
	entries, err := os.ReadDir(p.pipe())
	if err != nil {
		return fmt.Errorf("let clients in: %w", err)
	}
	for _, e := range entries {
		if e.Name() == privileged {
			continue
		}
		if err := link(filepath.Join(p.pipe(), e.Name()), filepath.Join(p.clients(), e.Name())); err != nil {
			return fmt.Errorf("let clients in: %w", err)
		}
	}
	return nil
}

// link makes name a second name of file, whatever it was before.
func link(file, name string) error {
	if err := os.Link(file, name); !errors.Is(err, fs.ErrExist) {
		return err
	}
	one, err := os.Lstat(file)
	if err != nil {
		return err
	}
	if two, err := os.Lstat(name); err == nil && os.SameFile(one, two) {
		return nil
	}
	if err := os.Remove(name); err != nil {
		return err
	}
	return os.Link(file, name)
}
