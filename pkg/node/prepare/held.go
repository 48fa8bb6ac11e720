package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	// waitMargin is the time reserved at the end of a call, after waiting for a
	// device, to answer or to write a record.
	waitMargin = 2 * time.Second
	// waitDefault bounds the wait of a call without a deadline. The kubelet's
	// calls have one of 45 s.
	waitDefault = 40 * time.Second
	// askAgain is the time after which the API server is asked again if it failed
	// to answer.
	askAgain = 5 * time.Second
)

// ErrHeld says that another claim holds a device.
var ErrHeld = errors.New("device held by another claim")

// lockFree locks the claim and the GPUs it is to hold, once no other claim holds any
// of its devices and the memory for its shares is free. It returns one function
// that unlocks the claim, and one that unlocks the GPUs.
func (p *Preparer) lockFree(ctx context.Context, want holding.Record) (unlock, unlockGPUs func(), _ error) {
	var gpus []string
	for _, uuid := range heldGPUs(want) {
		gpus = append(gpus, gpuKey(uuid))
	}
	keys := append([]string{claimKey(want.ClaimUID)}, gpus...)
	w := newWait(ctx)
	w.want = want
	defer w.cancel()
	for {
		released := p.releases.next()
		unlockAll, err := p.locks.lock(ctx, keys...)
		if err != nil {
			return nil, nil, fmt.Errorf("wait for another operation on the claim or its GPUs: %w", err)
		}
		holders := p.holders(want)
		full := p.full(want)
		if len(holders) == 0 && full == nil {
			return func() { p.locks.unlock(keys[:1]) }, func() { p.locks.unlock(gpus) }, nil
		}
		unlockAll()
		if len(holders) > 0 {
			err = p.waitFor(ctx, w, holders, released)
		} else {
			err = p.waitForRoom(ctx, w, full, released)
		}
		if err != nil {
			return nil, nil, err
		}
	}
}

// held returns the devices that the record holds.
func held(r holding.Record) []gpu.Device {
	var devices []gpu.Device
	for _, g := range r.Holdings {
		if !g.Admin {
			devices = append(devices, g.Of())
		}
	}
	return devices
}

// heldGPUs returns the GPUs that the record holds something of, sorted, each
// once.
func heldGPUs(r holding.Record) []gpu.UUID {
	var uuids []gpu.UUID
	for _, d := range held(r) {
		uuids = append(uuids, d.Parent())
	}
	slices.Sort(uuids)
	return slices.Compact(uuids)
}

// holders returns the other claims that hold what the claim is to hold,
// ordered by claim UID.
func (p *Preparer) holders(want holding.Record) []holding.Record {
	var holders []holding.Record
	for _, d := range held(want) {
		holders = append(holders, p.Claims.Holders(d, want.ClaimUID)...)
	}
	byUID := func(a, b holding.Record) int { return strings.Compare(a.ClaimUID, b.ClaimUID) }
	slices.SortFunc(holders, byUID)
	return slices.CompactFunc(holders, func(a, b holding.Record) bool { return a.ClaimUID == b.ClaimUID })
}

// wait is the state of one call's wait for devices.
type wait struct {
	want    holding.Record
	start   time.Time
	ctx     context.Context // ends a margin before the call's deadline
	cancel  context.CancelFunc
	leaving map[string]Standing // the known standings, by claim UID
}

func newWait(ctx context.Context) *wait {
	w := &wait{start: time.Now(), leaving: map[string]Standing{}}
	w.ctx, w.cancel = withMargin(ctx)
	return w
}

// withMargin returns a context that ends a margin before the call's deadline.
func withMargin(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(waitDefault + waitMargin)
	}
	return context.WithDeadline(ctx, deadline.Add(-waitMargin))
}

// waitFor returns nil when it is worth looking again whether the holders still
// hold anything. It returns an error at once if one of them has a right to its
// device, and when the time is up.
func (p *Preparer) waitFor(ctx context.Context, w *wait, holders []holding.Record, released <-chan struct{}) error {
	var unknown error
	for _, h := range holders {
		standing, err := p.look(w, h)
		if err != nil {
			unknown = err
			continue
		}
		if !standing.Leaving {
			return fmt.Errorf("%w: %s, and %s; a device is never prepared for two claims: delete that claim's pods, or delete this pod so that its claim is allocated again%s",
				ErrHeld, describeHolder(h), standing.Reason, allocatedTwice(w.want, h))
		}
		if h.BootID != p.BootID {
			return p.forget(ctx, h)
		}
	}
	return w.sleep(holders[0], unknown, released)
}

