package journal

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Contents are what a journal's directory holds at one moment.
type Contents struct {
	// Claims' and GPUs' records, ordered by UID.
	Claims []holding.Record
	GPUs   []holding.GPURecord
	// Settings of GPUs that aren't as they were found, ordered by UUID.
	Settings []holding.Settings
	// Unreadable files, both renamed ones and those that the next Open will
	// rename, ordered by UID.
	Unreadable     []Unreadable
	UnreadableGPUs []UnreadableGPU
	// UnreadableSettings likewise.
	UnreadableSettings []UnreadableGPU
	// Temporary are paths of files that a write under way, or one that was cut
	// off, has made.
	Temporary []string
}

// Read looks at the journal in dir from outside: it takes no lock, waits for
// nobody and changes nothing, so it may be called while a plugin runs. Records
// that come and go meanwhile are in the answer or not. A directory that isn't
// there is an empty journal. A file of a newer version is ErrNewerVersion.
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
	c := Contents{
		Claims: claims.records, GPUs: gpus.records, Settings: settings.records,
		UnreadableGPUs: unreadableGPUs(gpus.unreadable), UnreadableSettings: unreadableGPUs(settings.unreadable),
		Temporary: slices.Concat(claims.temporary, gpus.temporary, settings.temporary),
	}
	for _, uid := range slices.Sorted(maps.Keys(claims.unreadable)) {
		a := claims.unreadable[uid]
		c.Unreadable = append(c.Unreadable, Unreadable{ClaimUID: uid, Path: a.path, Record: salvage(uid, a.data), Err: a.err})
	}
	return c, nil
}

// scanned is the content of one directory.
type scanned[R record] struct {
	records    []R
	unreadable map[string]aside
	temporary  []string
}

func scan[R record](dir string) (scanned[R], error) {
	s := scanned[R]{unreadable: map[string]aside{}}
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

// add takes in one directory entry.
func (s *scanned[R]) add(dir, name string) error {
	path := filepath.Join(dir, name)
	if strings.HasSuffix(name, tempSuffix) {
		s.temporary = append(s.temporary, path)
		return nil
	}
	key, whole := strings.CutSuffix(name, recordSuffix)
	if !whole {
		var put bool
		if key, put = strings.CutSuffix(name, unreadableSuffix); !put {
			return nil
		}
	}
	data, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // removed since the directory was listed
	}
	var r R
	if err == nil {
		r, err = decode[R](key, data)
	}
	switch {
	case errors.Is(err, ErrNewerVersion):
		return fmt.Errorf("journal file %s: %w", path, err)
	case err == nil && whole:
		s.records = append(s.records, r)
		return nil
	case err == nil:
		err = errors.New("renamed at an earlier start because it was unreadable")
	}
	s.unreadable[key] = aside{path: path, data: data, err: err}
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
