package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/keylock"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/claimstatus"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/events"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/report"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
)

// Config is what a Preparer is built from.
type Config struct {
	Journal    *journal.Journal
	Facts      *facts.Facts
	Containers *containers.Containers
	Partitions *partition.Manager
	Sharing    *sharing.Manager
	Specs      *cdi.Specs
	Events     *events.Events
	Statuses   *claimstatus.Writer
	Reporter   *report.Reporter
	// Cluster reads claims, and Version the version of the API server.
	Cluster resourceclient.ResourceClaimsGetter
	Version discovery.ServerVersionInterfaceWithContext
	// Driver is the driver's name; Pool is the name of the node's pool.
	Driver, Pool string
	// BootID of the running kernel (/proc/sys/kernel/random/boot_id).
	BootID string
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
	// Steps, which may be nil, are told of each step after it; crash tests stop there.
	Steps *failpoint.Steps
}

// Preparer prepares and unprepares claims. Its methods may be called from
// everywhere at once.
type Preparer struct {
	cfg Config
	// A goroutine takes one claim's lock at a time, and after it those of GPUs in
	// ascending order.
	claimLocks keylock.Locks[string]
	gpuLocks   keylock.Locks[gpu.UUID]
	// excluded are GPUs whose locks Exclude holds, each with the reason.
	excluded sync.Map
	calls    *calls
	metrics  *metrics
	// outcomes are of claims that were refused a device, or given one that others were refused.
	outcomes chan Outcome
	// hasRefused: a claim was refused a device since the start, which the facts may not show yet.
	hasRefused atomic.Bool
	// load is the current load of the driver; nil: not known yet.
	load atomic.Pointer[health.Load]
}

// New builds a Preparer; Recover has to run before the first Prepare.
func New(c Config) *Preparer {
	return &Preparer{
		cfg: c, calls: newCalls(), outcomes: make(chan Outcome, mostOutcomes),
		metrics: newMetrics(c.Registerer, c.Journal),
	}
}

// Begin registers prepares of these claims that are about to reach Prepare with the
// returned context. An Unprepare that starts after Begin cancels them. The caller
// calls done after Prepare has returned. Prepare without Begin registers itself.
func (p *Preparer) Begin(ctx context.Context, claimUIDs ...types.UID) (_ context.Context, done func()) {
	return p.calls.begin(ctx, claimUIDs)
}

// Prepare gives the claim its devices: one result per granted device, in the order of
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
//
// It fails while another driver serves the node's GPUs.
func (p *Preparer) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	start := time.Now()
	devices, err := p.prepare(ctx, c)
	p.metrics.prepared(start, err)
	return devices, err
}

// Conditions returns what the journal knows to be wrong with GPUs: a GPU named
// in an unreadable record is StateUnreadable until the kubelet has prepared
// or unprepared that record's claim.
func (p *Preparer) Conditions() map[gpu.UUID][]gpu.Condition {
	conditions := map[gpu.UUID][]gpu.Condition{}
	for _, c := range p.cfg.Journal.Claims().Unreadable() {
		for _, uuid := range c.GPUs() {
			conditions[uuid] = append(conditions[uuid], gpu.Condition{
				Type: gpu.StateUnreadable,
				Message: fmt.Sprintf("journal file %s can't be read; claim %s may still hold the GPU; this ends when the kubelet unprepares that claim; if it never does, drain the node, remove the file and restart the plugin",
					c.File, c.ClaimUID),
			})
		}
	}
	return conditions
}

func (p *Preparer) prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	ctx, done := p.calls.join(ctx, c.UID)
	defer done()
	if err := p.cfg.Facts.MayPrepare(); err != nil {
		return nil, err
	}
	grants, err := claim.Read(c, p.cfg.Driver, p.cfg.Pool)
	if err != nil {
		return nil, failure{err, stepOther, ofClaim}
	}
	want, err := p.newRecord(c, grants)
	if err != nil {
		return nil, err
	}
	r, before, unlock, err := p.reserve(ctx, want)
	if err != nil {
		return nil, err
	}
	defer unlock()
	realized, ids, err := p.realize(ctx, r, before)
	if errors.Is(context.Cause(ctx), errUnprepared) {
		return nil, errUnprepared // the unprepare waits for the lock to take back what there is
	}
	if err != nil {
		return nil, err
	}
	p.noteDaemons(r)
	p.noteIneffective(r, grants)
	return p.results(&realized, ids), nil
}

