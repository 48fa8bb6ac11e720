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
	// Ended deletes the claim's mark and returns nil when no process is left of the
	// containers that had it mounted, nor of the pods. Once it has begun, no further
	// container can start with the claim. When the context ends first, the error
	// names the pods and processes that are left; another call goes on waiting.
	Ended(ctx context.Context, claimUID string, pods []kubeletplugin.NamespacedObject) error
	// Forget deletes the claim's mark without waiting, and drops what Ended knows of
	// the claim. Idempotent.
	Forget(claimUID string) error
	// Marks lists the UIDs of the claims that have a mark.
	Marks() ([]string, error)
}

// Inventory has the node's current devices.
type Inventory interface {
	// Device resolves a name to a device and its GPU's facts, of which memory and
	// MIG profiles tell how much a share has. The error gives the reason: no such
	// GPU now, GPU lost, and so on.
	Device(name gpu.DeviceName) (gpu.Device, gpu.GPU, error)
}

// Partitions has MIG partitions made and taken away (*partition.Manager). Its
// methods may be called for all GPUs at once; on one GPU they wait for each
// other, until the context ends.
type Partitions interface {
	// Make returns the instance that is the partition, making it unless it is
	// there. A journal record holds the partition already. Idempotent.
	Make(ctx context.Context, p gpu.Partition) (gpu.Instance, error)
	// Find returns the instance that is the partition, and changes nothing: it
	// is an error that there is none.
	Find(ctx context.Context, p gpu.Partition) (gpu.Instance, error)
	// Release says that the claim that held the partition needs it no more. One
	// that isn't there, or that somebody else made, or has (holding.Claims.InUse), is fine.
	// Idempotent.
	Release(ctx context.Context, p gpu.Partition) error
	// ClearMIG makes sure that the GPU can be used as a whole: no partition is left
	// on it and its MIG mode is off. Idempotent.
	ClearMIG(ctx context.Context, uuid gpu.UUID) error
}

// Sharing sets up MPS daemons, compute modes and time slices for claims that share
// a GPU or a partition. It computes from the journal each time which of them are
// needed: from the records of this boot that aren't leaving (holding.Claims.SetLeaving),
// admin access left out. Its methods may be called for all claims at once; on one GPU
// they wait for each other, until the context ends.
type Sharing interface {
	// Join sets up what the claim, whose record is in the journal, shares. given has
	// each of the record's devices: its instance where it is, or is a share of, a
	// partition. It returns how the containers reach the MPS daemon of each device
	// whose holding has MPS: the directories; the limits in the answer don't count,
	// those of the record do. A holding without MPS has no entry. Idempotent. After an
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
	// Leaving: nothing in the cluster wants the holder to have the device any
	// more; the kubelet will unprepare it.
	Leaving bool
	// Reason in words, such as "its pod default/trainer was deleted" or "pod
	// default/trainer uses it".
	Reason string
}
