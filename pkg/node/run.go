package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/claimstatus"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/report"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// firstReportWithin is how long registration waits for the first report. The
// kubelet must be able to unprepare while the API server is away.
const firstReportWithin = 15 * time.Second

// firstLookWithin is how long registration waits for the first look at the
// hardware: the kubelet must be able to unprepare while the driver hangs.
const firstLookWithin = 45 * time.Second

// stopWithin is how long the parts may take to end. A part that hangs in the
// driver ends with the process, after the lock of the data directory was
// released, so that the next plugin can start.
const stopWithin = 25 * time.Second

// Run runs the plugin. It returns when ctx ends, or with an error after which
// it can't continue; a missing driver or API server isn't one.
func Run(ctx context.Context, cfg Config) error {
	api, err := cfg.restConfig()
	if err != nil {
		return err
	}
	lock, err := lockDataDir(ctx, cfg.DataDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	p, err := newPlugin(cfg, api)
	if err != nil {
		return err
	}
	defer p.journal.Close()
	err = p.run(ctx)
	return errors.Join(err, p.cleanUp(ctx))
}

// plugin is the parts, wired.
type plugin struct {
	cfg        Config
	client     kubernetes.Interface
	journal    *journal.Journal
	containers *containers.Containers
	specs      *cdi.Specs
	warnings   *warnings
	facts      *facts.Facts
	reporter   *report.Reporter
	partitions *partition.Manager
	sharing    *sharing.Manager
	statuses   *claimstatus.Writer
	preparer   *prepare.Preparer
	kubelet    *kubelet.Plugin
	hardware   *hardware
	metrics    *prometheus.Registry
	mended     mended
	registered atomic.Bool
}

func newPlugin(cfg Config, api *rest.Config) (_ *plugin, err error) {
	p := &plugin{cfg: cfg, metrics: newRegistry()}
	bootID, err := readBootID()
	if err != nil {
		return nil, err
	}
	if p.client, err = kubernetes.NewForConfig(api); err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	hook, err := installHook(cfg.CDIHook, cfg.DataDir)
	if err != nil {
		return nil, err
	}
	host := driverroot.NewHost(cfg.HostRoot)
	if err := p.openState(host, hook); err != nil {
		return nil, err
	}
	p.warnings = newWarnings(p.client, cfg.NodeName)
	p.statuses = claimstatus.New(p.client, gpu.DriverName, cfg.NodeName)
	p.hardware = &hardware{
		nodeName: cfg.NodeName, driverRoot: cfg.DriverRoot, host: host, specs: p.specs,
		conditions: p.conditions, held: p.held, arrived: p.recover, reread: p.mend, leaving: p.leaveHardware,
		wake: make(chan struct{}, 1), first: make(chan struct{}), opener: nvml.NewOpener(),
	}
	claims := holding.NewClaims(p.journal)
	p.partitions = partition.New(partition.Options{
		Journal: p.journal, Claims: claims, BootID: bootID, Registerer: p.metrics,
		ConditionsChanged: p.hardware.Wake, ModeSwitched: p.hardware.modeSwitched, Step: failpoint.Step(),
	})
	daemons, err := mps.Dial(cfg.MPSSocket)
	if err != nil {
		return nil, errors.Join(err, p.journal.Close())
	}
	p.sharing = sharing.New(sharing.Options{
		Journal: p.journal, Claims: claims, Daemons: daemons, BootID: bootID, ExclusiveProcess: cfg.MPSComputeMode == mpsExclusiveProcess,
		Remains: mps.RunDirOf(cfg.MPSSocket).Remains, Registerer: p.metrics, ConditionsChanged: p.hardware.wakeForGPUs,
		Warn: p.warnings.warnHolder, Step: failpoint.Step(),
	})
	p.facts = facts.New(cfg.NodeName)
	p.reporter, err = report.New(report.Config{
		NodeName: cfg.NodeName, PluginVersion: cfg.Version, BootID: bootID, REST: api,
		Facts: p.facts, Seen: p.ask, Recalled: p.hardware.wakeForGPUs,
	})
	if err != nil {
		return nil, errors.Join(err, p.journal.Close())
	}
	p.hardware.facts, p.hardware.partitions, p.hardware.sharing = p.facts, p.partitions, p.sharing
	p.preparer = prepare.New(prepare.Options{
		Journal: p.journal, Claims: claims, CDI: p.specs, Containers: p.containers, Inventory: p.facts, Partitions: p.partitions, Sharing: p.sharing,
		Holders: prepare.NewCluster(draclient.New(p.client), gpu.DriverName, cfg.NodeName),
		Driver:  gpu.DriverName, Pool: cfg.NodeName, BootID: bootID,
		Registerer: p.metrics, ConditionsChanged: p.hardware.Wake, OnPrepared: p.statuses.Tell, Warn: p.warnings.warn,
		Step: failpoint.Step(),
	})
	p.kubelet = kubelet.New(kubelet.Options{
		Driver: gpu.DriverName, Root: cfg.KubeletRoot, Client: p.client, Claims: p.preparer,
		OnRegistered: p.onRegistered, OnChallenged: p.facts.Challenged,
	})
	return p, nil
}

// openState opens what the node keeps of its claims: the journal, the marks of
// their containers and their CDI specs. On an error the journal is closed.
func (p *plugin) openState(host driverroot.Host, hook string) (err error) {
	cfg := p.cfg
	if p.journal, err = journal.Open(filepath.Join(cfg.DataDir, journalDir), failpoint.Step()); err != nil {
		return err
	}
	if p.containers, err = containers.New(filepath.Join(cfg.DataDir, marksDir), host.Path); err != nil {
		return errors.Join(err, p.journal.Close())
	}
	p.specs = cdi.New(cdi.Config{Dir: cfg.CDIDir, HookPath: hook, Host: host, Mark: p.containers.Mark})
	if err := checkDataDir(p.specs, cfg.DataDir, hook); err != nil {
		return errors.Join(err, p.journal.Close())
	}
	return nil
}

// run runs the parts until ctx ends or one can't go on.
func (p *plugin) run(ctx context.Context) error {
	if err := p.specs.Tidy(); err != nil {
		klog.FromContext(ctx).Error(err, "Temporary files stay in the CDI directory", "node", p.cfg.NodeName)
	}
	if err := p.containers.Recover(); err != nil {
		klog.FromContext(ctx).Error(err, "Containers of claims that were being unprepared when the plugin ended may go unnoticed", "node", p.cfg.NodeName)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return p.containers.Run(ctx) })
	group.Go(func() error { return p.warnings.run(ctx) })
	group.Go(func() error {
		return serve(ctx, "--metrics-address", p.cfg.MetricsAddress, metricsHandler(p.metrics))
	})
	group.Go(func() error {
		return serve(ctx, "--health-address", p.cfg.HealthAddress, healthHandler(checks{healthy: p.healthy, ready: p.ready}))
	})
	group.Go(func() error { return p.hardware.Run(ctx) })
	group.Go(func() error { return p.reporter.Run(ctx) })
	group.Go(func() error { p.partitions.Run(ctx); return nil })
	group.Go(func() error { p.sharing.Run(ctx); return nil })
	group.Go(func() error { return p.statuses.Run(ctx) })
	group.Go(func() error {
		if err := p.mayRegister(ctx); err != nil {
			return nil //nolint:nilerr // the context's end: nothing to register any more
		}
		return p.kubelet.Run(ctx)
	})
	return endWithin(ctx, stopWithin, group.Wait)
}

