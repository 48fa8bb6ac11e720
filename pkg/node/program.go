package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/endpoints"
	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/handover"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
	"github.com/tessera-dra/tessera/pkg/scrapeauth"
)

const (
	// askEvery is how often a plugin that waits asks the acting one for the node.
	askEvery = 5 * time.Second
	// standByAfter is how long nobody may have offered the node before a plugin that
	// waits for it reports ready. An acting plugin that is starting offers it earlier.
	standByAfter = 10 * time.Second
	// openWithin is how long a plugin that has locked the data directory may take to read
	// it. A liveness probe ends one that hangs there.
	openWithin = time.Minute
	// registerWithin is how long a plugin that has taken over may take until the kubelet has
	// registered it. Then it ends, and the plugin before takes the node back.
	registerWithin = 90 * time.Second
	// stopListeningWithin is more than a wait for events takes.
	stopListeningWithin = 2 * time.Second
	// releaseWithin is how long a plugin that hands over may take to end its work. It is more
	// than a change of the hardware takes, and less than the successor waits.
	releaseWithin = 45 * time.Second
)

// Run runs the plugin. It returns when ctx ends, or with an error after which
// it can't continue; a missing driver or API server isn't one.
//
// One plugin of a node at a time acts: it has locked the data directory. Others of the
// same node wait for that, and ask the acting one to hand over. A plugin that has handed
// over passes the kubelet's calls on until its pod is deleted, and acts again if its
// successor ends before.
func Run(ctx context.Context, cfg Config) error {
	p, err := newProgram(cfg)
	if err != nil {
		return err
	}
	metrics := endpoints.Metrics(cfg.MetricsAddress, prometheus.GathererFunc(p.gather))
	if cfg.MetricsAuthentication {
		if metrics, err = scrapeauth.Guard(p.client, metrics); err != nil {
			return err
		}
	}
	return endpoints.Serve(ctx, p.live, metrics, endpoints.Health(cfg.HealthAddress, p.healthy, p.ready))
}

// program is a process of the plugin, which may act several times.
type program struct {
	cfg    Config
	api    *rest.Config
	client kubernetes.Interface
	// opener opens the driver, during a tenure or ahead of it.
	opener *driver.Opener
	stage  atomic.Pointer[stage]
	// idle has the metrics of the process while it doesn't act.
	idle *prometheus.Registry
	// failed has, by pod UID, the successors that ended before this plugin did.
	failed *flowcontrol.Backoff
	// podUID is nil until it is known whether the kubelet supports handovers.
	podUID *types.UID
	// steps, which may be nil, are told of each step of a handover, for crash tests.
	steps *failpoint.Steps
}

func newProgram(cfg Config) (*program, error) {
	api, err := cfg.restConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(api)
	if err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	p := &program{
		cfg: cfg, api: api, client: client, opener: driver.NewOpener(driverroot.NewHost(cfg.HostRoot), cfg.DriverRoot),
		idle: endpoints.NewRegistry(), failed: newFailures(), steps: failpoint.FromEnvironment(),
	}
	p.enter(stage{state: waiting, unready: errNotActing})
	return p, nil
}

// state is where a plugin is in its life: it goes from each to the next, and from the last
// one back to opening.
type state int

const (
	// waiting: another plugin acts. This one asks it for the node.
	waiting state = iota
	// opening: this plugin has locked the data directory, and reads what is in it.
	opening
	// acting: it does the node's work, until it has ended that for another plugin.
	acting
	// forwarding: another plugin acts. This one passes the kubelet's calls on to it.
	forwarding
)

// stage is a state, with what the answers to probes and scrapes need then.
type stage struct {
	state state
	since time.Time
	// plugin is the one that acts.
	plugin *plugin
	// unready says why a plugin that doesn't act isn't ready; nil: it is.
	unready error
}

// errNotActing is the state of a plugin that waits for the data directory.
var errNotActing = errors.New("another plugin of this node runs, and hasn't handed over yet")

// enter changes the answers to probes and scrapes.
func (p *program) enter(s stage) {
	s.since = time.Now()
	p.stage.Store(&s)
}

// healthy returns an error if something is stuck, so that the process must be restarted.
func (p *program) healthy(context.Context) error {
	switch s := p.stage.Load(); {
	case s.state == acting:
		return s.plugin.healthy()
	case s.state == opening && time.Since(s.since) > openWithin:
		return fmt.Errorf("the data directory and the CDI directory could not be read within %s: does the disk hang?", openWithin)
	}
	return nil
}

// ready returns nil if claims can be prepared, or there is no driver to prepare them with.
func (p *program) ready(context.Context) error {
	s := p.stage.Load()
	if s.state == acting {
		return s.plugin.ready()
	}
	return s.unready
}

