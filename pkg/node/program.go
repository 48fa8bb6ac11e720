package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/handover"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
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
	// refuseFirst is how long a plugin is refused that took over and ended before this one
	// did. It doubles with each failure, up to refuseLongest, and is refuseFirst again after
	// twice refuseLongest without one.
	refuseFirst   = 30 * time.Second
	refuseLongest = 5 * time.Minute
)

// Run runs the plugin. It returns when ctx ends, or with an error after which
// it can't continue; a missing driver or API server isn't one.
//
// One plugin of a node at a time acts: it has locked the data directory. Others of the
// same node wait for that, and ask the acting one to hand over. A plugin that has handed
// over passes the kubelet's calls on until its pod is deleted, and acts again if its
// successor ends before.
func Run(ctx context.Context, cfg Config) error {
	api, err := cfg.restConfig()
	if err != nil {
		return err
	}
	p := &program{cfg: cfg, api: api, idle: newRegistry(), failed: newFailures(), step: failpoint.Step()}
	p.opener = driver.NewOpener(driverroot.NewHost(cfg.HostRoot), cfg.DriverRoot)
	if p.step == nil {
		p.step = func(string) {}
	}
	if p.client, err = kubernetes.NewForConfig(api); err != nil {
		return fmt.Errorf("reach the API server: %w", err)
	}
	p.setIdle(errNotActing)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return p.serveMetrics(ctx) })
	group.Go(func() error { return p.serveHealth(ctx) })
	group.Go(func() error { return p.run(ctx) })
	return group.Wait()
}

// program waits for the node, acts, and hands over, perhaps several times.
type program struct {
	cfg    Config
	api    *rest.Config
	client kubernetes.Interface
	stage  atomic.Pointer[stage]
	// idle has the metrics of the process while it doesn't act.
	idle *prometheus.Registry
	// failed has, by pod UID, the successors that ended before this plugin did.
	failed *flowcontrol.Backoff
	// opener opens the driver, during a tenure or ahead of it.
	opener *driver.Opener
	// refused: the acting plugin refused the last request.
	refused bool
	// podUID is nil until it is known whether the kubelet supports handovers.
	podUID *types.UID
	// step is called after each step of a handover, for crash tests.
	step func(string)
}

func newFailures() *flowcontrol.Backoff { return flowcontrol.NewBackOff(refuseFirst, refuseLongest) }

// stage determines the answers to probes and scrapes.
type stage struct {
	healthy, ready func() error
	metrics        prometheus.Gatherer
}

// tenure is the time in which a plugin acts.
type tenure struct {
	dir *datadir.Dir
	// podUID is empty if plugins can't hand over to each other on this node.
	podUID types.UID
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
	// refuses returns why the plugin doesn't hand over to another.
	refuses func(handover.Request) error
	// opener opens the driver; it may have done so ahead.
	opener *driver.Opener
	// step is called after each step of a handover.
	step func(string)
}

func (t tenure) close() error {
	if t.dir == nil {
		return nil
	}
	return t.dir.Close()
}

// errNotActing is the state of a plugin that waits for the data directory.
var errNotActing = errors.New("another plugin of this node runs, and hasn't handed over yet")

// setIdle sets the answers of a plugin that doesn't act; unready is nil if it is ready.
func (p *program) setIdle(unready error) {
	p.stage.Store(&stage{healthy: func() error { return nil }, ready: func() error { return unready }, metrics: p.idle})
}

// run returns when ctx ends, or with an error after which the plugin can't continue.
func (p *program) run(ctx context.Context) error {
	t, err := p.acquire(ctx)
	if ctx.Err() != nil {
		return t.close()
	}
	for err == nil && t.dir != nil {
		t, err = p.act(ctx, t)
	}
	return err
}

// act runs the plugin until ctx ends, or it has the node back from its successor: then
// it returns its next tenure, which has a locked directory.
func (p *program) act(ctx context.Context, t tenure) (next tenure, err error) {
	defer t.dir.Close()
	if t.podUID, err = p.usablePodUID(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "This plugin can't hand over to another until it starts again", "node", p.cfg.NodeName)
	}
	t.opener, t.step = p.opener, p.step
	t.refuses = func(r handover.Request) error { return p.refuses(t, r) }
	p.stage.Store(&stage{healthy: opensUntil(time.Now().Add(openWithin)), ready: p.stage.Load().ready, metrics: p.idle})
	plugin, err := newPlugin(p.cfg, p.api, p.client, t)
	if err != nil {
		return tenure{}, err
	}
	defer plugin.journal.Close()
	plugin.onHandedOver = func() { p.setIdle(plugin.ready()) }
	p.stage.Store(&stage{healthy: plugin.healthy, ready: plugin.ready, metrics: plugin.metrics})
	err = plugin.run(ctx)
	if back, ok := errors.AsType[*takenBackError](err); ok {
		klog.FromContext(ctx).Info("The plugin that took over has ended, acting again", "node", p.cfg.NodeName)
		p.failed.GC()
		p.failed.Next(string(back.from), time.Now())
		return tenure{dir: back.dir, graceUntil: time.Now().Add(registerWithin), wasReady: p.stage.Load().ready() == nil}, nil
	}
	if plugin.driver.HandsOver() {
		return tenure{}, err
	}
	return tenure{}, errors.Join(err, plugin.cleanUp(ctx))
}

