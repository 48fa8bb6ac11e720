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
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// CDI makes a claim's devices known to the container runtime.
type CDI interface {
	// Write puts the claim's spec on disk completely (atomically) and returns
	// the CDI device ids that a container using the device needs: those of what
	// all claims have in common, and the claim's own. It fails, naming the path,
	// if a device node or a library in the spec isn't on the host. Idempotent.
	Write(claimUID string, devices map[gpu.DeviceName]gpu.Given) (map[gpu.DeviceName][]string, error)
	// Remove is idempotent; nil when there is no spec.
	Remove(claimUID string) error
	// Claims lists the UIDs of the claims that have a spec on disk.
	Claims() ([]string, error)
}

// Inventory is what the node has now.
type Inventory interface {
	// Device resolves a name to a device and its GPU's facts. The error says
	// what is wrong: no such GPU now, GPU lost, and so on.
	Device(name gpu.DeviceName) (gpu.Device, gpu.GPU, error)
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
	Journal   *journal.Journal
	CDI       CDI
	Inventory Inventory
	Holders   Holders
	// Driver is the driver's name; Pool is the name of the node's pool.
	Driver, Pool string
	// BootID of the running kernel (/proc/sys/kernel/random/boot_id).
	BootID string
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// ConditionsChanged, which may be nil, is called after what Conditions
	// returns has changed. It must not block.
	ConditionsChanged func()
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
	// releases tells when a claim has given up what it had.
	releases *broadcast
	metrics  *metrics
}

// New builds a Preparer; Recover has to run before the first Prepare.
func New(o Options) *Preparer {
	if o.Step == nil {
		o.Step = func(string) {}
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
// the allocation. When it returns nil, the claim's record and its CDI spec are
// on disk and the spec's device nodes are on the host. It is idempotent. On an
// error the claim holds nothing that it did not hold before.
//
// A device that another claim holds is waited for, if that claim is on its
// way out, until shortly before the context's deadline.
func (p *Preparer) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	start := time.Now()
	devices, err := p.prepare(ctx, c)
	p.metrics.prepared(start, err)
	return devices, err
}

// Unprepare takes the claim's devices back; when it returns nil, neither a
// record nor a CDI spec of the claim is left. A claim that has none is fine.
// Prepares of the claim that began before are stopped, and leave nothing
// behind.
func (p *Preparer) Unprepare(ctx context.Context, c kubeletplugin.NamespacedObject) error {
	start := time.Now()
	err := p.unprepare(ctx, c.UID)
	p.metrics.unprepared(start, err)
	return err
}

// Prepared returns the records of the claims that hold or look at devices,
// ordered by claim UID.
func (p *Preparer) Prepared() []journal.Record { return p.Journal.All() }

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
	devices, err := p.resolve(grants)
	if err != nil {
		return nil, err
	}
	want := p.record(c, grants, devices)
	unlock, err := p.lockFree(ctx, want)
	if err != nil {
		return nil, err
	}
	defer unlock()
	p.Step("prepare.locked")
	ids, err := p.give(want, devices)
	if err != nil {
		return nil, err
	}
	if errors.Is(context.Cause(ctx), errUnprepared) {
		return nil, errUnprepared // the unprepare waits for the lock to take it all back
	}
	return p.results(grants, ids), nil
}

// resolve finds the devices of the grants on this node.
func (p *Preparer) resolve(grants []claim.Grant) (map[gpu.DeviceName]gpu.Device, error) {
	devices := make(map[gpu.DeviceName]gpu.Device, len(grants))
	for _, g := range grants {
		d, _, err := p.Inventory.Device(g.Device)
		if err != nil {
			return nil, fmt.Errorf("request %q was given device %q: %w", g.Request, g.Device, err)
		}
		devices[g.Device] = d
	}
	return devices, nil
}

// record is what the journal is to remember of the claim.
func (p *Preparer) record(c *resourceapi.ResourceClaim, grants []claim.Grant, devices map[gpu.DeviceName]gpu.Device) journal.Record {
	r := journal.Record{ClaimUID: string(c.UID), Namespace: c.Namespace, Name: c.Name, BootID: p.BootID}
	for _, g := range grants {
		r.Grants = append(r.Grants, journal.Grant{
			Device: g.Device, GPU: devices[g.Device].Parent(), Partition: journal.PartitionOf(devices[g.Device]),
			Request: g.Request, Admin: g.Admin, ShareID: g.ShareID,
		})
	}
	return r
}

