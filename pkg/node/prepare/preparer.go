package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// CDI makes a claim's devices known to the container runtime.
type CDI interface {
	// Write puts the claim's spec on disk completely (atomically) and returns the CDI
	// device ids that a container using the device needs: those that all claims
	// share, and the claim's own. Devices go by the names of their grants
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
	// Whole makes sure that the GPU can be used as a whole: no partition is left
	// on it and its MIG mode is off. Idempotent.
	Whole(ctx context.Context, uuid gpu.UUID) error
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

// Options are what a Preparer is built from.
type Options struct {
	Journal    *journal.Journal
	Claims     *holding.Claims
	CDI        CDI
	Containers Containers
	Inventory  Inventory
	Partitions Partitions
	Sharing    Sharing
	Holders    Holders
	// Driver is the driver's name; Pool is the name of the node's pool.
	Driver, Pool string
	// BootID of the running kernel (/proc/sys/kernel/random/boot_id).
	BootID string
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// ConditionsChanged, which may be nil, is called after what Conditions
	// returns has changed. It must not block.
	ConditionsChanged func()
	// OnPrepared, which may be nil, is called after a claim with partitions or MPS was
	// given what it has, in a prepare or in a recovery. It must not block.
	OnPrepared func(claim kubeletplugin.NamespacedObject, devices map[gpu.DeviceName]gpu.Prepared)
	// Warn, which may be nil, writes a warning event about the claim; reason is one
	// word in CamelCase. It must not block.
	Warn func(claim kubeletplugin.NamespacedObject, reason, message string)
	// Step, which may be nil, is called with the name of each step after the
	// step; crash tests stop there.
	Step func(step string)
}

// Preparer prepares and unprepares claims. Its methods may be called from
// everywhere at once.
type Preparer struct {
	Options
	locks *locks
	calls *calls
	// releases wakes waiting prepares when a claim has released its devices.
	releases *broadcast
	metrics  *metrics
}

// New builds a Preparer; Recover has to run before the first Prepare.
func New(o Options) *Preparer {
	if o.Step == nil {
		o.Step = func(string) {}
	}
	if o.OnPrepared == nil {
		o.OnPrepared = func(kubeletplugin.NamespacedObject, map[gpu.DeviceName]gpu.Prepared) {}
	}
	if o.Warn == nil {
		o.Warn = func(kubeletplugin.NamespacedObject, string, string) {}
	}
	if o.ConditionsChanged == nil {
		o.ConditionsChanged = func() {}
	}
	return &Preparer{
		Options: o, locks: newLocks(), calls: newCalls(), releases: newBroadcast(),
		metrics: newMetrics(o.Registerer, o.Journal),
	}
}

// Begin tells that prepares of these claims have arrived and are about to
// reach Prepare with the returned context: an Unprepare from now on wins over
// them, even if Prepare gets its call later. The caller calls done after
// Prepare has returned. Prepare works without Begin too; then it begins
// itself.
func (p *Preparer) Begin(ctx context.Context, claimUIDs ...types.UID) (_ context.Context, done func()) {
	return p.calls.begin(ctx, claimUIDs)
}

// Prepare gives the claim its devices: one result per grant, in the order of
// the allocation. When it returns nil, the claim's record is on disk, its
// partitions exist, what it shares with others is set up, its CDI spec is on disk
// and the spec's device nodes are on the host. It is idempotent: a partition that
// somebody has destroyed, or an MPS daemon that somebody has ended, is created
// again. On an error the claim holds nothing that it did not hold before, unless
// rolling back failed too; then its record stays for the kubelet's next call.
//
// A device that another claim holds is waited for, if that claim is on its
// way out, until shortly before the context's deadline; so is the memory of MPS
// shares that were allocated more of it than there is.
func (p *Preparer) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	start := time.Now()
	devices, err := p.prepare(ctx, c)
	p.metrics.prepared(start, err)
	return devices, err
}

// Unprepare takes the claim's devices back; when it returns nil, neither a
// record nor a CDI spec of the claim is left, and its partitions are given up.
// A claim that has none is fine.
// Before anything is released, it waits until no process is left of any pod that
// used the claim, until shortly before the context's deadline; then it fails, the
// record stays, and a warning names the pods. It doesn't wait for processes of a
// claim whose GPUs are all lost: these may never end, and no other claim gets the
// GPUs. Prepares of the claim that began before are stopped, and leave nothing
// behind.
func (p *Preparer) Unprepare(ctx context.Context, c kubeletplugin.NamespacedObject) error {
	start := time.Now()
	err := p.unprepare(ctx, c)
	p.metrics.unprepared(start, err)
	return err
}