// gather returns what a scrape gets.
func (p *program) gather() ([]*dto.MetricFamily, error) {
	if s := p.stage.Load(); s.state == acting {
		return s.plugin.metrics.Gather()
	}
	return p.idle.Gather()
}

// tenure is the time in which a plugin acts.
type tenure struct {
	dir *datadir.Dir
	// tookOver: the plugin of the pod predecessor, which may be empty, has handed over,
	// and passes the kubelet's calls on.
	tookOver    bool
	predecessor types.UID
	// graceUntil is set if the plugin took the node back. Until then it refuses to hand over
	// while the kubelet hasn't registered it again, so that calls of the kubelet don't fail
	// because neither plugin is registered.
	graceUntil time.Time
	// wasReady: the plugin was ready when it handed over, and stays ready until graceUntil.
	// Otherwise the DaemonSet's controller would delete its pod, and keep the pod of the
	// plugin that failed.
	wasReady bool
}

// inGrace reports whether the plugin took the node back less than registerWithin ago.
func (t tenure) inGrace() bool { return time.Now().Before(t.graceUntil) }

// live returns when ctx ends, or with an error after which the plugin can't continue.
func (p *program) live(ctx context.Context) error {
	t, err := p.wait(ctx)
	for err == nil && t.dir != nil && ctx.Err() == nil {
		t, err = p.act(ctx, t)
	}
	if t.dir != nil {
		err = errors.Join(err, t.dir.Close())
	}
	return err
}

// wait waits until this process has locked the data directory, and asks the plugin that has
// it to hand over. It returns no directory if ctx ends before.
func (p *program) wait(ctx context.Context) (tenure, error) {
	var next, alone time.Time
	var kept error // why the acting plugin hasn't handed over
	for ctx.Err() == nil {
		dir, locked, err := datadir.TryLock(p.cfg.DataDir)
		if locked || err != nil {
			return tenure{dir: dir}, err
		}
		if now := time.Now(); now.After(next) {
			t, err := p.ask(ctx, kept)
			if err == nil {
				return t, nil
			}
			next = time.Now().Add(askEvery)
			switch {
			case !errors.Is(err, handover.ErrNobody):
				alone = time.Time{}
				p.enter(stage{state: waiting, unready: err})
			case alone.IsZero():
				alone = now
			case now.Sub(alone) >= standByAfter:
				// The acting plugin doesn't know of handovers. It ends when its pod is deleted,
				// and a rollout deletes that when this one is ready.
				p.enter(stage{state: waiting})
			}
			if fmt.Sprint(kept) != err.Error() {
				klog.FromContext(ctx).Info("Another plugin uses the data directory, waiting for it", "path", p.cfg.DataDir, "reason", err.Error())
			}
			kept = err
		}
		select {
		case <-time.After(datadir.LockPoll):
		case <-ctx.Done():
		}
	}
	return tenure{}, nil
}

// ask opens the driver ahead, and asks the acting plugin for the node. The error of the
// request before says why that plugin kept it.
func (p *program) ask(ctx context.Context, before error) (_ tenure, err error) {
	podUID, err := p.usablePodUID(ctx)
	if err != nil {
		return tenure{}, err
	}
	socket := datadir.HandoverSocketOf(p.cfg.DataDir)
	if _, err := os.Stat(socket); err != nil || podUID == "" {
		return tenure{}, handover.ErrNobody
	}
	// Not after a refusal: while this plugin has the GPUs open, the acting one can't reset them.
	if !errors.Is(before, handover.ErrRefused) {
		if err := p.opener.OpenAhead(); err != nil {
			klog.FromContext(ctx).Info("The driver could not be prepared before asking for the node", "node", p.cfg.NodeName, "err", err)
		}
	}
	granted, err := handover.Ask(ctx, socket, handover.Request{
		PodUID: podUID, Service: kubelet.ServiceSocket(p.cfg.KubeletRoot, gpu.DriverName, podUID),
		BesideDevicePlugin: true,
	})
	if err != nil {
		return tenure{}, errors.Join(err, p.opener.CloseAhead())
	}
	dir, err := datadir.Adopt(p.cfg.DataDir, granted.Lock)
	if err != nil {
		return tenure{}, errors.Join(err, p.opener.CloseAhead())
	}
	p.steps.Reached("handover.taken")
	return tenure{dir: dir, tookOver: true, predecessor: granted.PodUID}, nil
}

