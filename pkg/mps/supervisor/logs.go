package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"
)

const (
	// maxLog is how long a log of a daemon may become. They lie in the host's
	// memory, and each client that comes writes some lines.
	maxLog = 4 << 20
	// measureLogs is how often that is looked at.
	measureLogs = time.Minute
)

// shorten empties the daemon's logs that are longer.
func (p place) shorten(longer int64) error {
	var errs []error
	for _, name := range []string{"control.log", "server.log"} {
		path := filepath.Join(p.log(), name)
		info, err := os.Stat(path)
		if err == nil && info.Size() > longer {
			err = os.Truncate(path, 0)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("shorten the daemon's log: %w", err))
		}
	}
	return errors.Join(errs...)
}

// keepLogsShort does so from time to time, until ctx ends.
func (s *Supervisor) keepLogsShort(ctx context.Context) {
	tick := time.NewTicker(measureLogs)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		for _, d := range s.list().Daemons {
			if err := s.cfg.place(d.Name).shorten(maxLog); err != nil {
				klog.FromContext(ctx).Error(err, "The logs of an MPS daemon go on growing", "daemon", d.Name)
			}
		}
	}
}
