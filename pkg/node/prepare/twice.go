package prepare

import (
	"fmt"

	"github.com/tessera-dra/tessera/pkg/allocator"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// allocatedTwice explains why the scheduler has allocated the same silicon to
// both claims, where one of them has a share that can be allocated several times:
// older schedulers don't charge counters for these. It is empty otherwise.
func allocatedTwice(want, holder holding.Record) string {
	for _, d := range held(want) {
		for _, h := range held(holder) {
			if d != h && gpu.Conflict(d, h) && (isMultiple(d) || isMultiple(h)) {
				return fmt.Sprintf("; schedulers of Kubernetes before %s allocate shares and what overlaps them twice (%s): upgrade the control plane", allocator.Fixed, allocator.Issue)
			}
		}
	}
	return ""
}

// isMultiple reports whether a device can be allocated several times.
func isMultiple(d gpu.Device) bool {
	s, ok := d.(gpu.Share)
	return ok && s.Count == 0
}
