package partition

import (
	"context"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	// retryFirst and retryLast bound the time after which Run tries again what
	// failed; it doubles in between.
	retryFirst = 5 * time.Second
	retryLast  = time.Minute
)

// Run destroys partitions that nobody has used for as long as SetKeepWarm says,
// switches MIG mode off some seconds after the last partition of ours is gone,
// and retries failures. It returns when the context has ended and operations in
// progress are done.
func (m *Manager) Run(ctx context.Context) {
	m.worker.Sweep(ctx, "Idle MIG partitions stay for now; it is tried again", func(ctx context.Context, uuid gpu.UUID) error {
		return m.tidy(ctx, "sweep", uuid, limits{keepWarm: m.keep(uuid), linger: modeLinger})
	})
}

// plan has Run come back when something of ours is due to go.
func (v *visit) plan() {
	for _, o := range v.ours {
		v.planOwn(o)
	}
	switch {
	case !v.switched || len(v.ours) > 0:
		v.m.notEmpty(v.uuid)
	case len(v.others) > 0: // the mode stays on for their sake
		v.planIn(retryLast)
	default:
		v.planIn(modeLinger - v.m.emptyFor(v.uuid))
	}
}

// planOwn is plan for one of our partitions; a claim's partition is planned
// when the claim releases it.
func (v *visit) planOwn(o own) {
	keep := v.m.keep(v.uuid)
	switch {
	case o.instance == nil:
	case v.m.holder(o.Partition) == "":
		v.planIn(keep - v.m.idleFor(o.Partition))
	case v.m.isIdle(o.Partition): // given up, and the claim's record is about to go
		v.planIn(max(keep-v.m.idleFor(o.Partition), retryFirst))
	case len(v.m.Journal.Unreadable()) > 0: // whose claims give up what their names tell, and that may not be all
		v.planIn(retryLast)
	}
}

func (v *visit) planIn(wait time.Duration) { v.m.worker.At(v.uuid, time.Now().Add(wait)) }
