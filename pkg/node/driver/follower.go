package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

const (
	// retryDriver is the interval at which a driver that isn't there, or doesn't work,
	// is looked for again.
	retryDriver = 5 * time.Second
	// closeWithin bounds what is restored before the driver is closed.
	closeWithin = 20 * time.Second
	// RecoverWithin is how long the kubelet waits for the recovery of the hardware:
	// it must be able to unprepare while a GPU keeps that from ending.
	RecoverWithin = 15 * time.Second
)

// Config has the parts and settings of a Follower. All but Steps and Registerer are required.
type Config struct {
	Parts

	// BootID of the running kernel.
	BootID string
	// Opener finds and opens the driver. Followers that run one after the other share it.
	Opener *Opener
	// Specs are told of the driver as it was read.
	Specs *cdi.Specs
	// Facts are set after each reading, without the partitions that are created for
	// claims.
	Facts *facts.Facts
	// Steps, which may be nil, are told of each step of a reset, for crash tests.
	Steps *failpoint.Steps
	// Registerer, which may be nil, is for metrics.
	Registerer prometheus.Registerer
}

// ErrHandedOver is the cause of the end of Run's context if another plugin takes the hardware
// as it is: nothing is restored on the GPUs.
var ErrHandedOver = errors.New("another plugin takes over the hardware")

// Follower keeps the other parts' knowledge of the driver and the GPUs up to date.
type Follower struct {
	cfg Config
	// first is closed when the driver has been looked for once.
	first chan struct{}
	// alive is beaten at each step of the loop.
	alive heartbeat
	// staysOpen: a session could not be closed.
	staysOpen atomic.Bool
	listening listening
	// resetting is held while a GPU is being reset.
	resetting sync.Mutex

	// Of Run's goroutine only:

	modules modules
	seen    seen
	mended  mended
	// cdiFailed says why the CDI specifications aren't as they should be; nil if
	// they are.
	cdiFailed error
	said      string // the last trouble that was logged
	// unidentified says which GPUs can't be identified, as it was logged last.
	unidentified string
	// fabricPending: Fabric Manager hasn't registered all GPUs. No event says when it has.
	fabricPending bool
	// suspended: the parts wait for a driver that was closed for a while.
	suspended bool
}

// New builds a Follower that has not looked for a driver yet.
func New(c Config) *Follower {
	registerMetrics(c.Registerer, c.Facts)
	return &Follower{
		cfg: c, first: make(chan struct{}), seen: seen{journal: c.Journal, bootID: c.BootID},
	}
}

// StaysOpen reports whether a session could not be closed, because a call into the
// driver doesn't return. Such a call may still change the hardware.
func (f *Follower) StaysOpen() bool { return f.staysOpen.Load() }

// StopListening ends the wait for events, which may take a second, so that the end of Run
// doesn't take that long. Events that come later are not seen. It returns earlier if ctx ends.
func (f *Follower) StopListening(ctx context.Context) { f.listening.stop(ctx) }

// Looked returns a channel that is closed when the driver has been looked for once,
// and the hardware agrees with the journal, or RecoverWithin has passed, if there is one.
func (f *Follower) Looked() <-chan struct{} { return f.first }

// Stuck returns an error if Run has not made progress for longer than after.
func (f *Follower) Stuck(after time.Duration) error {
	if age := f.alive.age(time.Now()); age > after {
		return fmt.Errorf("the look at the hardware has not ended for %s", age.Round(time.Second))
	}
	return nil
}

// Run looks for the driver, follows it as long as it works, and starts again,
// until ctx ends; then it returns nil. It returns an error when the driver was
// replaced by one whose library this process can't load.
func (f *Follower) Run(ctx context.Context) error {
	looked := sync.OnceFunc(func() { close(f.first) })
	f.seen.recall()
	for ctx.Err() == nil {
		err := f.follow(ctx, looked)
		if c, ok := errors.AsType[*closed](err); ok {
			f.alive.beat()
			f.whileClosed(ctx, c)
			f.alive.beat()
			continue
		}
		f.stopWaiting()
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, errOtherLibrary) {
			return err
		}
		f.lose(ctx, err)
		looked()
		f.pause(ctx, retryDriver)
	}
	f.stopWaiting()
	return nil //nolint:nilerr // the context's end is how it is told to stop
}