// endWithin returns the result of wait, or an error if wait has not returned that
// long after ctx has ended.
func endWithin(ctx context.Context, within time.Duration, wait func() error) error {
	ended := make(chan error, 1)
	go func() { ended <- wait() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(within):
		return fmt.Errorf("the plugin did not stop within %s and is terminated", within)
	}
}

// mayRegister waits until the kubelet may hand out claims for this node.
func (p *plugin) mayRegister(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	select {
	case <-p.hardware.first:
		if p.facts.Trouble() != nil {
			p.recoverWithout(ctx)
		}
	case <-time.After(firstLookWithin):
		logger.Info("Registering before the hardware was looked at: the driver takes long to answer", "node", p.cfg.NodeName, "after", firstLookWithin)
	case <-ctx.Done():
		return ctx.Err()
	}
	soon, cancel := context.WithTimeout(ctx, firstReportWithin)
	defer cancel()
	if err := p.reporter.WaitReported(soon); err != nil && ctx.Err() == nil {
		logger.Info("Registering without a first report: the API server is away", "node", p.cfg.NodeName)
		return nil
	}
	if conflict := p.facts.Conflict(); conflict != "" {
		logger.Info("Not registering with the kubelet until the other driver is gone", "node", p.cfg.NodeName, "conflict", conflict)
		return p.facts.WaitUnchallenged(ctx)
	}
	return ctx.Err()
}

// recoverWithout recovers what needs no driver. It returns after recoverWithin at
// the latest, so that the plugin can register with the kubelet.
func (p *plugin) recoverWithout(ctx context.Context) {
	recovered := make(chan struct{})
	go func() {
		defer close(recovered)
		p.recover(ctx)
	}()
	select {
	case <-recovered:
	case <-time.After(recoverWithin):
	case <-ctx.Done():
	}
}

