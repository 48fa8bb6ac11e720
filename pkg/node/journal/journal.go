package journal

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/files"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	// gpuDir is the directory of the GPUs' records in the journal's directory.
	// Versions that knew only claims don't look there.
	gpuDir = "gpus"
	// settingsDir is the directory of the records of GPUs' settings.
	settingsDir = "settings"
	// healthDir is the directory of the states of GPUs with which something is wrong.
	healthDir = "health"
	// seenDir is the directory of the record of the GPUs that were seen.
	seenDir = "seen"
)

// RemoveEmpty removes the directories in a journal's directory that have no record.
func RemoveEmpty(dir string) error {
	var errs []error
	for _, sub := range []string{gpuDir, settingsDir, healthDir, seenDir} {
		errs = append(errs, files.RemoveIfEmpty(filepath.Join(dir, sub)))
	}
	return errors.Join(errs...)
}

// Journal is the set of records in one directory. Its methods may be called
// from everywhere at once, but no two writes of the same claim, nor of the
// same GPU, may overlap.
type Journal struct {
	lock     *os.File
	claims   *store[holding.Record]
	gpus     *store[holding.GPURecord]
	settings *store[holding.Settings]
	health   *store[holding.Health]
	seen     *store[holding.Seen]

	// mu guards lists and phases, which has the claims whose unprepare has begun, by UID.
	mu     sync.Mutex
	lists  lists
	phases map[string]holding.Phase
}

// Open reads the journal in dir, which it makes if it isn't there. Unreadable files
// are renamed (see Claims and UnreadableGPUs); they are no error. A file that
// the disk fails to read is one, and stays as it is: the devices in it must not be
// given to others. So is a file of a newer version, ErrNewerVersion, and a journal
// that another process has open. Temporary files of an interrupted write are
// removed.
//
// steps, which may be nil, are told of each step of a write after it; crash tests stop there.
func Open(dir string, steps *failpoint.Steps) (*Journal, error) {
	if err := files.MakeDir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the journal's directory: %w", err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open the journal's directory: %w", err)
	}
	j := &Journal{
		lock:     d,
		claims:   newStore[holding.Record](dir, "claim", "journal.", true, steps),
		gpus:     newStore[holding.GPURecord](filepath.Join(dir, gpuDir), "GPU", "journal.gpu.", false, steps),
		settings: newStore[holding.Settings](filepath.Join(dir, settingsDir), "the settings of GPU", "journal.settings.", false, steps),
		health:   newStore[holding.Health](filepath.Join(dir, healthDir), "the health of GPU", "journal.health.", true, steps),
		seen:     newStore[holding.Seen](filepath.Join(dir, seenDir), "the node's", "journal.seen.", true, steps),
		lists:    newLists(),
		phases:   map[string]holding.Phase{},
	}
	if err := j.lockAndLoad(); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return j, nil
}

// Close lets another process open the journal. A process that ends needn't.
func (j *Journal) Close() error { return j.lock.Close() }

// GPU returns the GPU's record. GPUs on which nothing was made have none.
func (j *Journal) GPU(uuid gpu.UUID) (holding.GPURecord, bool) { return j.gpus.get(string(uuid)) }

// GPUs returns the GPUs' records, ordered by UUID.
func (j *Journal) GPUs() []holding.GPURecord { return j.gpus.all() }

// UnreadableGPUs returns the renamed records of GPUs without a PutGPU or a
// DeleteGPU since, ordered by UUID. The partitions in such a record may still
// exist.
func (j *Journal) UnreadableGPUs() []UnreadableGPU { return unreadableGPUs(j.gpus.allUnreadable()) }

// PutGPU writes the GPU's record, all or nothing; as Put, but that it survives
// the end of the process only, not that of the machine: then the recorded
// partitions and settings are gone too.
func (j *Journal) PutGPU(r holding.GPURecord) error {
	r.Partitions = slices.Clone(r.Partitions)
	if err := j.gpus.makeDir(); err != nil {
		return fmt.Errorf("make the directory %s: %w", j.gpus.dir, explain(err))
	}
	return j.gpus.put(r)
}

