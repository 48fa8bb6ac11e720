package cluster

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// lockDir makes dir if it isn't there and locks it against other processes
// until unlock is called or the process ends. A directory that its former
// holder has removed in the meantime is created again.
func lockDir(dir string, log io.Writer) (unlock func(), err error) {
	for {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("make %s: %w", dir, err)
		}
		f, err := os.Open(dir)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
		if err := flock(f, dir, log); err != nil {
			_ = f.Close()
			return nil, err
		}
		if stillThere(f, dir) {
			return func() { _ = f.Close() }, nil
		}
		_ = f.Close()
	}
}

func flock(f *os.File, dir string, log io.Writer) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		fmt.Fprintf(log, "waiting for another process that works in %s\n", dir)
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", dir, err)
	}
	return nil
}

func stillThere(f *os.File, dir string) bool {
	held, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(dir)
	return err == nil && os.SameFile(held, now)
}
