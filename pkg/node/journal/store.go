package journal

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/files"
)

const (
	recordSuffix     = ".json"
	unreadableSuffix = ".corrupt"
	tempSuffix       = ".tmp"
	// maxFileSize is far above what a claim's 32 results, or a GPU's
	// partitions, can fill.
	maxFileSize = 1 << 20
)

// keyPattern matches keys that are allowed as file names.
var keyPattern = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z_.-]{0,127}$`)

// record is a claim's or a GPU's.
type record interface {
	// key is the UID that names the record's file.
	Key() string
}

// aside is an unreadable file that was renamed.
type aside struct {
	path string
	// data is its content, as far as it could be read.
	data []byte
	err  error
}

// store is the records of one kind: a directory with a file for each.
type store[R record] struct {
	dir string
	// kind is the kind of object in errors: "claim".
	kind string
	// prefix of the steps' names, which are the same with and without sync.
	prefix string
	step   func(string)
	// sync: the records have to survive that the machine goes down. Where they
	// are worth nothing then, it is enough that the kernel has them.
	sync bool

	mu         sync.RWMutex
	records    map[string]R
	unreadable map[string]aside
}

func newStore[R record](dir, kind, prefix string, sync bool, step func(string)) *store[R] {
	return &store[R]{dir: dir, kind: kind, prefix: prefix, sync: sync, step: step, records: map[string]R{}, unreadable: map[string]aside{}}
}

func (s *store[R]) get(key string) (R, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	r, ok := s.records[key]
	return r, ok
}

// all returns the records, ordered by key.
func (s *store[R]) all() []R {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.SortedFunc(maps.Values(s.records), func(a, b R) int { return cmp.Compare(a.Key(), b.Key()) })
}

func (s *store[R]) len() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.records)
}

// asides returns a copy of the list of renamed files that aren't settled, by
// key.
func (s *store[R]) asides() map[string]aside {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.unreadable)
}

// isUnreadable says whether asides has the key.
func (s *store[R]) isUnreadable(key string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	_, ok := s.unreadable[key]
	return ok
}

// makeDir makes the directory for the first record.
func (s *store[R]) makeDir() error {
	if s.len() > 0 {
		return nil
	}
	if err := os.Mkdir(s.dir, 0o700); !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

// put writes the record and removes the renamed files of its key. See
// Journal.Put.
func (s *store[R]) put(r R) error {
	if err := s.write(r); err != nil {
		return fmt.Errorf("write the journal record of %s %s in %s: %w", s.kind, r.Key(), s.dir, explain(err))
	}
	return nil
}

func (s *store[R]) write(r R) error {
	if !keyPattern.MatchString(r.Key()) {
		return fmt.Errorf("%q can't be a %s's UID", r.Key(), s.kind)
	}
	data, err := encode(r)
	if err != nil {
		return err
	}
	if err := s.replace(r.Key()+recordSuffix, data); err != nil {
		return err
	}
	s.mu.Lock()
	s.records[r.Key()] = r
	s.mu.Unlock()
	if err := s.syncDir(); err != nil {
		return err
	}
	s.step(s.prefix + "put.durable")
	return s.clearAside(r.Key())
}

// replace puts the data on disk beside the file's place, then moves it there.
func (s *store[R]) replace(name string, data []byte) error {
	temp, err := os.CreateTemp(s.dir, name+".*"+tempSuffix)
	if err != nil {
		return err
	}
	err = files.Replace(s.path(name), temp, func(f *os.File) error { return s.fill(f, data) })
	if err != nil {
		return err
	}
	s.step(s.prefix + "put.renamed")
	return nil
}

// fill writes and syncs the file.
func (s *store[R]) fill(f *os.File, data []byte) error {
	s.step(s.prefix + "put.created")
	_, err := f.Write(data)
	if err == nil {
		s.step(s.prefix + "put.written")
		err = s.syncFile(f)
	}
	if err == nil {
		s.step(s.prefix + "put.synced")
	}
	return err
}

// remove removes the record and the renamed files of the key. See
// Journal.Delete.
func (s *store[R]) remove(key string) error {
	if err := s.unlink(key); err != nil {
		return fmt.Errorf("remove the journal record of %s %s in %s: %w", s.kind, key, s.dir, explain(err))
	}
	return nil
}

// unlink keeps the record in memory until its removal is on disk, so that a
// failed one can be tried again.
func (s *store[R]) unlink(key string) error {
	if _, ok := s.get(key); !ok && !s.isUnreadable(key) {
		return nil
	}
	if err := files.RemoveIfThere(s.path(key + recordSuffix)); err != nil {
		return err
	}
	s.step(s.prefix + "delete.unlinked")
	if err := s.clearAside(key); err != nil {
		return err
	}
	if err := s.syncDir(); err != nil {
		return err
	}
	s.step(s.prefix + "delete.durable")
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.records, key)
	return nil
}

// clearAside removes the renamed files of the key.
func (s *store[R]) clearAside(key string) error {
	if !s.isUnreadable(key) {
		return nil
	}
	if err := files.RemoveIfThere(s.path(key + unreadableSuffix)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.unreadable, key)
	return nil
}

// load takes in what is in the directory, which may be missing.
func (s *store[R]) load() error {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list the journal's directory: %w", err)
	}
	for _, e := range entries {
		if err := s.loadEntry(e.Name()); err != nil {
			return err
		}
	}
	return s.settleRewritten()
}

// loadEntry takes in one directory entry; other people's files are left alone.
func (s *store[R]) loadEntry(name string) error {
	if key, ok := strings.CutSuffix(name, recordSuffix); ok {
		return s.loadRecord(key)
	}
	if key, ok := strings.CutSuffix(name, unreadableSuffix); ok {
		s.loadUnreadable(key)
	}
	if strings.HasSuffix(name, tempSuffix) {
		if err := files.RemoveIfThere(s.path(name)); err != nil {
			return fmt.Errorf("remove a temporary file of the journal: %w", err)
		}
	}
	return nil
}

func (s *store[R]) loadRecord(key string) error {
	path := s.path(key + recordSuffix)
	data, err := readFile(path)
	if err == nil {
		var r R
		if r, err = decode[R](key, data); err == nil {
			s.records[key] = r
			return nil
		}
	}
	if !s.sync && isTorn(data) {
		return files.RemoveIfThere(path)
	}
	if errors.Is(err, ErrNewerVersion) {
		return fmt.Errorf("journal file %s: %w: install that version of the plugin again, or drain this node and remove the file", path, err)
	}
	to := s.path(key + unreadableSuffix)
	if renameErr := os.Rename(path, to); renameErr != nil {
		err = errors.Join(err, renameErr)
		to = path
	}
	s.unreadable[key] = aside{path: to, data: data, err: err}
	return nil
}

// loadUnreadable adds a file that was renamed at an earlier start.
func (s *store[R]) loadUnreadable(key string) {
	path := s.path(key + unreadableSuffix)
	data, err := readFile(path)
	if err == nil {
		if _, err = decode[R](key, data); err == nil {
			err = errors.New("renamed at an earlier start because it was unreadable")
		}
	}
	s.unreadable[key] = aside{path: path, data: data, err: err}
}

// settleRewritten removes renamed files of keys that have a good record again:
// a crash came between the two steps of a put.
func (s *store[R]) settleRewritten() error {
	for key := range s.records {
		if err := s.clearAside(key); err != nil {
			return fmt.Errorf("remove the old unreadable file of %s %s: %w", s.kind, key, err)
		}
	}
	return nil
}

func (s *store[R]) path(name string) string { return filepath.Join(s.dir, name) }

func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFileSize {
		return nil, fmt.Errorf("%s: not a regular file of at most %d bytes", path, maxFileSize)
	}
	return os.ReadFile(path)
}

// isTorn says whether a file that wasn't synced was cut off because the machine
// went down. It got its name when it was complete, so nothing else leaves it
// without contents, or with holes, which read as zeros.
func isTorn(data []byte) bool {
	return data != nil && (len(data) == 0 || bytes.IndexByte(data, 0) >= 0)
}

func (s *store[R]) syncFile(f *os.File) error {
	if !s.sync {
		return nil
	}
	return f.Sync()
}

// syncDir makes the names in the directory durable.
func (s *store[R]) syncDir() error {
	if !s.sync {
		return nil
	}
	d, err := os.Open(s.dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// explain adds to an error what to do about it.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("%w: free some space there; nothing was lost, and it will be tried again", err)
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: the file system was mounted read-only or became so after an error; look at the kernel's log", err)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: the directory was removed while the plugin uses it; restart the plugin's pod", err)
	default:
		return err
	}
}