// follow opens the driver and reads it repeatedly. It returns the error that ends
// this. looked is called when the hardware agrees with the journal, or after RecoverWithin.
func (f *Follower) follow(ctx context.Context, looked func()) (err error) {
	f.cfg.Facts.BeginReading()
	_ = f.closeRest() // tried again later
	root, session, err := f.cfg.Opener.open()
	if err != nil {
		return err
	}
	defer func() { err = f.close(ctx, session, err) }()
	f.seen.pass(session)
	defer func() { _ = f.cfg.Specs.SetDriver(nil) }() // nil never fails
	node, err := f.read(ctx, root, session, true)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Found the NVIDIA driver", "node", f.cfg.NodeName, "driverRoot", root.Path, "devRoot", root.DevRoot,
		"library", root.Library, "driver", node.DriverVersion, "gpus", len(node.GPUs))
	f.said = ""
	f.suspended = false
	arrived := f.arrive(ctx, root, session)
	defer func() { f.beforeClose(ctx, arrived, err) }()
	looked()
	endWatch := f.watch(ctx, root, session)
	defer endWatch()
	return f.keepReading(ctx, root, session, node.DriverVersion)
}

// stopWaiting lets the parts wait no longer for a driver that was closed for a while and can't be
// opened again.
func (f *Follower) stopWaiting() {
	if f.suspended {
		f.suspended = false
		f.cfg.leave()
	}
}

// lose records in the facts that there is no working driver, and why.
func (f *Follower) lose(ctx context.Context, err error) {
	reason := facts.ReasonNVMLError
	if notFound := (*driverroot.NotFoundError)(nil); errors.As(err, &notFound) {
		reason = facts.ReasonDriverNotFound
	}
	if f.said != err.Error() {
		klog.FromContext(ctx).Info("No working NVIDIA driver, waiting for one", "reason", reason, "err", err)
		f.said = err.Error()
	}
	f.cfg.Facts.Missing(reason, err.Error())
}

// close ends a session, which is left because of an error, and returns that error. A
// session that can't be ended now is ended when its calls have returned, or with the process.
func (f *Follower) close(ctx context.Context, session *nvml.Session, why error) error {
	err := f.cfg.Opener.close(session)
	f.staysOpen.Store(err != nil)
	if err != nil {
		klog.FromContext(ctx).Error(err, "NVML isn't shut down yet", "node", f.cfg.NodeName)
	}
	if c, ok := errors.AsType[*closed](why); ok {
		c.failed = err
	}
	return why
}

// closeRest closes earlier sessions that could not be closed, and returns an error if one
// stays open.
func (f *Follower) closeRest() error {
	err := f.cfg.Opener.closeRest()
	f.staysOpen.Store(err != nil)
	return err
}

// arrive gives the parts the driver, and makes the hardware agree with the journal, which may
// take long. It returns when that is done, or after RecoverWithin. The channel is closed when
// it is done.
func (f *Follower) arrive(ctx context.Context, root driverroot.Root, session *nvml.Session) (arrived <-chan struct{}) {
	return f.recover(ctx, func() { f.cfg.use(f.cfg.Opener.host, root, session, f.cfg.BootID) })
}

// recover calls before, and makes the node agree with the journal. It returns when that is done,
// or after RecoverWithin. The channel is closed when it is done.
func (f *Follower) recover(ctx context.Context, before func()) (recovered <-chan struct{}) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		before()
		f.cfg.Recover(ctx)
	}()
	select {
	case <-done:
	case <-time.After(RecoverWithin):
		klog.FromContext(ctx).Info("Recovering the GPUs takes long, going on meanwhile", "node", f.cfg.NodeName, "after", RecoverWithin)
	case <-ctx.Done():
	}
	return done
}

// beforeClose takes the hardware from the parts. If the plugin ends, no other takes over and
// nothing is prepared, what was done to the GPUs is undone before.
func (f *Follower) beforeClose(ctx context.Context, arrived <-chan struct{}, why error) {
	<-arrived
	if _, ok := errors.AsType[*closed](why); ok && ctx.Err() == nil {
		f.suspended = true
		f.cfg.suspend()
		return
	}
	if ctx.Err() != nil && !errors.Is(context.Cause(ctx), ErrHandedOver) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeWithin)
		defer cancel()
		f.cfg.Restore(ctx)
	}
	f.cfg.leave()
}

// RecoverWithoutDriver makes the node agree with the journal where that needs no driver: steps
// that need one fail, and are retried later. It returns after RecoverWithin at the latest, so
// that the plugin can register with the kubelet.
func (f *Follower) RecoverWithoutDriver(ctx context.Context) {
	f.recover(ctx, func() {})
}

// pause waits for a request, the time, or the end of ctx.
func (f *Follower) pause(ctx context.Context, d time.Duration) (woken bool) {
	f.alive.beat()
	defer f.alive.beat()
	return f.cfg.Facts.AwaitRequest(ctx, d)
}
