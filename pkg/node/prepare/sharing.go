package prepare

import (
	"context"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// Sharing sets up what lets several claims, or the processes of one, have a GPU
// or a partition at the same time: MPS daemons, compute modes, time slices. What
// is needed where is computed from the journal each time: from the records of
// this boot that aren't leaving (journal.SetLeaving), admin grants left out. Its
// methods may be called for all claims at once; on one GPU they wait for each
// other, until the context ends.
type Sharing interface {
	// Join sets up what the claim, whose record is in the journal, shares. given has
	// each of the record's devices: its instance where it is, or is a share of, a
	// partition. It returns how the containers reach the MPS daemon of each device
	// whose grant has MPS: the directories; the limits in the answer don't count,
	// those of the record do. A grant without MPS has no entry. Of a claim that has GPUs
	// to itself, it sets up nothing, and is an error while something that others shared
	// them through is still there. Idempotent. After an
	// error, what was set up is known, and taken down by Leave.
	Join(ctx context.Context, r journal.Record, given map[gpu.DeviceName]gpu.Given) (map[gpu.DeviceName]*gpu.MPSClient, error)
	// Leave takes down what no claim needs any more on the GPUs of a record that is
	// leaving. When it returns nil, no process of an MPS daemon that only leaving
	// claims had is left on their partitions, which may be destroyed. The end of one on
	// whole GPUs has begun, and no crash stops it: Join and AwaitEnds wait for it.
	// Idempotent.
	Leave(ctx context.Context, r journal.Record) error
	// AwaitEnds returns when no MPS daemon is on the GPU as a whole any more that no
	// claim needs.
	AwaitEnds(ctx context.Context, uuid gpu.UUID) error
}
