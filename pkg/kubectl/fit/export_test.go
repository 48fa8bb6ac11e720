package fit

import "time"

// GiveUpAfter sets for how long combinations are tried.
func (j *Judge) GiveUpAfter(d time.Duration) { j.within = d }