// DeleteGPU removes the GPU's record and its renamed file; as Delete.
func (j *Journal) DeleteGPU(uuid gpu.UUID) error { return j.gpus.remove(string(uuid)) }

// Settings returns what is remembered of the GPU's settings. A GPU whose settings
// are as they were found has none.
func (j *Journal) Settings(uuid gpu.UUID) (holding.Settings, bool) {
	return j.settings.get(string(uuid))
}

// AllSettings returns the settings of all GPUs that have some, ordered by UUID.
func (j *Journal) AllSettings() []holding.Settings { return j.settings.all() }

// UnreadableSettings returns the renamed settings without a PutSettings or a
// DeleteSettings since, ordered by UUID.
func (j *Journal) UnreadableSettings() []UnreadableGPU {
	return unreadableGPUs(j.settings.allUnreadable())
}

// PutSettings writes the GPU's settings; as PutGPU.
func (j *Journal) PutSettings(s holding.Settings) error {
	if err := j.settings.makeDir(); err != nil {
		return fmt.Errorf("make the directory %s: %w", j.settings.dir, explain(err))
	}
	return j.settings.put(s)
}

// DeleteSettings removes the GPU's settings and their renamed file; as Delete.
func (j *Journal) DeleteSettings(uuid gpu.UUID) error { return j.settings.remove(string(uuid)) }

// AllHealth returns the states of sick GPUs, ordered by UUID. A GPU with which nothing
// is wrong has no record.
func (j *Journal) AllHealth() []holding.Health { return j.health.all() }

// UnreadableHealth returns the renamed records without a PutHealth or a DeleteHealth
// since, ordered by UUID.
func (j *Journal) UnreadableHealth() []UnreadableGPU { return unreadableGPUs(j.health.allUnreadable()) }

// PutHealth writes the record of the GPU's health; as Put.
func (j *Journal) PutHealth(h holding.Health) error {
	if err := j.health.makeDir(); err != nil {
		return fmt.Errorf("make the directory %s: %w", j.health.dir, explain(err))
	}
	return j.health.put(h)
}

// DeleteHealth removes the record of the GPU's health and its renamed files; as
// Delete.
func (j *Journal) DeleteHealth(uuid gpu.UUID) error { return j.health.remove(string(uuid)) }

// lockAndLoad locks the journal and reads it. Plugins take turns by the lock of the data directory;
// that of the journal still keeps a second one off if somebody has deleted the other's file.
func (j *Journal) lockAndLoad() error {
	switch locked, err := files.TryLock(j.lock); {
	case err != nil:
		return fmt.Errorf("lock the journal: %w", err)
	case !locked:
		return fmt.Errorf("the journal in %s is in use by another process: only one plugin may run on a node", j.lock.Name())
	}
	if err := j.claims.load(); err != nil {
		return err
	}
	for _, uid := range slices.Concat(slices.Collect(maps.Keys(j.claims.records)), slices.Collect(maps.Keys(j.claims.unreadable))) {
		j.note(uid)
	}
	return errors.Join(j.gpus.load(), j.settings.load(), j.health.load(), j.seen.load())
}

// UnreadableGPU is a GPU's unreadable file, which was renamed.
type UnreadableGPU struct {
	// GPU is derived from the file's name.
	GPU gpu.UUID
	// Path where the file is now.
	Path string
	// Err says why the file is unreadable; nil never.
	Err error
}

func unreadableGPUs[R record](unreadable map[string]file[R]) []UnreadableGPU {
	list := make([]UnreadableGPU, 0, len(unreadable))
	for _, uuid := range slices.Sorted(maps.Keys(unreadable)) {
		list = append(list, UnreadableGPU{GPU: gpu.UUID(uuid), Path: unreadable[uuid].path, Err: unreadable[uuid].err})
	}
	return list
}