// Conditions returns what the journal knows to be wrong with GPUs: a GPU named
// in an unreadable record is StateUnreadable until the kubelet has prepared
// or unprepared that record's claim.
func (p *Preparer) Conditions() map[gpu.UUID][]gpu.Condition {
	conditions := map[gpu.UUID][]gpu.Condition{}
	for _, u := range p.Journal.Unreadable() {
		for _, uuid := range u.Record.GPUs() {
			conditions[uuid] = append(conditions[uuid], gpu.Condition{
				Type: gpu.StateUnreadable,
				Message: fmt.Sprintf("journal file %s can't be read; claim %s may still hold the GPU; this ends when the kubelet unprepares that claim; if it never does, drain the node, remove the file and restart the plugin",
					u.Path, u.ClaimUID),
			})
		}
	}
	return conditions
}

func (p *Preparer) prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	ctx, done := p.calls.join(ctx, c.UID)
	defer done()
	grants, err := claim.Read(c, p.Driver, p.Pool)
	if err != nil {
		return nil, err
	}
	want, err := p.record(c, grants)
	if err != nil {
		return nil, err
	}
	r, before, unlock, err := p.reserve(ctx, want)
	if err != nil {
		return nil, err
	}
	defer unlock()
	ids, err := p.realize(ctx, r, before)
	if errors.Is(context.Cause(ctx), errUnprepared) {
		return nil, errUnprepared // the unprepare waits for the lock to take back what there is
	}
	if err != nil {
		return nil, err
	}
	return p.results(r, ids), nil
}

// reserve makes the record durable under the locks of the claim and of the GPUs
// that it is to hold. Then it unlocks the GPUs: the next steps wait for the
// hardware, and the record keeps the devices from others. It returns the record
// that is in force, whether the claim may have been prepared before, and the
// function that unlocks the claim.
func (p *Preparer) reserve(ctx context.Context, want holding.Record) (r holding.Record, before bool, unlock func(), _ error) {
	unlock, unlockGPUs, err := p.lockFree(ctx, want)
	if err != nil {
		return r, false, nil, err
	}
	defer unlockGPUs()
	p.Step("prepare.locked")
	if r, before, err = p.remember(want); err != nil {
		unlock()
		return r, false, nil, err
	}
	p.Claims.SetStaying(want.ClaimUID)
	p.Step("prepare.recorded")
	return r, before, unlock, nil
}

// remember writes the record, unless it is there already, and returns the one
// that is there.
func (p *Preparer) remember(want holding.Record) (_ holding.Record, before bool, _ error) {
	have, again := p.Journal.Get(want.ClaimUID)
	if again && have.BootID == p.BootID {
		if !slices.EqualFunc(have.Holdings, want.Holdings, holding.Holding.Same) {
			return have, true, fmt.Errorf("the claim was allocated again (%s) while the kubelet still has it prepared with its previous devices (%s); this ends when the kubelet unprepares the claim: delete the pod",
				describeGrants(want.Holdings), describeGrants(have.Holdings))
		}
		return have, true, p.addPods(&have, want.Pods)
	}
	// It may have been prepared before, too, where its record can't be read.
	before = again || p.Journal.IsUnreadable(want.ClaimUID)
	unreadable := len(p.Journal.Unreadable())
	if err := p.Journal.Put(want); err != nil {
		if !before {
			err = errors.Join(err, p.drop(want.ClaimUID)) // nothing else has been done yet
		}
		return want, before, err
	}
	p.notifyRead(unreadable)
	return want, before, nil
}

// addPods records pods that use the claim since it was prepared.
func (p *Preparer) addPods(r *holding.Record, pods []holding.Pod) error {
	var more []holding.Pod
	for _, pod := range pods {
		if !slices.Contains(r.Pods, pod) {
			more = append(more, pod)
		}
	}
	if more == nil {
		return nil
	}
	r.Pods = slices.Concat(r.Pods, more)
	return p.Journal.Put(*r)
}

