package prepare

import (
	"context"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Sharing sets up MPS daemons, compute modes and time slices for claims that share
// a GPU or a partition. It computes from the journal each time which of them are
// needed: from the records of this boot that aren't leaving (holding.Claims.SetLeaving),
// admin grants left out. Its methods may be called for all claims at once; on one GPU
// they wait for each other, until the context ends.
type Sharing interface {
	// Join sets up what the claim, whose record is in the journal, shares. given has
	// each of the record's devices: its instance where it is, or is a share of, a
	// partition. It returns how the containers reach the MPS daemon of each device
	// whose grant has MPS: the directories; the limits in the answer don't count,
	// those of the record do. A grant without MPS has no entry. Idempotent. After an
	// error, Leave stops the daemons and restores the settings of an incomplete Join.
	Join(ctx context.Context, r holding.Record, given map[gpu.DeviceName]gpu.Prepared) (map[gpu.DeviceName]gpu.MPSDirs, error)
	// EnsureUnshared returns nil when no daemon or setting of claims is left on the
	// GPUs; an error while there is one. Idempotent.
	EnsureUnshared(ctx context.Context, gpus ...gpu.UUID) error
	// Leave takes down what no claim needs any more on the GPUs of a record that is
	// leaving. When it returns nil, no process of an MPS daemon that only leaving
	// claims had is left on their partitions, which may be destroyed. The end of one on
	// whole GPUs has begun, and no crash stops it: Join and AwaitEnds wait for it.
	// Idempotent.
	Leave(ctx context.Context, r holding.Record) error
	// AwaitEnds returns when no MPS daemon is on the GPU as a whole any more that no
	// claim needs.
	AwaitEnds(ctx context.Context, uuid gpu.UUID) error
}
