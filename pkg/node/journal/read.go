package journal

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/files"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Contents are what a journal's directory holds at one moment.
type Contents struct {
	// Claims' and GPUs' records, ordered by UID.
	Claims []holding.Record
	GPUs   []holding.GPURecord
	// Settings of GPUs whose compute mode or time slice differs from the original one,
	// ordered by UUID.
	Settings []holding.Settings
	// Unreadable files, both renamed ones and those that the next Open will
	// rename, ordered by UID.
	Unreadable     holding.Claims
	UnreadableGPUs []UnreadableGPU
	// UnreadableSettings likewise.
	UnreadableSettings []UnreadableGPU
	// Temporary are paths of files that a write in progress, or an interrupted one, has
	// created.
	Temporary []string
}

// Read reads the journal in dir from outside. It takes no lock, doesn't wait and changes
// nothing, so it may be called while a plugin runs. Records that are written or deleted
// meanwhile may be in the answer or not. A directory that doesn't exist is an empty
// journal. A file of a newer version is ErrNewerVersion.
func Read(dir string) (Contents, error) {
	claims, err := scan[holding.Record](dir)
	if err != nil {
		return Contents{}, err
	}
	gpus, err := scan[holding.GPURecord](filepath.Join(dir, gpuDir))
	if err != nil {
		return Contents{}, err
	}
	settings, err := scan[holding.Settings](filepath.Join(dir, settingsDir))
	if err != nil {
		return Contents{}, err
	}
	health, err := scan[holding.Health](filepath.Join(dir, healthDir))
	if err != nil {
		return Contents{}, err
	}
	seen, err := scan[holding.Seen](filepath.Join(dir, seenDir))
	if err != nil {
		return Contents{}, err
	}
	return Contents{
		Claims: claims.records, GPUs: gpus.records, Settings: settings.records,
		Unreadable: unreadableClaims(claims.unreadable), UnreadableGPUs: unreadableGPUs(gpus.unreadable),
		UnreadableSettings: unreadableGPUs(settings.unreadable),
		Temporary:          slices.Concat(claims.temporary, gpus.temporary, settings.temporary, health.temporary, seen.temporary),
	}, nil
}

// scanned is the content of one directory.
type scanned[R record] struct {
	records    []R
	unreadable map[string]file[R]
	temporary  []string
}

func scan[R record](dir string) (scanned[R], error) {
	s := scanned[R]{unreadable: map[string]file[R]{}}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return s, fmt.Errorf("list the journal's directory: %w", err)
	}
	for _, e := range entries {
		if err := s.add(dir, e.Name()); err != nil {
			return s, err
		}
	}
	slices.SortFunc(s.records, func(a, b R) int { return cmp.Compare(a.Key(), b.Key()) })
	return s, nil
}

// add reads one directory entry.
func (s *scanned[R]) add(dir, name string) error {
	path := filepath.Join(dir, name)
	if strings.HasSuffix(name, tempSuffix) {
		s.temporary = append(s.temporary, path)
		return nil
	}
	key, isRecord := strings.CutSuffix(name, recordSuffix)
	if !isRecord {
		var isRenamed bool
		if key, isRenamed = strings.CutSuffix(name, unreadableSuffix); !isRenamed {
			return nil
		}
	}
	f, err := readFile[R](path, key)
	switch {
	case errors.Is(err, fs.ErrNotExist): // removed since the directory was listed
	case err != nil:
		return err
	case f.err == nil:
		s.records = append(s.records, f.record)
	default:
		s.unreadable[key] = f
	}
	return nil
}

// SettingsFile is where the journal in dir has the GPU's settings, if there are
// some.
func SettingsFile(dir string, uuid gpu.UUID) string {
	return filepath.Join(dir, settingsDir, string(uuid)+recordSuffix)
}

// GPUFile is where the journal in dir has the GPU's record, if there is one.
func GPUFile(dir string, uuid gpu.UUID) string {
	return filepath.Join(dir, gpuDir, string(uuid)+recordSuffix)
}

// load reads the directory, which may be missing.
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
	if err := s.removeRewritten(); err != nil {
		return err
	}
	// A process that was killed may not have synced its last change, and a claim that
	// is prepared or unprepared again is answered without another one.
	if err := s.syncDir(s.dir); err != nil {
		return fmt.Errorf("sync the journal's directory: %w", err)
	}
	return nil
}