// realize has the hardware make what the record says, and writes the spec. The
// claim's lock is held.
func (p *Preparer) realize(ctx context.Context, r holding.Record, before bool) (map[gpu.DeviceName][]string, error) {
	devices, err := p.makeDevices(ctx, r)
	if err == nil {
		err = p.ensureUnshared(ctx, r)
	}
	if err != nil {
		return nil, p.undo(ctx, r.ClaimUID, before, err)
	}
	ids, err := p.CDI.Write(r.ClaimUID, devices)
	if err != nil {
		return nil, p.undo(ctx, r.ClaimUID, before, fmt.Errorf("write the CDI spec of the claim: %w", err))
	}
	p.Step("prepare.written")
	p.notifyPrepared(r, devices)
	return ids, nil
}

// notifyPrepared passes on what a claim was given whose devices' attributes don't say
// it all.
func (p *Preparer) notifyPrepared(r holding.Record, devices map[gpu.DeviceName]gpu.Prepared) {
	hasNews := func(g holding.Holding) bool { return g.Partition != holding.Partition{} || g.MPS != nil }
	if slices.ContainsFunc(r.Holdings, hasNews) {
		p.OnPrepared(kubeletplugin.NamespacedObject{
			NamespacedName: types.NamespacedName{Namespace: r.Namespace, Name: r.Name}, UID: types.UID(r.ClaimUID),
		}, devices)
	}
}

// undo undoes a first prepare. Results of an earlier prepare of the claim stay:
// a container may be using them. It works even if the call's context has ended.
func (p *Preparer) undo(ctx context.Context, claimUID string, before bool, cause error) error {
	if before {
		return cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWithin)
	defer cancel()
	return errors.Join(cause, p.withdraw(ctx, claimUID, unused))
}

// undoWithin bounds the undoing of a prepare whose time may be over.
const undoWithin = 30 * time.Second

// withdraw removes the spec and the mark. When ended has returned nil, it removes
// daemons and settings that no other claim needs, releases the partitions, and then
// drops the record.
func (p *Preparer) withdraw(ctx context.Context, claimUID string, ended func(holding.Record) error) error {
	p.Claims.SetUnpreparing(claimUID)
	if err := p.CDI.Remove(claimUID); err != nil {
		return fmt.Errorf("remove the CDI spec of the claim: %w", err)
	}
	p.Step("unprepare.removed")
	r := p.lastRecord(claimUID)
	if err := ended(r); err != nil {
		return err
	}
	p.Claims.SetLeaving(claimUID) // not before: its containers need what they share
	if err := p.Containers.Forget(claimUID); err != nil {
		return err
	}
	p.Step("unprepare.unmarked")
	if err := p.leaveShared(ctx, r); err != nil {
		return err
	}
	if err := p.release(ctx, r); err != nil {
		return err
	}
	return p.drop(claimUID)
}

// unused is the ended function of claims that no container can have.
func unused(holding.Record) error { return nil }

// drop removes the record.
func (p *Preparer) drop(claimUID string) error {
	unreadable := len(p.Journal.Unreadable())
	if err := p.Journal.Delete(claimUID); err != nil {
		return err
	}
	p.Claims.SetStaying(claimUID)
	p.releases.tell()
	p.notifyRead(unreadable)
	p.Step("unprepare.forgotten")
	return nil
}

// notifyRead reports that an unreadable record was resolved.
func (p *Preparer) notifyRead(before int) {
	if len(p.Journal.Unreadable()) != before {
		p.ConditionsChanged()
	}
}

func (p *Preparer) unprepare(ctx context.Context, c kubeletplugin.NamespacedObject) error {
	p.calls.stop(c.UID)
	unlock, err := p.locks.lock(ctx, claimKey(string(c.UID)))
	if err != nil {
		return fmt.Errorf("wait for another operation on the claim: %w", err)
	}
	defer unlock()
	return p.withdraw(ctx, string(c.UID), func(r holding.Record) error { return p.ended(ctx, c, r) })
}

// results returns the answer to the kubelet.
func (p *Preparer) results(r holding.Record, ids map[gpu.DeviceName][]string) []kubeletplugin.Device {
	devices := make([]kubeletplugin.Device, 0, len(r.Holdings))
	for _, g := range r.Holdings {
		d := kubeletplugin.Device{
			Requests:     []string{g.Request},
			PoolName:     p.Pool,
			DeviceName:   string(g.Device),
			CDIDeviceIDs: ids[g.Name()],
		}
		if g.ShareID != "" {
			d.ShareID = new(types.UID(g.ShareID))
		}
		devices = append(devices, d)
	}
	return devices
}