// reserve makes the record durable under the locks of the claim and of the GPUs
// that it is to hold. Then it unlocks the GPUs: the next steps wait for the
// hardware, and the record keeps the devices from others. It returns the record
// that is in force, whether it may have been prepared in this boot, and the
// function that unlocks the claim.
func (p *Preparer) reserve(ctx context.Context, want holding.Record) (r holding.Record, before bool, unlock func(), _ error) {
	unlock, unlockGPUs, err := p.lockWhenFree(ctx, want)
	if err != nil {
		return r, false, nil, err
	}
	defer unlockGPUs()
	p.cfg.Steps.Reached("prepare.locked")
	if r, before, err = p.recordClaim(want); err != nil {
		defer unlock()
		// holding.Claims.InUse may have counted the record until its write failed. A claim that was
		// unprepared in that time didn't destroy a shared partition, so the undo has to.
		return r, false, nil, p.undo(ctx, want.ClaimUID, before, failedAt(ctx, stepState, err))
	}
	p.cfg.Journal.ResetPhase(want.ClaimUID)
	p.cfg.Steps.Reached("prepare.recorded")
	return r, before, unlock, nil
}

// recordClaim writes the record, unless it is there already, and returns the one
// that is there. before: the claim may have been prepared in this boot. No container of
// an earlier one is left, so the claim is new then, also for the undo. After an error the record
// may exist, and the caller undoes the prepare.
func (p *Preparer) recordClaim(want holding.Record) (_ holding.Record, before bool, _ error) {
	have, before := p.cfg.Journal.Claim(want.ClaimUID) // perhaps, if its record can't be read
	if have.IsOf(p.cfg.BootID) {
		same := slices.EqualFunc(have.Holdings, want.Holdings, holding.Holding.Same)
		if !same && have.GivenUp != nil {
			return have.Record, true, fmt.Errorf("%w (%s) before the end of its previous devices (%s): %w", errReallocated, describeHoldings(want.Holdings), describeHoldings(have.Holdings), errGivenUp)
		}
		if !same {
			return have.Record, true, fmt.Errorf("%w (%s) while the kubelet still has it prepared with its previous devices (%s); this ends when the kubelet unprepares the claim: delete the pod",
				errReallocated, describeHoldings(want.Holdings), describeHoldings(have.Holdings))
		}
		err := p.addPods(&have, want.Pods)
		return have.Record, true, err
	}
	want.RefusedClaims = have.RefusedClaims
	return want, before && have.MayBeOf(p.cfg.BootID), p.put(want)
}

// addPods records pods that use the claim since it was prepared, and that it is prepared
// again after it was given up. It also writes a record again that may not be on disk.
func (p *Preparer) addPods(c *holding.Claim, pods []holding.Pod) error {
	var more []holding.Pod
	for _, pod := range pods {
		if !slices.Contains(c.Pods, pod) {
			more = append(more, pod)
		}
	}
	if more == nil && c.GivenUp == nil && c.State != holding.Doubtful {
		return nil
	}
	c.Pods, c.GivenUp = slices.Concat(c.Pods, more), nil
	return p.cfg.Journal.Put(c.Record)
}

// errReallocated says that the claim was prepared with other devices before.
var errReallocated = errors.New("the claim was allocated again")

// realize has the hardware make what the record says, and writes the spec. The
// claim's lock is held.
func (p *Preparer) realize(ctx context.Context, r holding.Record, before bool) (realized holding.Realized, ids map[gpu.DeviceName][]string, err error) {
	realized, err = p.readyDevices(ctx, r)
	if err == nil {
		realized.Daemons, err = p.setUpSharing(ctx, realized, before)
	}
	if err == nil {
		err = failedAt(ctx, stepSharing, p.ensureUnshared(ctx, r))
	}
	if err != nil {
		return realized, nil, p.fail(ctx, r, before, err)
	}
	if ids, err = p.cfg.Specs.Write(realized); err != nil {
		return realized, nil, p.fail(ctx, r, before, failedAt(ctx, stepCDI, fmt.Errorf("write the CDI spec of the claim: %w", err)))
	}
	p.cfg.Steps.Reached("prepare.written")
	p.noteGiven(r, before)
	p.notifyPrepared(realized)
	return realized, ids, nil
}

// fail ends a prepare: it notes what was refused, and undoes the rest.
func (p *Preparer) fail(ctx context.Context, r holding.Record, before bool, err error) error {
	p.noteRefused(ctx, r, before, err)
	return p.undo(ctx, r.ClaimUID, before, err)
}

