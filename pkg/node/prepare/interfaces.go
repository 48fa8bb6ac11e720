package prepare

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// CDI makes a claim's devices known to the container runtime.
type CDI interface {
	// Write puts the claim's spec on disk completely (atomically) and returns the CDI
	// device ids that a container using the device needs: those that all claims
	// share, and the claim's own. Devices go by the names of their holdings
	// (holding.Holding.Name). It fails, naming the path, if a device node, a library or
	// a directory in the spec isn't on the host. Idempotent.
	Write(claimUID string, devices map[gpu.DeviceName]gpu.Prepared) (map[gpu.DeviceName][]string, error)
	// Remove is idempotent; nil when there is no spec.
	Remove(claimUID string) error
	// Claims lists the UIDs of the claims that have a spec on disk.
	Claims() ([]string, error)
}

// Containers keeps a mark for each claim that shows which containers have it
// (*containers.Containers). The claim's CDI spec mounts the mark.
type Containers interface {
	// AwaitEnd deletes the claim's mark, so that no further container can start with the
	// claim, and waits until no process is left of the containers that mounted it, nor
	// of the pods. If the context ends first, the error names the remaining pods and
	// processes; a later call continues the wait.
	AwaitEnd(ctx context.Context, claimUID string, pods []kubeletplugin.NamespacedObject) error
	// Forget deletes the claim's mark without waiting, and drops what AwaitEnd knows of
	// the claim. Idempotent.
	Forget(claimUID string) error
	// Marks lists the UIDs of the claims that have a mark.
	Marks() ([]string, error)
}

// Inventory has the node's current devices.
type Inventory interface {
	// MayPrepare returns the reason why no claim may be prepared on the node now; nil if
	// claims may.
	MayPrepare() error
	// Device resolves a name to a device and its GPU's facts, from which the size of a
	// share is computed. The error gives the reason: no such
	// GPU now, GPU lost, and so on. A GPU that doesn't answer comes with an error and its
	// last facts.
	Device(name gpu.DeviceName) (gpu.Device, gpu.GPU, error)
}

// Partitions creates and destroys MIG partitions (*partition.Manager). Calls for
// different GPUs run concurrently; calls for one GPU wait for each other until the
// context ends.
type Partitions interface {
	// Ensure returns the instance that is the partition, and creates it unless it is
	// there. A journal record holds the partition already. Idempotent.
	Ensure(ctx context.Context, p gpu.Partition) (gpu.Instance, error)
	// Find returns the instance that is the partition, and changes nothing: it
	// is an error that there is none.
	Find(ctx context.Context, p gpu.Partition) (gpu.Instance, error)
	// Release destroys the partition, or keeps it warm, after no daemon runs on it for its
	// claim (holding.Left). It does nothing if the partition doesn't exist, if
	// another program created it, or if holding.Claims.InUse reports another user.
	// Idempotent.
	Release(ctx context.Context, p gpu.Partition) error
	// ClearMIG makes sure that the GPU can be used as a whole: no partition is left
	// on it and its MIG mode is off. Idempotent.
	ClearMIG(ctx context.Context, uuid gpu.UUID) error
}

// Sharing sets up MPS daemons, compute modes and time slices for claims that share
// a GPU or a partition. It computes from the journal each time which of them are
// needed: from the records of this boot that aren't leaving (holding.Leaving),
// admin access left out. Its methods may be called for all claims at once; on one GPU
// they wait for each other, until the context ends.
type Sharing interface {
	// Join sets up what the claim shares: compute mode, time slices, MPS daemons. The
	// claim's record is in the journal. made has each of the record's devices, with its
	// instance if it is, or is a share of, a partition. Join returns the directories of
	// the MPS daemon for each device whose holding has MPS. Idempotent. After an error,
	// Leave stops the daemons and restores the settings of an incomplete Join.
	Join(ctx context.Context, r holding.Record, made map[gpu.DeviceName]gpu.Prepared) (map[gpu.DeviceName]gpu.MPSDirs, error)
	// EnsureUnshared stops the daemons and restores the settings that no claim needs on
	// the GPUs. It returns an error while one remains. Idempotent.
	EnsureUnshared(ctx context.Context, gpus ...gpu.UUID) error
	// Leave takes down what no claim needs any more on the GPUs of a record that is
	// leaving. When it returns nil, no process of an MPS daemon that only leaving
	// claims had is left on their partitions, which may be destroyed. The end of one on
	// whole GPUs has begun, and no crash stops it: Join and AwaitDaemonEnds wait for it.
	// Idempotent.
	Leave(ctx context.Context, r holding.Record) error
	// AwaitDaemonEnds returns when no MPS daemon is on the GPU as a whole any more that no
	// claim needs.
	AwaitDaemonEnds(ctx context.Context, uuid gpu.UUID) error
}

// Holders finds out about claims that hold a device which another claim wants.
type Holders interface {
	// Look says how the holder stands in the cluster. An error means that this
	// can't be told now.
	Look(ctx context.Context, holder Holder) (Standing, error)
}

// Holder is a claim as the journal knows it.
type Holder struct {
	UID             types.UID
	Namespace, Name string
	// Devices it holds, of the node's pool.
	Devices []gpu.DeviceName
}

// Standing is how a holder stands in the cluster.
type Standing struct {
	// AwaitsUnprepare: nothing in the cluster uses the claim's devices any more; the kubelet
	// will unprepare it.
	AwaitsUnprepare bool
	// Reason in words, such as "its pod default/trainer was deleted" or "pod
	// default/trainer uses it".
	Reason string
}