// ask passes on what policies ask of the node.
func (p *plugin) ask(inv *v1alpha1.GPUInventory) {
	p.partitions.SetKeepWarm(inventory.KeepWarm(inv))
	p.sharing.SetTimeSlices(inventory.TimeSlices(inv))
}

func (p *plugin) onRegistered(time.Time) {
	klog.Background().Info("Registered with the kubelet", "node", p.cfg.NodeName)
	p.registered.Store(true)
	p.reporter.Registered()
}

// held returns the GPUs that claims' records name.
func (p *plugin) held() []gpu.UUID {
	var all []gpu.UUID
	for _, r := range p.journal.All() {
		all = append(all, r.GPUs()...)
	}
	for _, u := range p.journal.Unreadable() {
		all = append(all, u.Record.GPUs()...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// conditions returns the GPUs' conditions that follow from the journal, from MIG
// partitions and from sharing.
func (p *plugin) conditions() map[gpu.UUID][]gpu.Condition {
	all := p.partitions.Conditions()
	for _, some := range []map[gpu.UUID][]gpu.Condition{p.preparer.Conditions(), p.sharing.Conditions()} {
		for uuid, more := range some {
			all[uuid] = append(all[uuid], more...)
		}
	}
	return all
}

// recover makes the node agree with the journal. It stops MPS daemons that no
// claim needs before it repairs MIG partitions, because daemons run inside
// partitions, and restores prepared claims last. What fails, for example because
// there is no driver, is retried when a driver has been found.
func (p *plugin) recover(ctx context.Context) {
	if err := p.sharing.Recover(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Recovering MPS daemons failed, retrying", "node", p.cfg.NodeName)
	}
	if err := p.partitions.Recover(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Recovering MIG partitions failed, retrying", "node", p.cfg.NodeName)
	}
	if err := p.preparer.Recover(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Some prepared claims can't be restored now", "node", p.cfg.NodeName)
	}
}

// ready returns an error until the kubelet has registered the plugin, which is as
// far as a plugin can come by itself: a rollout stops at one that doesn't. A node
// without a driver, or with a broken one, must not stop it; its GPUInventory says
// what is wrong there.
func (p *plugin) ready() error {
	if p.registered.Load() || p.facts.NoDriver() {
		return nil
	}
	if conflict := p.facts.Conflict(); conflict != "" {
		return errors.New(conflict)
	}
	return errors.New("not registered with the kubelet yet")
}

// healthy returns an error if something is stuck.
func (p *plugin) healthy() error { return p.stuck(stuckAfter) }

// stuck returns an error if the hardware's loop, or a call of the kubelet, has not
// ended for longer than after.
func (p *plugin) stuck(after time.Duration) error {
	if age := p.hardware.alive.age(); age > after {
		return fmt.Errorf("the look at the hardware has not ended for %s", age.Round(time.Second))
	}
	if age := p.kubelet.OldestCall(); age > after {
		return fmt.Errorf("a call of the kubelet has not ended for %s", age.Round(time.Second))
	}
	return nil
}

// leaveHardware takes back what was done to GPUs, if nothing is prepared.
func (p *plugin) leaveHardware(ctx context.Context) {
	if p.claims() > 0 {
		return
	}
	if err := p.sharing.LeaveHost(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Some GPUs' settings, or MPS daemons, stay as claims needed them", "node", p.cfg.NodeName)
	}
	if err := p.partitions.Leave(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Some MIG partitions stay on the node's GPUs", "node", p.cfg.NodeName)
	}
}

// claims is how many claims are, or may be, prepared.
func (p *plugin) claims() int { return p.journal.Len() + len(p.journal.Unreadable()) }

// cleanUp cleans up on the host, if nothing there is in use any more: the next
// plugin, if there is one, puts it back.
func (p *plugin) cleanUp(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	if n := p.claims(); n > 0 {
		logger.Info("Leaving what prepared claims need on the host", "node", p.cfg.NodeName, "claims", n)
		return nil
	}
	err := errors.Join(p.specs.RemoveCommon(), cleanDataDir(p.cfg.DataDir))
	if err != nil {
		return fmt.Errorf("clean up on the host: %w", err)
	}
	// They stay if others have put something there, or if they are mounts.
	_ = os.Remove(p.cfg.DataDir)
	_ = os.Remove(kubelet.DataDirectory(p.cfg.KubeletRoot, gpu.DriverName))
	return nil
}