// notifyPrepared queues a write of the claim's status if it has MIG devices or MPS limits.
func (p *Preparer) notifyPrepared(realized holding.Realized) {
	hasNews := func(h holding.Holding) bool { return h.Partition != holding.Partition{} || h.MPS != nil }
	if slices.ContainsFunc(realized.Holdings, hasNews) {
		p.cfg.Statuses.Enqueue(realized)
	}
}

// put writes a record.
func (p *Preparer) put(r holding.Record) error {
	before, _ := p.cfg.Journal.Claim(r.ClaimUID)
	err := p.cfg.Journal.Put(r)
	p.notifyRead(before)
	return err
}

// notifyRead requests a reading of the facts after an unreadable record was replaced or removed:
// the condition StateUnreadable may have ended.
func (p *Preparer) notifyRead(before holding.Claim) {
	if before.IsUnreadable() {
		p.cfg.Facts.Reread()
	}
}

// results returns the answer to the kubelet.
func (p *Preparer) results(r *holding.Realized, ids map[gpu.DeviceName][]string) []kubeletplugin.Device {
	known, _ := p.cfg.Facts.State()
	devices := make([]kubeletplugin.Device, 0, len(r.Holdings))
	for _, h := range r.Holdings {
		d := kubeletplugin.Device{
			Requests:     []string{h.Request},
			PoolName:     p.cfg.Pool,
			DeviceName:   string(h.Device),
			CDIDeviceIDs: ids[h.CDIName()],
			Metadata:     claimstatus.Metadata(known.Node, r, h),
		}
		if h.ShareID != "" {
			d.ShareID = new(types.UID(h.ShareID))
		}
		devices = append(devices, d)
	}
	return devices
}

// resolve finds a device that a request was given on this node, with its GPU's
// facts.
func (p *Preparer) resolve(request string, name gpu.DeviceName) (gpu.Device, gpu.GPU, error) {
	d, g, err := p.cfg.Facts.Device(name)
	if err != nil {
		return nil, gpu.GPU{}, fmt.Errorf("request %q was given device %q: %w", request, name, err)
	}
	return d, g, nil
}

// newRecord adds the node's device and facts to each grant, computes MPS limits, and returns the
// claim's record, from which all else follows. It refuses grants that no container could use.
func (p *Preparer) newRecord(c *resourceapi.ResourceClaim, grants []claim.Grant) (holding.Record, error) {
	r := holding.Record{ClaimUID: string(c.UID), Namespace: c.Namespace, Name: c.Name, BootID: p.cfg.BootID, Pods: reservedFor(c)}
	for i, g := range grants {
		device, known, err := p.resolve(g.Request, g.Device)
		if err != nil {
			return r, err
		}
		grants[i] = g.Place(device, known)
	}
	if slices.ContainsFunc(grants, claim.Grant.UsesMPS) {
		if err := claim.SetLimits(grants); err != nil {
			return r, err
		}
	}
	for _, g := range grants {
		h := holding.New(g.Device, g.Of)
		h.Request, h.Admin, h.ShareID, h.TimeSlice = g.Request, g.Admin, g.ShareID, string(g.TimeSlice)
		if g.Limits != nil {
			h.MPS = &holding.MPS{ThreadPercentage: g.Limits.ThreadPercentage, MemoryMiB: g.Limits.MemoryMiB}
		}
		r.Holdings = append(r.Holdings, h)
	}
	return r, nil
}

// reservedFor returns the pods that a claim is reserved for.
func reservedFor(c *resourceapi.ResourceClaim) []holding.Pod {
	var pods []holding.Pod
	for _, ref := range c.Status.ReservedFor {
		if ref.APIGroup == corev1.GroupName && ref.Resource == "pods" {
			pods = append(pods, holding.Pod{UID: string(ref.UID), Name: ref.Name})
		}
	}
	return pods
}

func (m *metrics) prepared(start time.Time, err error) {
	m.prepare.WithLabelValues(result(err)).Observe(time.Since(start).Seconds())
	if err != nil {
		m.failures.WithLabelValues(result(err), string(classOf(err))).Inc()
	}
}

func (m *metrics) unprepared(start time.Time, err error) {
	m.unprepare.WithLabelValues(result(err)).Observe(time.Since(start).Seconds())
}

// result is the label of an outcome: success, or the reason of a failure.
func result(err error) string {
	switch {
	case err == nil:
		return "success"
	case errors.Is(err, ErrHeld):
		return "held"
	case errors.Is(err, claim.ErrPermanent):
		return "refused"
	case errors.Is(err, errUnprepared), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "stopped"
	}
	if f, ok := errors.AsType[failure](err); ok {
		return string(f.step)
	}
	return string(stepOther)
}
