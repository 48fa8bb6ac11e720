package journal

import (
	"errors"
	"fmt"

	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Seen returns the GPUs that were seen last. It is false if there is no record, or none that
// can be read.
func (j *Journal) Seen() (holding.Seen, bool) { return j.seen.get(holding.Seen{}.Key()) }

// UnreadableSeen says why the record of the GPUs that were seen can't be read, until there is
// another one; nil: it can be, or there is none.
func (j *Journal) UnreadableSeen() error {
	var errs []error
	for _, f := range j.seen.allUnreadable() {
		errs = append(errs, fmt.Errorf("%s: %w", f.path, f.err))
	}
	return errors.Join(errs...)
}

// PutSeen writes the GPUs that were seen; as Put.
func (j *Journal) PutSeen(s holding.Seen) error {
	if err := j.seen.makeDir(); err != nil {
		return fmt.Errorf("make the directory %s: %w", j.seen.dir, explain(err))
	}
	return j.seen.put(s)
}

// DeleteSeen removes the record of the GPUs that were seen, and its renamed file; as Delete.
func (j *Journal) DeleteSeen() error { return j.seen.remove(holding.Seen{}.Key()) }