// act opens the node's state and does the node's work, until ctx ends, or another plugin has
// taken over and ended: then it returns the next tenure.
func (p *program) act(ctx context.Context, t tenure) (next tenure, err error) {
	defer t.dir.Close()
	plugin, err := p.open(ctx, t)
	if err != nil {
		return tenure{}, err
	}
	defer plugin.journal.Close()
	p.enter(stage{state: acting, plugin: plugin})
	running := plugin.start(ctx)
	asked, err := p.offer(running, plugin)
	if asked == nil {
		return tenure{}, errors.Join(err, plugin.end(), plugin.cleanUp(ctx))
	}
	if err := p.handOver(running, plugin, asked); err != nil {
		return tenure{}, errors.Join(err, plugin.end())
	}
	dir, err := p.forward(running, plugin)
	if err = errors.Join(err, plugin.end()); dir == nil || err != nil {
		return tenure{dir: dir}, err
	}
	klog.FromContext(ctx).Info("The plugin that took over has ended, acting again", "node", p.cfg.NodeName)
	p.failed.GC()
	p.failed.Next(string(asked.PodUID), time.Now())
	return tenure{dir: dir, graceUntil: time.Now().Add(registerWithin), wasReady: p.ready(ctx) == nil}, nil
}

// open reads the node's state, and wires the parts.
func (p *program) open(ctx context.Context, t tenure) (*plugin, error) {
	podUID, err := p.usablePodUID(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "This plugin can't hand over to another until it starts again", "node", p.cfg.NodeName)
	}
	p.enter(stage{state: opening, unready: p.ready(ctx)})
	return newPlugin(p, t, podUID)
}

// offer waits for a plugin that asks for the node and isn't refused. It returns nil when ctx
// ends, and an error if this plugin took over and the kubelet doesn't register it.
func (p *program) offer(ctx context.Context, plugin *plugin) (*handover.Accepted, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if plugin.tenure.tookOver {
		defer time.AfterFunc(registerWithin, func() {
			if !plugin.facts.IsRegistered() {
				cancel(errNotRegistered)
			}
		}).Stop()
	}
	asked, err := handover.Await(ctx, plugin.dir.HandoverSocket(), func(r handover.Request) error { return p.refuses(plugin, r) })
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "This plugin can't hand over to another, which has to wait for its end", "node", p.cfg.NodeName)
		<-ctx.Done()
	}
	if asked == nil && errors.Is(context.Cause(ctx), errNotRegistered) {
		return nil, errNotRegistered
	}
	return asked, nil
}

// errNotRegistered ends a plugin that took over: the plugin before acts again.
var errNotRegistered = fmt.Errorf("the kubelet hasn't registered this plugin within %s: the plugin before takes over again", registerWithin)

// handOver ends this plugin's work in the data directory and on the hardware, and gives the
// lock to the plugin that has asked for it. It returns an error if the work doesn't end: then
// only the end of the process releases the node.
func (p *program) handOver(ctx context.Context, plugin *plugin, to *handover.Accepted) error {
	logger := klog.FromContext(ctx)
	logger.Info("Handing over to another plugin", "node", p.cfg.NodeName, "podUID", to.PodUID)
	stopListening(ctx, plugin)
	began := time.Now()
	if err := p.release(ctx, plugin, to.Service); err != nil {
		return errors.Join(fmt.Errorf("hand over to another plugin: %w", err), to.Close())
	}
	p.enter(stage{state: forwarding, unready: plugin.ready()})
	// If the lock isn't sent, any plugin may take it.
	if err := errors.Join(to.Give(plugin.podUID, plugin.dir.File()), plugin.dir.Close()); err != nil {
		logger.Error(err, "The other plugin hasn't taken over", "podUID", to.PodUID)
	} else {
		logger.Info("Handed over to another plugin, passing the kubelet's calls on to it", "node", p.cfg.NodeName, "podUID", to.PodUID, "duration", time.Since(began))
	}
	p.steps.Reached("handover.given")
	return nil
}

// stopListening ends the wait for the driver's events while the plugin still handles the
// kubelet's calls. A successor that has opened the driver ahead sees all later events.
func stopListening(ctx context.Context, plugin *plugin) {
	ctx, cancel := context.WithTimeout(ctx, stopListeningWithin)
	defer cancel()
	plugin.driver.StopListening(ctx)
}

// release ends the work of the plugin. The kubelet's calls are passed to the service from
// then on.
func (p *program) release(ctx context.Context, plugin *plugin, service string) error {
	ctx, cancel := context.WithTimeout(ctx, releaseWithin)
	defer cancel()
	if err := plugin.kubelet.HandOver(ctx, service); err != nil {
		return err
	}
	p.steps.Reached("handover.drained")
	if err := plugin.endWork(ctx); err != nil {
		return err
	}
	p.steps.Reached("handover.stopped")
	return plugin.journal.Close()
}

// forward passes the kubelet's calls on, until the plugin that took over has ended: then it
// returns the locked directory. It returns nil when ctx ends.
func (p *program) forward(ctx context.Context, plugin *plugin) (*datadir.Dir, error) {
	dir, err := datadir.Lock(ctx, p.cfg.DataDir)
	if dir != nil {
		plugin.kubelet.EndForwarding()
	}
	if ctx.Err() != nil {
		return dir, nil //nolint:nilerr // the context's end is how it is told to stop
	}
	return dir, err
}
