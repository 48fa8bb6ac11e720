package journal

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/failpoint"
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

// store is the records of one kind: a directory with a file for each.
type store[R record] struct {
	dir string
	// kind is the kind of object in errors: "claim".
	kind string
	// prefix of the steps' names, which are the same with and without sync.
	prefix string
	steps  *failpoint.Steps
	// sync: the records have to survive a crash of the machine. Other records are of no use
	// after a boot, so it is enough that the kernel has them.
	sync bool

	mu         sync.RWMutex
	records    map[string]R
	unreadable map[string]file[R]
	// doubtful has the records of writes and removals that failed after they had begun to
	// change the name: each may be on disk or not, whatever records has.
	doubtful map[string]R
}

func newStore[R record](dir, kind, prefix string, sync bool, steps *failpoint.Steps) *store[R] {
	return &store[R]{dir: dir, kind: kind, prefix: prefix, sync: sync, steps: steps, records: map[string]R{}, unreadable: map[string]file[R]{}, doubtful: map[string]R{}}
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

// allUnreadable returns a copy of the unreadable files, by key.
func (s *store[R]) allUnreadable() map[string]file[R] {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.unreadable)
}

// isUnreadable reports whether allUnreadable has the key.
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
	if err := os.Mkdir(s.dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return s.syncDir(filepath.Dir(s.dir)) // also if the directory exists: its maker may have been killed before syncing
}

// put writes the record and removes the renamed file of its key. See Journal.Put.
func (s *store[R]) put(r R) error {
	temp, err := s.stage(r)
	if err == nil {
		err = s.commit(r, temp)
	}
	return s.notWritten(r, err)
}

func (s *store[R]) notWritten(r R, err error) error {
	if err != nil {
		return fmt.Errorf("write the journal record of %s %s in %s: %w", s.kind, r.Key(), s.dir, explain(err))
	}
	return nil
}

// stage puts the record on disk beside the file's place. When it returns nil the record is
// doubtful: from here on it may be found in its place. After an error there is nothing of it.
func (s *store[R]) stage(r R) (temp *os.File, _ error) {
	if !keyPattern.MatchString(r.Key()) {
		return nil, fmt.Errorf("%q can't be a %s's UID", r.Key(), s.kind)
	}
	data, err := encode(r)
	if err != nil {
		return nil, err
	}
	name := r.Key() + recordSuffix
	if temp, err = os.CreateTemp(s.dir, name+".*"+tempSuffix); err != nil {
		return nil, err
	}
	if err := s.fill(temp, data); err != nil {
		return nil, files.Replace(s.path(name), temp, err)
	}
	s.setDoubtful(r)
	return temp, nil
}

// commit moves a staged record to its place.
func (s *store[R]) commit(r R, temp *os.File) error {
	if err := files.Replace(s.path(r.Key()+recordSuffix), temp, nil); err != nil {
		return err
	}
	s.steps.Reached(s.prefix + "put.renamed")
	s.mu.Lock()
	s.records[r.Key()] = r
	s.mu.Unlock()
	if err := s.syncDir(s.dir); err != nil {
		return err
	}
	s.steps.Reached(s.prefix + "put.durable")
	if err := s.removeRenamed(r.Key()); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.doubtful, r.Key())
	return nil
}

// fill writes and syncs the file.
func (s *store[R]) fill(f *os.File, data []byte) error {
	s.steps.Reached(s.prefix + "put.created")
	_, err := f.Write(data)
	if err == nil {
		s.steps.Reached(s.prefix + "put.written")
		err = s.syncFile(f)
	}
	if err == nil {
		s.steps.Reached(s.prefix + "put.synced")
	}
	return err
}

// remove removes the record and the renamed file of the key. See Journal.Delete.
func (s *store[R]) remove(key string) error {
	if err := s.unlink(key); err != nil {
		return fmt.Errorf("remove the journal record of %s %s in %s: %w", s.kind, key, s.dir, explain(err))
	}
	return nil
}

// unlink keeps the record in memory until its removal is on disk, so that a
// failed one can be tried again. It removes the renamed file first: a kill must not
// leave it alone, as if it were the last record.
func (s *store[R]) unlink(key string) error {
	r, ok := s.get(key)
	if !ok && !s.isUnreadable(key) && !s.isDoubtful(key) {
		return nil
	}
	if ok {
		s.setDoubtful(r)
	}
	for _, name := range []string{key + unreadableSuffix, key + recordSuffix} {
		if err := files.RemoveIfThere(s.path(name)); err != nil {
			return err
		}
	}
	s.steps.Reached(s.prefix + "delete.unlinked")
	if err := s.syncDir(s.dir); err != nil {
		return err
	}
	s.steps.Reached(s.prefix + "delete.durable")
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.records, key)
	delete(s.unreadable, key)
	delete(s.doubtful, key)
	return nil
}

func (s *store[R]) setDoubtful(r R) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.doubtful[r.Key()] = r
}

// isDoubtful reports whether the record may not be on disk as it is in memory.
func (s *store[R]) isDoubtful(key string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	_, ok := s.doubtful[key]
	return ok
}

// removeRenamed removes the renamed file of the key.
func (s *store[R]) removeRenamed(key string) error {
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

func (s *store[R]) path(name string) string { return filepath.Join(s.dir, name) }

func (s *store[R]) syncFile(f *os.File) error {
	if !s.sync {
		return nil
	}
	return f.Sync()
}

// syncDir makes the names in a directory durable.
func (s *store[R]) syncDir(dir string) error {
	if !s.sync {
		return nil
	}
	return files.SyncDir(dir)
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

// version is the version that this package writes, and the newest that it
// reads.
const version = 1

// ErrNewerVersion says that a file was written by a plugin whose files this
// one must not touch.
var ErrNewerVersion = errors.New("written by a newer version of the plugin")

// encode returns the bytes of a record's file.
func encode[R record](r R) ([]byte, error) {
	data, err := files.Seal(version, r)
	if err != nil {
		return nil, err
	}
	return append(data, '\n'), nil
}

// decode reads the bytes of the file named by key. ErrNewerVersion comes only
// from a file whose checksum is right: an unreadable file never looks like a newer version's.
func decode[R record](key string, data []byte) (R, error) {
	var none, r R
	body, err := open(data)
	if err != nil {
		return none, err
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return none, fmt.Errorf("record: %w", err)
	}
	if r.Key() != key {
		return none, fmt.Errorf("the record is of %q", r.Key())
	}
	return r, nil
}

// open takes the body out of the envelope.
func open(data []byte) (json.RawMessage, error) {
	is, body, err := files.Unseal(data)
	if err != nil {
		return nil, err
	}
	if is > version {
		return nil, fmt.Errorf("%w (format %d, this one reads up to %d)", ErrNewerVersion, is, version)
	}
	if is < 1 {
		return nil, fmt.Errorf("there is no format %d", is)
	}
	return body, nil
}
