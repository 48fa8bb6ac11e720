package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// visit is one operation on one GPU, with its lock held.
type visit struct {
	m    *Manager
	uuid gpu.UUID
	hw   Hardware
	// inHardware is the time spent there.
	inHardware time.Duration

	// The results of look.
	mig    gpu.MIG
	ours   []own
	others []gpu.Instance
	// switched: MIG mode is on because we switched it, or are about to.
	switched bool
}

// own is a partition in the GPU's record that is there.
type own struct {
	gpu.Partition
	// instance is nil from the moment of the intent until it is made.
	instance *gpu.Instance
}

// whole reports whether the partition is there completely.
func (o own) whole() bool { return o.instance != nil && o.instance.UUID != "" }

// withGPU does something on a GPU with its lock held, and plans what Run is to
// do there next.
func (m *Manager) withGPU(ctx context.Context, op string, uuid gpu.UUID, do func(context.Context, *visit) error) error {
	return m.worker.Do(ctx, []gpu.UUID{uuid}, func() error {
		start := time.Now()
		v := &visit{m: m, uuid: uuid, hw: m.hw}
		if v.hw == nil && op != "release" {
			return gpu.ErrNoDriver
		}
		err := do(ctx, v)
		m.metrics.visited(op, time.Since(start)-v.inHardware, err)
		return err
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
	case slices.ContainsFunc(v.m.cfg.Journal.Claims(), holding.Claim.IsUnreadable): // whose claims give up what their names tell, and that may not be all
		v.planIn(retryLast)
	}
}

func (v *visit) planIn(wait time.Duration) { v.m.worker.At(v.uuid, time.Now().Add(wait)) }

// look reads the hardware and divides the instances into ours and others'. A
// record of another boot is ignored.
func (v *visit) look(ctx context.Context) error {
	r, ok := v.m.cfg.Journal.GPU(v.uuid)
	if !ok || r.BootID != v.m.cfg.BootID {
		r = holding.GPURecord{}
	}
	// A recorded instance that doesn't exist is given up, so the hardware is read
	// twice.
	for look := 0; look == 0 || look == 1 && ok && !equal(v.record(), r); look++ {
		err := v.call(ctx, "look", func() (err error) {
			v.mig, err = v.hw.MIG(v.uuid)
			return err
		})
		if err != nil {
			return err
		}
		v.sortOut(r)
	}
	if v.isClean() && v.unreadable() != "" {
		if err := v.m.cfg.Journal.DeleteGPU(v.uuid); err != nil {
			return err
		}
		v.m.cfg.ConditionsChanged()
	}
	return nil
}

// readForClaim is look for a GPU that is, or a part of which is, to be given to a
// claim. It is an error while it isn't known what a switch of the MIG mode has
// changed.
func (v *visit) readForClaim(ctx context.Context) error {
	if err := v.look(ctx); err != nil {
		return err
	}
	if v.m.isUnread(v.uuid) {
		return v.readSwitched()
	}
	return nil
}

// readSwitched reads the facts that a switch of the MIG mode has changed.
func (v *visit) readSwitched() error {
	if err := v.m.cfg.ModeSwitched(v.uuid); err != nil {
		return fmt.Errorf("read what switching the MIG mode has changed: %w", err)
	}
	v.m.setUnread(v.uuid, false)
	return nil
}

// isClean reports whether nothing that a record could tell of is left: no instance,
// and no mode that we may have switched on.
func (v *visit) isClean() bool {
	return !v.mig.Enabled || v.mig.Pending && !v.mig.Switchable && len(v.mig.Instances) == 0
}

// sortOut compares the record with the hardware. It drops partitions that no
// longer exist, and intents without an instance.
func (v *visit) sortOut(r holding.GPURecord) {
	v.ours, v.others = nil, slices.Clone(v.mig.Instances)
	for _, made := range r.Partitions {
		is := func(i gpu.Instance) bool { return agrees(made, i) }
		if n := slices.IndexFunc(v.others, is); n >= 0 {
			i := v.others[n]
			v.ours = append(v.ours, own{Partition: partitionOf(v.uuid, made.Partition), instance: &i})
			v.others = slices.Delete(v.others, n, n+1)
		}
	}
	v.switched = r.ModeSwitched && v.mig.Enabled
}

// agrees reports whether an instance is the one in a record. Of an intent,
// profile and place are known, and that nothing was there before. One whose
// compute instance is gone is still the one: a destruction ended half way.
func agrees(made holding.MadePartition, i gpu.Instance) bool {
	if i.Profile != made.Profile || i.Placement != (gpu.Placement{Start: made.Start, Size: made.Size}) {
		return false
	}
	if made.Made == nil {
		return true
	}
	return i.GPUInstanceID == made.Made.GPUInstanceID &&
		(i.ComputeInstanceID == gpu.NoComputeInstance || i.ComputeInstanceID == made.Made.ComputeInstanceID && i.UUID == made.Made.UUID)
}

func partitionOf(uuid gpu.UUID, p holding.Partition) gpu.Partition {
	return gpu.Partition{GPU: uuid, Profile: p.Profile, Placement: gpu.Placement{Start: p.Start, Size: p.Size}}
}

// save makes the record durable, if that is needed. A GPU on which nothing is
// ours has none. One that can't be read is left alone.
func (v *visit) save() error {
	want := v.record()
	have, ok := v.m.cfg.Journal.GPU(v.uuid)
	switch {
	case v.unreadable() != "" || ok && equal(have, want):
		return nil
	case len(want.Partitions) == 0 && !want.ModeSwitched:
		return v.m.cfg.Journal.DeleteGPU(v.uuid)
	default:
		err := v.m.cfg.Journal.PutGPU(want)
		v.m.tell(want)
		return err
	}
}

// record returns the GPU's record for the journal.
func (v *visit) record() holding.GPURecord {
	r := holding.GPURecord{GPU: v.uuid, BootID: v.m.cfg.BootID, ModeSwitched: v.switched}
	for _, o := range v.ours {
		r.Partitions = append(r.Partitions, made(o))
	}
	return r
}

// made returns the record's entry of a partition.
func made(o own) holding.MadePartition {
	m := holding.MadePartition{Partition: holding.PartitionOf(o.Partition)}
	if i := o.instance; i != nil {
		m.Made = &holding.MadeInstance{GPUInstanceID: i.GPUInstanceID, ComputeInstanceID: i.ComputeInstanceID, UUID: i.UUID}
	}
	return m
}

func equal(a, b holding.GPURecord) bool {
	same := func(a, b holding.MadePartition) bool {
		return a.Partition == b.Partition && (a.Made == nil) == (b.Made == nil) && (a.Made == nil || *a.Made == *b.Made)
	}
	return a.BootID == b.BootID && a.ModeSwitched == b.ModeSwitched && slices.EqualFunc(a.Partitions, b.Partitions, same)
}

// whole makes the GPU usable as a whole; see Manager.ClearMIG.
func (v *visit) whole(ctx context.Context) error {
	defer v.plan()
	err := v.readForClaim(ctx)
	if errors.Is(err, nvml.ErrNotSupported) {
		return nil // a GPU without MIG is always whole
	}
	if err != nil {
		return err
	}
	if !v.mig.Enabled {
		return v.save()
	}
	if err := v.readable(); err != nil {
		return err
	}
	if err := v.mayBeWhole(); err != nil {
		return err
	}
	for _, o := range slices.Clone(v.ours) {
		if err := v.destroy(ctx, o); err != nil {
			return errors.Join(fmt.Errorf("make room: %w", err), v.save())
		}
	}
	if err := v.switchMode(ctx, false); err != nil {
		return errors.Join(err, v.save())
	}
	return v.save()
}

// mayBeWhole is an error where others, or claims, keep the GPU in MIG mode.
func (v *visit) mayBeWhole() error {
	for _, o := range v.ours {
		if holder := v.m.holder(o.Partition); holder != "" && o.whole() {
			return fmt.Errorf("it is divided: %s holds %s", holder, instanceName(*o.instance))
		}
	}
	if len(v.others) > 0 {
		return fmt.Errorf("it is divided by others than Tessera: there are %s; have whoever made them destroy them (nvidia-smi mig -i %s -dci; nvidia-smi mig -i %s -dgi)", v.describe(), v.uuid, v.uuid)
	}
	if !v.switched {
		return fmt.Errorf("MIG mode is on, and Tessera didn't switch it on: switch it off (nvidia-smi -i %s -mig 0)", v.uuid)
	}
	return nil
}

// readable is an error where the GPU's record can't be read.
func (v *visit) readable() error {
	if what := v.unreadable(); what != "" {
		return errors.New(what)
	}
	return nil
}

// unreadable says why the GPU's record can't be read, "" where it can.
func (v *visit) unreadable() string {
	for _, u := range v.m.cfg.Journal.UnreadableGPUs() {
		if u.GPU == v.uuid {
			return unreadable(u)
		}
	}
	return ""
}

// findOwn finds the partition among ours.
func (v *visit) findOwn(p gpu.Partition) (own, bool) {
	n := v.ownIndex(p)
	if n < 0 {
		return own{}, false
	}
	return v.ours[n], true
}

func (v *visit) ownIndex(p gpu.Partition) int {
	return slices.IndexFunc(v.ours, func(o own) bool { return o.Partition == p })
}

// other finds the partition among what others made.
func (v *visit) other(p gpu.Partition) (gpu.Instance, bool) {
	n := slices.IndexFunc(v.others, func(i gpu.Instance) bool { return i.Profile == p.Profile && i.Placement == p.Placement })
	if n < 0 {
		return gpu.Instance{}, false
	}
	return v.others[n], true
}

// at finds the partition, whoever made it.
func (v *visit) at(p gpu.Partition) (gpu.Instance, bool) {
	if o, ok := v.findOwn(p); ok && o.instance != nil {
		return *o.instance, true
	}
	return v.other(p)
}

// forget takes the partition out of ours.
func (v *visit) forget(p gpu.Partition) {
	v.ours = slices.DeleteFunc(v.ours, func(o own) bool { return o.Partition == p })
	v.m.setIdle(p, false)
}

// destroy destroys an instance of ours, which look has just seen.
func (v *visit) destroy(ctx context.Context, o own) error {
	if o.instance != nil {
		err := v.call(ctx, "destroy", func() error { return v.hw.DestroyInstance(v.uuid, *o.instance) },
			"profile", o.Profile, "start", o.Placement.Start, "instance", o.instance.UUID)
		if err != nil && !v.isGone(ctx, err, o) {
			return err
		}
		v.m.cfg.Step("partition.destroyed")
	}
	v.forget(o.Partition)
	return nil
}

// isGone reports whether an instance that couldn't be destroyed isn't there any
// more, neither completely nor in part.
func (v *visit) isGone(ctx context.Context, err error, o own) bool {
	if !errors.Is(err, nvml.ErrNotFound) {
		return false
	}
	var now gpu.MIG
	looked := v.call(ctx, "look", func() (err error) {
		now, err = v.hw.MIG(v.uuid)
		return err
	})
	return looked == nil && !slices.ContainsFunc(now.Instances, func(i gpu.Instance) bool { return agrees(made(o), i) })
}

// switchMode switches the mode that is, or becomes, ours to switch.
func (v *visit) switchMode(ctx context.Context, on bool) error {
	v.m.setUnread(v.uuid, true) // after an error, too, the mode may have been switched
	if err := v.call(ctx, "mode", func() error { return v.hw.SetMIGMode(v.uuid, on) }, "on", on); err != nil {
		return err
	}
	v.m.cfg.Step("partition.switched")
	v.mig.Enabled, v.mig.Pending, v.switched = on, on, on
	return v.readSwitched()
}

// call runs one operation on the hardware and measures it. about has the log's keys
// for an operation that changes the hardware: it is logged, and not begun after ctx
// has ended.
func (v *visit) call(ctx context.Context, op string, do func() error, about ...any) error {
	if err := context.Cause(ctx); err != nil && len(about) > 0 {
		return err
	}
	start := time.Now()
	err := do()
	took := time.Since(start)
	v.inHardware += took
	v.m.metrics.called(op, took, err)
	if len(about) > 0 {
		klog.FromContext(ctx).V(2).Info("MIG "+op, append(about, "gpu", v.uuid, "duration", took, "err", err)...)
	}
	return err
}

// called observes an operation on the hardware.
func (m *metrics) called(op string, took time.Duration, err error) {
	m.hardware.WithLabelValues(op, result(err)).Observe(took.Seconds())
}

// visited observes a visit: the time that was not spent in the hardware.
func (m *metrics) visited(op string, own time.Duration, err error) {
	m.own.WithLabelValues(op, result(err)).Observe(own.Seconds())
}

// result is the label of an outcome.
func result(err error) string {
	switch {
	case err == nil:
		return "success"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "stopped"
	case errors.Is(err, nvml.ErrInUse):
		return "in_use"
	case errors.Is(err, nvml.ErrInsufficientResources):
		return "no_room"
	case errors.Is(err, nvml.ErrLost):
		return "lost"
	default:
		return "error"
	}
}