// give makes the record durable, unless it is already, and writes the spec.
// The claim's lock, and those of the GPUs it is to hold, are held.
func (p *Preparer) give(want journal.Record, devices map[gpu.DeviceName]gpu.Device) (map[gpu.DeviceName][]string, error) {
	have, again := p.Journal.Get(want.ClaimUID)
	// It may have been prepared before, too, where its record can't be read.
	before := again || p.Journal.IsUnreadable(want.ClaimUID)
	if again && !slices.Equal(have.Grants, want.Grants) && have.BootID == p.BootID {
		return nil, fmt.Errorf("the claim was allocated anew (%s) while the kubelet still has it prepared with what it had before (%s); this ends when the kubelet unprepares the claim: delete the pod",
			describeGrants(want.Grants), describeGrants(have.Grants))
	}
	if !again || have.BootID != want.BootID {
		if err := p.remember(want, before); err != nil {
			return nil, err
		}
	}
	p.Step("prepare.recorded")
	ids, err := p.CDI.Write(want.ClaimUID, given(devices))
	if err != nil {
		return nil, p.undo(want.ClaimUID, before, fmt.Errorf("write the CDI spec of the claim: %w", err))
	}
	p.Step("prepare.written")
	return ids, nil
}

// given pairs the devices with what the hardware made of them.
func given(devices map[gpu.DeviceName]gpu.Device) map[gpu.DeviceName]gpu.Given {
	out := make(map[gpu.DeviceName]gpu.Given, len(devices))
	for name, d := range devices {
		out[name] = gpu.Given{Device: d}
	}
	return out
}

// remember writes the record.
func (p *Preparer) remember(r journal.Record, before bool) error {
	unreadable := len(p.Journal.Unreadable())
	if err := p.Journal.Put(r); err != nil {
		return p.undo(r.ClaimUID, before, err)
	}
	p.tellSettled(unreadable)
	return nil
}

// undo drops what a first prepare has begun. What an earlier prepare of the
// claim has achieved stays: a container may be using it.
func (p *Preparer) undo(claimUID string, before bool, cause error) error {
	if before {
		return cause
	}
	return errors.Join(cause, p.take(claimUID))
}

// take removes the spec, then the record.
func (p *Preparer) take(claimUID string) error {
	if err := p.CDI.Remove(claimUID); err != nil {
		return fmt.Errorf("remove the CDI spec of the claim: %w", err)
	}
	p.Step("unprepare.removed")
	unreadable := len(p.Journal.Unreadable())
	if err := p.Journal.Delete(claimUID); err != nil {
		return err
	}
	p.releases.tell()
	p.tellSettled(unreadable)
	p.Step("unprepare.forgotten")
	return nil
}

// tellSettled passes on that an unreadable record was settled.
func (p *Preparer) tellSettled(before int) {
	if len(p.Journal.Unreadable()) != before {
		p.ConditionsChanged()
	}
}

func (p *Preparer) unprepare(ctx context.Context, uid types.UID) error {
	p.calls.stop(uid)
	unlock, err := p.locks.lock(ctx, claimKey(string(uid)))
	if err != nil {
		return fmt.Errorf("wait for another operation on the claim: %w", err)
	}
	defer unlock()
	return p.take(string(uid))
}

// results are what the kubelet is told.
func (p *Preparer) results(grants []claim.Grant, ids map[gpu.DeviceName][]string) []kubeletplugin.Device {
	devices := make([]kubeletplugin.Device, 0, len(grants))
	for _, g := range grants {
		d := kubeletplugin.Device{
			Requests:     []string{g.Request},
			PoolName:     p.Pool,
			DeviceName:   string(g.Device),
			CDIDeviceIDs: ids[g.Device],
		}
		if g.ShareID != "" {
			d.ShareID = new(types.UID(g.ShareID))
		}
		devices = append(devices, d)
	}
	return devices
}
