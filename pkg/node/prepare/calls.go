package prepare

import (
	"context"
	"errors"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// errUnprepared stops a prepare that an unprepare has overtaken.
var errUnprepared = errors.New("the claim was unprepared while it was being prepared")

// calls are the prepares that have arrived and not returned, by claim, so that
// an unprepare can stop those that began before it. Nothing is remembered
// beyond that: a claim may be prepared again after its unprepare.
type calls struct {
	mu      sync.Mutex
	byClaim map[types.UID]map[*call]bool
}

// call is one prepare of one claim; calls.mu guards it.
type call struct {
	stopped bool
	// cancel ends the contexts that were made for the call.
	cancel []context.CancelCauseFunc
}

// callsKey is the context's key for the calls that begin has registered.
type callsKey struct{}

func newCalls() *calls { return &calls{byClaim: map[types.UID]map[*call]bool{}} }

// begin registers a call for each claim; done takes them out again.
func (c *calls) begin(ctx context.Context, uids []types.UID) (_ context.Context, done func()) {
	begun := make(map[types.UID]*call, len(uids))
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, uid := range uids {
		begun[uid] = &call{}
		if c.byClaim[uid] == nil {
			c.byClaim[uid] = map[*call]bool{}
		}
		c.byClaim[uid][begun[uid]] = true
	}
	return context.WithValue(ctx, callsKey{}, begun), func() { c.end(begun) }
}

func (c *calls) end(begun map[types.UID]*call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for uid, one := range begun {
		delete(c.byClaim[uid], one)
		if len(c.byClaim[uid]) == 0 {
			delete(c.byClaim, uid)
		}
	}
}

// join returns a context that ends when the claim's call is stopped: the call
// that was begun with this context, or else a new one.
func (c *calls) join(ctx context.Context, uid types.UID) (_ context.Context, done func()) {
	end := func() {}
	begun, _ := ctx.Value(callsKey{}).(map[types.UID]*call)
	if begun[uid] == nil {
		ctx, end = c.begin(ctx, []types.UID{uid})
		begun, _ = ctx.Value(callsKey{}).(map[types.UID]*call)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	c.attach(begun[uid], cancel)
	return ctx, func() {
		cancel(nil)
		end()
	}
}

// attach has the call's stop, which may have come already, end a context.
func (c *calls) attach(one *call, cancel context.CancelCauseFunc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if one.stopped {
		cancel(errUnprepared)
	}
	one.cancel = append(one.cancel, cancel)
}

// stop stops the calls of the claim that have begun; their contexts have ended
// when it returns.
func (c *calls) stop(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for one := range c.byClaim[uid] {
		one.stopped = true
		for _, cancel := range one.cancel {
			cancel(errUnprepared)
		}
	}
	delete(c.byClaim, uid)
}
