package containers

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// events is one inotify instance; their number per user is limited.
type events struct {
	fd   int
	file *os.File
	// err is the reason why files can't be watched, nil if they can.
	err error

	mu      sync.Mutex
	watches map[int32]*watch
	reading bool // reports are being read
}

// errNotReading says that files can't be watched, because nobody reads the kernel's reports.
var errNotReading = errors.New("the kernel's reports aren't read yet")

// watch is on one file.
type watch struct {
	id int32
	// done is closed when the file's inode is deleted, or the file was written.
	done chan struct{}
	// lost means that the kernel has dropped events, so the file may still exist.
	// It is set before done is closed.
	lost bool
}

func newEvents() *events {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return &events{err: fmt.Errorf("create an inotify instance (sysctl fs.inotify.max_user_instances limits them): %w", err)}
	}
	return &events{fd: fd, file: os.NewFile(uintptr(fd), "inotify"), watches: map[int32]*watch{}}
}

// run reads reports until ctx ends.
func (e *events) run(ctx context.Context) error {
	if e.err != nil {
		klog.FromContext(ctx).Info("The kernel can't report the end of containers; polling for it, so unprepare takes longer", "err", e.err)
		<-ctx.Done()
		return nil
	}
	e.mu.Lock()
	e.reading = true
	e.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { e.file.Close() })
	defer stop()
	buffer := make([]byte, 16<<10)
	for {
		n, err := e.file.Read(buffer)
		if ctx.Err() != nil {
			return nil // the file was closed because ctx has ended
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read file events: %w", err)
		}
		e.dispatch(buffer[:n])
	}
}

// add watches a file until its inode is deleted.
func (e *events) add(path string) (*watch, error) { return e.watch(path, unix.IN_DELETE_SELF) }

func (e *events) watch(path string, mask uint32) (*watch, error) {
	if e.err != nil {
		return nil, e.err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.reading {
		return nil, errNotReading
	}
	id, err := unix.InotifyAddWatch(e.fd, path, mask)
	if err != nil {
		return nil, &os.PathError{Op: "watch", Path: path, Err: err}
	}
	w := &watch{id: int32(id), done: make(chan struct{})}
	e.watches[w.id] = w
	return w, nil
}

// remove ends a watch that is no longer needed.
func (e *events) remove(w *watch) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.watches[w.id] == w {
		delete(e.watches, w.id)
		_, _ = unix.InotifyRmWatch(e.fd, uint32(w.id)) // the watch may have ended already
	}
}

// dispatch ends the watches of the events.
func (e *events) dispatch(reports []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(reports) >= unix.SizeofInotifyEvent {
		id := int32(binary.NativeEndian.Uint32(reports))
		mask := binary.NativeEndian.Uint32(reports[4:])
		size := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(reports[12:]))
		reports = reports[min(size, len(reports)):]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			for id := range e.watches {
				e.end(id, true)
			}
			continue
		}
		e.end(id, false)
	}
}

// end needs the lock.
func (e *events) end(id int32, lost bool) {
	if w := e.watches[id]; w != nil {
		w.lost = lost
		close(w.done)
		delete(e.watches, id)
	}
}
