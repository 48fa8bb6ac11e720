package journal

import (
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

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	recordSuffix     = ".json"
	unreadableSuffix = ".corrupt"
	tempSuffix       = ".tmp"
	// maxFileSize is far above what a claim's 32 results can fill.
	maxFileSize = 1 << 20
)

// claimUIDPattern is what may become a file's name.
var claimUIDPattern = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z_.-]{0,127}$`)

// Journal is the set of records in one directory. Its methods may be called
// from everywhere at once, but no two writes of the same claim may overlap.
type Journal struct {
	dir  *os.File
	step func(string)

	mu         sync.RWMutex
	records    map[string]Record
	unreadable map[string]Unreadable
}

// Open reads the journal in dir, which it makes if it isn't there. Files that
// can't be read are put aside (see Unreadable); they are no error. A file of a
// newer version is: ErrNewerVersion. So is a journal that another process has
// open. Temporary files of an interrupted write are removed.
//
// step, which may be nil, is called with the name of each step of a write
// after the step; crash tests stop there.
func Open(dir string, step func(string)) (*Journal, error) {
	if step == nil {
		step = func(string) {}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the journal's directory: %w", err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open the journal's directory: %w", err)
	}
	j := &Journal{dir: d, step: step, records: map[string]Record{}, unreadable: map[string]Unreadable{}}
	if err := j.lockAndLoad(); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return j, nil
}

// Close lets another process open the journal. A process that ends needn't.
func (j *Journal) Close() error { return j.dir.Close() }

// Get returns the claim's record.
func (j *Journal) Get(claimUID string) (Record, bool) {
	j.mu.RLock()
	defer j.mu.RUnlock()
	r, ok := j.records[claimUID]
	return r, ok
}

// All returns the records, ordered by claim UID.
func (j *Journal) All() []Record {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return slices.SortedFunc(maps.Values(j.records), func(a, b Record) int { return cmp.Compare(a.ClaimUID, b.ClaimUID) })
}

// Len returns how many records there are.
func (j *Journal) Len() int {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return len(j.records)
}

// Unreadable returns what was put aside and isn't settled yet by a Put or a
// Delete for its claim, ordered by claim UID.
func (j *Journal) Unreadable() []Unreadable {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return slices.SortedFunc(maps.Values(j.unreadable), func(a, b Unreadable) int { return cmp.Compare(a.ClaimUID, b.ClaimUID) })
}

// Holders returns the records of other claims that keep the device from being
// given away, those that could be made out in unreadable files included; in no
// order.
func (j *Journal) Holders(d gpu.Device, exceptClaimUID string) []Record {
	j.mu.RLock()
	defer j.mu.RUnlock()
	var holders []Record
	for uid, r := range j.records {
		if uid != exceptClaimUID && r.Holds(d) {
			holders = append(holders, r)
		}
	}
	for uid, u := range j.unreadable {
		if _, rewritten := j.records[uid]; !rewritten && uid != exceptClaimUID && u.Record.Holds(d) {
			holders = append(holders, u.Record)
		}
	}
	return holders
}

// Put writes the claim's record, in place of any it has. When it returns nil
// the record is on disk. On an error the record before it, or none, is still
// what holds, except where the error comes from the very last step, making
// the new name durable: then Get returns the new record, and another Put or a
// Delete settles it.
func (j *Journal) Put(r Record) error {
	if err := j.put(r); err != nil {
		return fmt.Errorf("write the journal record of claim %s in %s: %w", r.ClaimUID, j.dir.Name(), explain(err))
	}
	return nil
}

// Delete removes the claim's record and what was put aside for it. When it
// returns nil the removal is on disk; nil also when there is no record.
func (j *Journal) Delete(claimUID string) error {
	if err := j.remove(claimUID); err != nil {
		return fmt.Errorf("remove the journal record of claim %s in %s: %w", claimUID, j.dir.Name(), explain(err))
	}
	return nil
}

func (j *Journal) put(r Record) error {
	if !claimUIDPattern.MatchString(r.ClaimUID) {
		return fmt.Errorf("%q can't be a claim's UID", r.ClaimUID)
	}
	r.Grants = slices.Clone(r.Grants)
	data, err := encode(r)
	if err != nil {
		return err
	}
	if err := j.replace(r.ClaimUID+recordSuffix, data); err != nil {
		return err
	}
	j.mu.Lock()
	j.records[r.ClaimUID] = r
	j.mu.Unlock()
	if err := j.dir.Sync(); err != nil {
		return err
	}
	j.step("journal.put.durable")
	return j.settle(r.ClaimUID)
}

// replace puts the data on disk beside the file's place, then moves it there.
func (j *Journal) replace(name string, data []byte) error {
	temp, err := os.CreateTemp(j.dir.Name(), name+".*"+tempSuffix)
	if err != nil {
		return err
	}
	if err := j.fill(temp, data); err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	if err := os.Rename(temp.Name(), j.path(name)); err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	j.step("journal.put.renamed")
	return nil
}

// fill writes, syncs and closes the file.
func (j *Journal) fill(f *os.File, data []byte) error {
	j.step("journal.put.created")
	_, err := f.Write(data)
	if err == nil {
		j.step("journal.put.written")
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		j.step("journal.put.synced")
	}
	return err
}

// remove keeps the record in memory until its removal is on disk, so that a
// failed one can be tried again.
func (j *Journal) remove(claimUID string) error {
	if _, ok := j.Get(claimUID); !ok && !j.IsUnreadable(claimUID) {
		return nil
	}
	if err := removeIfThere(j.path(claimUID + recordSuffix)); err != nil {
		return err
	}
	j.step("journal.delete.unlinked")
	if err := j.settle(claimUID); err != nil {
		return err
	}
	if err := j.dir.Sync(); err != nil {
		return err
	}
	j.step("journal.delete.durable")
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.records, claimUID)
	return nil
}

// settle forgets what was put aside for the claim.
func (j *Journal) settle(claimUID string) error {
	if !j.IsUnreadable(claimUID) {
		return nil
	}
	if err := removeIfThere(j.path(claimUID + unreadableSuffix)); err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.unreadable, claimUID)
	return nil
}

// IsUnreadable says whether Unreadable has the claim.
func (j *Journal) IsUnreadable(claimUID string) bool {
	j.mu.RLock()
	defer j.mu.RUnlock()
	_, ok := j.unreadable[claimUID]
	return ok
}

func (j *Journal) lockAndLoad() error {
	if err := unix.Flock(int(j.dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("the journal in %s is in use by another process: only one plugin may run on a node", j.dir.Name())
		}
		return fmt.Errorf("lock the journal in %s: %w", j.dir.Name(), err)
	}
	entries, err := os.ReadDir(j.dir.Name())
	if err != nil {
		return fmt.Errorf("list the journal's directory: %w", err)
	}
	for _, e := range entries {
		if err := j.load(e); err != nil {
			return err
		}
	}
	return j.settleRewritten()
}

// load takes in one directory entry; other people's files are left alone.
func (j *Journal) load(e fs.DirEntry) error {
	name := e.Name()
	if claimUID, ok := strings.CutSuffix(name, recordSuffix); ok {
		return j.loadRecord(claimUID)
	}
	if claimUID, ok := strings.CutSuffix(name, unreadableSuffix); ok {
		j.loadUnreadable(claimUID)
	}
	if strings.HasSuffix(name, tempSuffix) {
		if err := removeIfThere(j.path(name)); err != nil {
			return fmt.Errorf("remove a temporary file of the journal: %w", err)
		}
	}
	return nil
}

func (j *Journal) loadRecord(claimUID string) error {
	path := j.path(claimUID + recordSuffix)
	data, err := readFile(path)
	if err == nil {
		var r Record
		if r, err = decode(claimUID, data); err == nil {
			j.records[claimUID] = r
			return nil
		}
	}
	if errors.Is(err, ErrNewerVersion) {
		return fmt.Errorf("journal file %s: %w: install that version of the plugin again, or drain this node and remove the file", path, err)
	}
	aside := j.path(claimUID + unreadableSuffix)
	if renameErr := os.Rename(path, aside); renameErr != nil {
		err = errors.Join(err, renameErr)
		aside = path
	}
	j.unreadable[claimUID] = Unreadable{ClaimUID: claimUID, Path: aside, Record: salvage(claimUID, data), Err: err}
	return nil
}

// loadUnreadable takes in a file that was put aside at an earlier start.
func (j *Journal) loadUnreadable(claimUID string) {
	path := j.path(claimUID + unreadableSuffix)
	data, err := readFile(path)
	if err == nil {
		if _, err = decode(claimUID, data); err == nil {
			err = errors.New("put aside at an earlier start")
		}
	}
	j.unreadable[claimUID] = Unreadable{ClaimUID: claimUID, Path: path, Record: salvage(claimUID, data), Err: err}
}

// settleRewritten drops what was put aside for claims that have a good record
// again: a crash came between the two steps of a Put.
func (j *Journal) settleRewritten() error {
	for claimUID := range j.records {
		if err := j.settle(claimUID); err != nil {
			return fmt.Errorf("remove the old unreadable file of claim %s: %w", claimUID, err)
		}
	}
	return nil
}

func (j *Journal) path(name string) string { return filepath.Join(j.dir.Name(), name) }

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

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
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
