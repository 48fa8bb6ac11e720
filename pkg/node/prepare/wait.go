package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

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

// wait is the state of one call's wait for devices.
type wait struct {
	want      holding.Record
	start     time.Time
	ctx       context.Context // ends a margin before the call's deadline
	cancel    context.CancelFunc
	standings map[string]standing // by claim UID, as far as they are known
}

func newWait(ctx context.Context, want holding.Record) *wait {
	w := &wait{want: want, start: time.Now(), standings: map[string]standing{}}
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

// waitForHolders returns nil when it is worth looking again whether the holders still
// hold anything. It returns an error at once if one of them has a right to its
// device, and when the time is up.
func (p *Preparer) waitForHolders(ctx context.Context, w *wait, holders []holding.Record, released <-chan struct{}) error {
	var unknown error
	for _, h := range holders {
		is, err := p.ask(w, h)
		if err != nil {
			unknown = err
			continue
		}
		if h.GivenUp != nil {
			return nil
		}
		if !is.awaitsUnprepare {
			p.reportDoubleAllocation(ctx, w.want, h)
			return fmt.Errorf("%w: %s, and %s; a device is never prepared for two claims: delete that claim's pods, or delete this pod so that its claim is allocated again%s",
				ErrHeld, describeHolder(h), is.reason, explainDoubleAllocation(w.want, h))
		}
		if h.BootID != p.cfg.BootID {
			return p.dropStale(ctx, h)
		}
	}
	return w.sleep(holders[0], unknown, released)
}

// ask returns a holder's standing, from the API server once per wait, and again after an error. For
// a holder that was given up it tries to release the devices instead: nil means that they are free
// or the claim was prepared again.
func (p *Preparer) ask(w *wait, h holding.Record) (standing, error) {
	if s, ok := w.standings[h.ClaimUID]; ok {
		return s, nil
	}
	if h.GivenUp != nil {
		return standing{}, p.reclaim(w.ctx, h.ClaimUID)
	}
	if h.Name == "" {
		return standing{}, errors.New("its journal record can't be read")
	}
	s, err := p.readStanding(w.ctx, h)
	if err == nil {
		w.standings[h.ClaimUID] = s
	}
	return s, err
}

// sleep waits until something is released, or it is time to ask again.
func (w *wait) sleep(h holding.Record, unknown error, released <-chan struct{}) error {
	klog.FromContext(w.ctx).V(4).Info("Waiting for a claim to release its devices",
		"holder", klog.KRef(h.Namespace, h.Name), "holderUID", h.ClaimUID, "reason", w.standings[h.ClaimUID].reason, "err", unknown)
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
	if h.GivenUp != nil {
		return fmt.Errorf("%w: %s: %w; this will be tried again, and succeeds when these have ended or the driver was loaded again", ErrHeld, describeHolder(h), unknown)
	}
	why := "which is on its way out (" + w.standings[h.ClaimUID].reason + ")"
	if unknown != nil {
		why = "whose state is unknown (" + unknown.Error() + ")"
	}
	return fmt.Errorf("%w: %s, %s, and the kubelet did not unprepare it within %s; this will be tried again. If it lasts, a container of that claim's pod is still running on this node: look for a pod that is stuck in Terminating; if the kubelet has lost its state there is none, and a reboot of the node helps",
		ErrHeld, describeHolder(h), why, time.Since(w.start).Round(time.Second))
}

// dropStale takes back what is left of a claim that nothing in the cluster wants
// prepared, and that the kubelet had prepared in an earlier boot only: none of
// its containers can be running.
func (p *Preparer) dropStale(ctx context.Context, holder holding.Record) error {
	unlock, err := p.claimLocks.Lock(ctx, holder.ClaimUID)
	if err != nil {
		return fmt.Errorf("wait for another operation on the holder: %w", err)
	}
	defer unlock()
	if now, _ := p.cfg.Journal.Claim(holder.ClaimUID); now.IsOf(p.cfg.BootID) {
		return nil
	}
	klog.FromContext(ctx).V(2).Info("Dropping what is left of a claim from before the reboot",
		"claim", klog.KRef(holder.Namespace, holder.Name), "claimUID", holder.ClaimUID)
	if err := p.withdraw(ctx, holder.ClaimUID, noContainers); err != nil {
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
	return fmt.Sprintf("claim %s holds %s", name, describeHoldings(h.Holdings))
}

// describeHoldings lists the devices.
func describeHoldings(holdings []holding.Holding) string {
	var names []string
	for _, g := range holdings {
		names = append(names, string(g.Device))
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), ", ")
}

// waitForMemory returns nil when it is worth looking again whether there is enough
// memory by now. It returns an error at once if none of the sharers is on its way out,
// or the claim couldn't have as much if they all were, and when the time is up.
func (p *Preparer) waitForMemory(ctx context.Context, w *wait, s *shortage, released <-chan struct{}) error {
	var unknown error
	var leaving []holding.Record
	for _, h := range s.sharers {
		is, err := p.ask(w, h)
		switch {
		case err != nil:
			unknown = err
			leaving = append(leaving, h)
		case h.GivenUp != nil:
			return nil
		case is.awaitsUnprepare && h.BootID != p.cfg.BootID:
			return p.dropStale(ctx, h)
		case is.awaitsUnprepare:
			leaving = append(leaving, h)
		}
	}
	if len(leaving) == 0 || s.wanted > s.there {
		return s.refuse()
	}
	return w.sleep(leaving[0], unknown, released)
}

// refuse says who has how much.
func (s *shortage) refuse() error {
	var have []string
	for _, r := range s.sharers {
		have = append(have, fmt.Sprintf("claim %s/%s %dMi", r.Namespace, r.Name, r.SharedMiB(s.of)))
	}
	slices.Sort(have)
	if have == nil {
		have = []string{"no other claim has any"}
	}
	return fmt.Errorf("%w: the claim's MPS shares of GPU %s have %dMi of memory, and of the %dMi there is for shares %dMi are taken (%s): delete one of those claims' pods, or delete this pod so that its claim is allocated again",
		ErrHeld, s.of.Parent(), s.wanted, s.there, s.taken, strings.Join(have, ", "))
}