// opensUntil returns an error when a plugin still opens its state at the deadline.
func opensUntil(deadline time.Time) func() error {
	return func() error {
		if time.Now().After(deadline) {
			return fmt.Errorf("the data directory and the CDI directory could not be read within %s: does the disk hang?", openWithin)
		}
		return nil
	}
}

// acquire waits until this process has locked the data directory, and asks the plugin
// that has it to hand over.
func (p *program) acquire(ctx context.Context) (tenure, error) {
	logger := klog.FromContext(ctx)
	var next, alone time.Time
	for said := ""; ctx.Err() == nil; {
		dir, locked, err := datadir.TryLock(p.cfg.DataDir)
		if locked || err != nil {
			return tenure{dir: dir}, err
		}
		if now := time.Now(); now.After(next) {
			t, err := p.ask(ctx)
			if err == nil {
				return t, nil
			}
			next = time.Now().Add(askEvery)
			switch {
			case !errors.Is(err, handover.ErrNobody):
				alone = time.Time{}
				p.setIdle(err)
			case alone.IsZero():
				alone = now
			case now.Sub(alone) >= standByAfter:
				// The acting plugin doesn't know of handovers. It ends when its pod is deleted,
				// and a rollout deletes that when this one is ready.
				p.setIdle(nil)
			}
			if said != err.Error() {
				said = err.Error()
				logger.Info("Another plugin uses the data directory, waiting for it", "path", p.cfg.DataDir, "reason", said)
			}
		}
		select {
		case <-time.After(datadir.LockPoll):
		case <-ctx.Done():
		}
	}
	return tenure{}, ctx.Err()
}

// ask opens the driver ahead, and asks the acting plugin for the node.
func (p *program) ask(ctx context.Context) (_ tenure, err error) {
	podUID, err := p.usablePodUID(ctx)
	if err != nil {
		return tenure{}, err
	}
	if podUID == "" {
		return tenure{}, handover.ErrNobody
	}
	socket := datadir.HandoverSocketOf(p.cfg.DataDir)
	if _, err := os.Stat(socket); err != nil {
		return tenure{}, handover.ErrNobody
	}
	// Not after a refusal: while this plugin has the GPUs open, the acting one can't reset them.
	if !p.refused {
		if err := p.opener.OpenAhead(); err != nil {
			klog.FromContext(ctx).Info("The driver could not be prepared before asking for the node", "node", p.cfg.NodeName, "err", err)
		}
	}
	defer func() {
		p.refused = errors.Is(err, handover.ErrRefused)
		if err != nil {
			err = errors.Join(err, p.opener.CloseAhead())
		}
	}()
	granted, err := handover.Ask(ctx, socket, handover.Request{
		PodUID: podUID, Service: kubelet.ServiceSocket(p.cfg.KubeletRoot, gpu.DriverName, podUID),
		BesideDevicePlugin: true,
	})
	if err != nil {
		return tenure{}, err
	}
	dir, err := datadir.Adopt(p.cfg.DataDir, granted.Lock)
	if err != nil {
		return tenure{}, err
	}
	p.step("handover.taken")
	return tenure{dir: dir, tookOver: true, predecessor: granted.PodUID}, nil
}

// refuses returns why the node isn't handed over on a request, nil if it is.
func (p *program) refuses(t tenure, r handover.Request) error {
	if t.tookOver && r.PodUID == t.predecessor {
		return errors.New("that plugin has handed over to this one")
	}
	if id := string(r.PodUID); p.failed.IsInBackOffSinceUpdate(id, time.Now()) {
		return fmt.Errorf("that plugin took over and ended; it may try again %s after that", p.failed.Get(id))
	}
	if own := kubelet.ServiceSocket(p.cfg.KubeletRoot, gpu.DriverName, r.PodUID); r.Service != own {
		return fmt.Errorf("that plugin would serve the kubelet at %s, and this one expects %s: they have different --kubelet-root", r.Service, own)
	}
	return nil
}

// usablePodUID returns the pod's UID, or "" if plugins can't hand over to each other on
// this node: the pod's UID or the kubelet's support is missing. It returns an error if the
// kubelet's version can't be read; the next call tries again.
func (p *program) usablePodUID(ctx context.Context) (types.UID, error) {
	if p.podUID != nil {
		return *p.podUID, nil
	}
	podUID := types.UID(p.cfg.PodUID)
	if podUID != "" {
		ctx, cancel := context.WithTimeout(ctx, serverPatience)
		defer cancel()
		version, err := p.kubeletVersion(ctx)
		if err != nil {
			return "", err
		}
		if err := kubelet.SupportsPodUID(version, p.cfg.KubeletRoot, gpu.DriverName, podUID); err != nil {
			klog.FromContext(ctx).Info("This plugin doesn't take over from a running one, but waits for its end", "node", p.cfg.NodeName, "reason", err.Error())
			podUID = ""
		}
	}
	p.podUID = &podUID
	return podUID, nil
}

func (p *program) kubeletVersion(ctx context.Context) (string, error) {
	nodes, err := p.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, p.cfg.NodeName).String(),
	})
	if err != nil {
		return "", fmt.Errorf("read the Node: %w", err)
	}
	if len(nodes.Items) != 1 {
		return "", fmt.Errorf("the cluster has no Node %s", p.cfg.NodeName)
	}
	return nodes.Items[0].Status.NodeInfo.KubeletVersion, nil
}
