package healthmonitor

import (
	"errors"

	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// ForgetHealthy removes the records of GPUs with which nothing is wrong: they say how
// often a cause came back, who ended one, and when the GPU was reset. Those of a plugin that
// was killed stay.
func ForgetHealthy(j *journal.Journal) error {
	var errs []error
	for _, h := range j.AllHealth() {
		if len(h.State.Causes) == 0 {
			errs = append(errs, j.DeleteHealth(h.GPU))
		}
	}
	return errors.Join(errs...)
}