// loadEntry reads one directory entry. It ignores files that the journal didn't write.
func (s *store[R]) loadEntry(name string) error {
	if key, ok := strings.CutSuffix(name, recordSuffix); ok {
		return s.loadRecord(key)
	}
	if key, ok := strings.CutSuffix(name, unreadableSuffix); ok {
		return s.loadRenamed(key)
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
	f, err := readFile[R](path, key)
	if err != nil {
		return err
	}
	if f.err == nil {
		s.records[key] = f.record
		return nil
	}
	if !s.sync && isTorn(f.data) {
		return files.RemoveIfThere(path)
	}
	f.path = s.path(key + unreadableSuffix)
	if err := os.Rename(path, f.path); err != nil {
		f.err = errors.Join(f.err, err)
		f.path = path
	}
	s.unreadable[key] = f
	return nil
}

// loadRenamed adds a file that was renamed at an earlier start.
func (s *store[R]) loadRenamed(key string) error {
	f, err := readFile[R](s.path(key+unreadableSuffix), key)
	if err != nil {
		return err
	}
	s.unreadable[key] = f
	return nil
}

// removeRewritten removes renamed files of keys that have a record again: a crash came
// between the two steps of a put.
func (s *store[R]) removeRewritten() error {
	for key := range s.records {
		if err := s.removeRenamed(key); err != nil {
			return fmt.Errorf("remove the renamed file of %s %s: %w", s.kind, key, err)
		}
	}
	return nil
}

// file is a record's file as it was read.
type file[R record] struct {
	path   string
	record R
	// data is nil if this isn't a regular file.
	data []byte
	// err says why the file is unreadable: why data isn't a record. It is nil if the file
	// has one.
	err error
}

// errRenamed is the error of a renamed file that looks like a record by now.
var errRenamed = errors.New("it was unreadable when an earlier start renamed it")

// readFile reads a record's file. An error says nothing about the content: the disk
// failed, or the file is a newer version's.
func readFile[R record](path, key string) (file[R], error) {
	f := file[R]{path: path}
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return f, readError(path, err)
	case !info.Mode().IsRegular() || info.Size() > maxFileSize:
		f.err = fmt.Errorf("%s: not a regular file of at most %d bytes", path, maxFileSize)
		return f, nil
	}
	if f.data, err = os.ReadFile(path); err != nil {
		return f, readError(path, err)
	}
	f.record, f.err = decode[R](key, f.data)
	if errors.Is(f.err, ErrNewerVersion) {
		return f, fmt.Errorf("journal file %s: %w: install that version of the plugin again, or drain this node and remove the file", path, f.err)
	}
	if f.err == nil && strings.HasSuffix(path, unreadableSuffix) {
		f.err = errRenamed
	}
	return f, nil
}

// readError adds the consequences to an error of reading a file.
func readError(path string, err error) error {
	return fmt.Errorf("read journal file %s: %w: the plugin doesn't start without this file, and is restarted until it can be read; "+
		"look for disk errors in the node's kernel log (dmesg); before you remove the file, end the node's pods with claims", path, err)
}

// isTorn reports whether a file that wasn't synced was cut off because the machine
// went down. It got its name when it was complete, so nothing else leaves it
// without contents, or with holes, which read as zeros.
func isTorn(data []byte) bool {
	return data != nil && (len(data) == 0 || bytes.IndexByte(data, 0) >= 0)
}

// claimPattern and holdingPattern find in an unreadable file what encode wrote.
var claimPattern = regexp.MustCompile(`"namespace":"([^"]{1,63})","name":"([^"]{1,253})","bootID":"([^"]{0,64})"`)

var holdingPattern = regexp.MustCompile(`"device":"([^"]{1,63})","gpu":"(GPU-[0-9a-fA-F-]{36})"(?:,"request":"([^"]{0,127})"(,"admin":true)?)?`)

// salvage reads as much as it can of a claim's unreadable file: the claim's name, its
// boot and its holdings are each there or empty. A holding that is cut off
// before it says whether it is an admin's counts as one that holds its device.
func salvage(claimUID string, data []byte) holding.Record {
	r := holding.Record{ClaimUID: claimUID}
	if m := claimPattern.FindSubmatch(data); m != nil {
		r.Namespace, r.Name, r.BootID = string(m[1]), string(m[2]), string(m[3])
	}
	for _, m := range holdingPattern.FindAllSubmatch(data, -1) {
		r.Holdings = append(r.Holdings, holding.Holding{
			Device:  gpu.DeviceName(m[1]),
			GPU:     gpu.UUID(m[2]),
			Request: string(m[3]),
			Admin:   len(m[4]) > 0,
		})
	}
	return r
}