// look asks for a holder's standing, once per wait unless it could not be told.
func (p *Preparer) look(w *wait, h holding.Record) (Standing, error) {
	if s, ok := w.leaving[h.ClaimUID]; ok {
		return s, nil
	}
	if h.Name == "" {
		return Standing{}, errors.New("its journal record can't be read")
	}
	holder := Holder{UID: types.UID(h.ClaimUID), Namespace: h.Namespace, Name: h.Name}
	for _, g := range h.Holdings {
		if !g.Admin {
			holder.Devices = append(holder.Devices, g.Device)
		}
	}
	s, err := p.Holders.Look(w.ctx, holder)
	if err != nil {
		return Standing{}, fmt.Errorf("ask the API server about it: %w", err)
	}
	w.leaving[h.ClaimUID] = s
	return s, nil
}

// sleep waits until something is released, or it is time to ask again.
func (w *wait) sleep(h holding.Record, unknown error, released <-chan struct{}) error {
	klog.FromContext(w.ctx).V(4).Info("Waiting for a claim to release its devices",
		"holder", klog.KRef(h.Namespace, h.Name), "holderUID", h.ClaimUID, "reason", w.leaving[h.ClaimUID].Reason, "err", unknown)
	var again <-chan time.Time
	if unknown != nil {
		timer := time.NewTimer(askAgain)
		defer timer.Stop()
		again = timer.C
	}
	select {
	case <-released:
		return nil
	case <-again:
		return nil
	case <-w.ctx.Done():
		return w.timeout(h, unknown)
	}
}

// timeout returns the error after waiting for a claim's release.
func (w *wait) timeout(h holding.Record, unknown error) error {
	if cause := context.Cause(w.ctx); !errors.Is(cause, context.DeadlineExceeded) {
		return cause
	}
	why := "which is on its way out (" + w.leaving[h.ClaimUID].Reason + ")"
	if unknown != nil {
		why = "whose state is unknown (" + unknown.Error() + ")"
	}
	return fmt.Errorf("%w: %s, %s, and the kubelet did not unprepare it within %s; this will be tried again. If it lasts, a container of that claim's pod is still running on this node: look for a pod that is stuck in Terminating; if the kubelet has lost its state there is none, and a reboot of the node helps",
		ErrHeld, describeHolder(h), why, time.Since(w.start).Round(time.Second))
}

// forget takes back what is left of a claim that nothing in the cluster wants
// prepared, and that the kubelet had prepared in an earlier boot only: none of
// its containers can be running.
func (p *Preparer) forget(ctx context.Context, holder holding.Record) error {
	unlock, err := p.locks.lock(ctx, claimKey(holder.ClaimUID))
	if err != nil {
		return fmt.Errorf("wait for another operation on the holder: %w", err)
	}
	defer unlock()
	if now, ok := p.Journal.Get(holder.ClaimUID); ok && now.BootID == p.BootID {
		return nil
	}
	klog.FromContext(ctx).V(2).Info("Dropping what is left of a claim from before the reboot",
		"claim", klog.KRef(holder.Namespace, holder.Name), "claimUID", holder.ClaimUID)
	if err := p.withdraw(ctx, holder.ClaimUID, unused); err != nil {
		return fmt.Errorf("drop what is left of claim %s/%s from before the reboot: %w", holder.Namespace, holder.Name, err)
	}
	return nil
}

// describeHolder names a holder and its devices.
func describeHolder(h holding.Record) string {
	name := h.Namespace + "/" + h.Name
	if h.Name == "" {
		name = "with UID " + h.ClaimUID
	}
	return fmt.Sprintf("claim %s holds %s", name, describeGrants(h.Holdings))
}

// describeGrants lists the devices.
func describeGrants(grants []holding.Holding) string {
	var names []string
	for _, g := range grants {
		names = append(names, string(g.Device))
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), ", ")
}
