package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/bootid"
	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/endpoints"
	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/claimstatus"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/events"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/report"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/node/usage"
)

// firstReportWithin is how long registration waits for the first report. The
// kubelet must be able to unprepare while the API server is away.
const firstReportWithin = 15 * time.Second

// firstLookWithin is how long registration waits for the first look at the
// hardware: the kubelet must be able to unprepare while the driver hangs.
const firstLookWithin = 45 * time.Second

// stuckAfter is how long the driver's loop, or a call of the kubelet, may go on
// before the plugin counts as stuck. Neither takes as long because of one GPU that
// doesn't respond.
const stuckAfter = 3 * time.Minute

// stopWithin bounds the time that the parts may take to end, once no GPU is being reset.
// A part that hangs in the driver ends with the process, after the lock of the data
// directory was released, so that the next plugin can start.
const stopWithin = 25 * time.Second

// plugin is the parts, wired.
type plugin struct {
	cfg        Config
	tenure     tenure
	podUID     types.UID
	dir        *datadir.Dir
	client     kubernetes.Interface
	journal    *journal.Journal
	containers *containers.Containers
	specs      *cdi.Specs
	events     *events.Events
	facts      *facts.Facts
	reporter   *report.Reporter
	partitions *partition.Manager
	sharing    *sharing.Manager
	statuses   *claimstatus.Writer
	preparer   *prepare.Preparer
	kubelet    *kubelet.Plugin
	health     *healthmonitor.Monitor
	readings   *usage.Readings
	driver     *driver.Follower
	metrics    *prometheus.Registry

	// parts that run. cancel ends all of them, and cancelWork those that use the journal and
	// the hardware; worked is closed when these have ended.
	parts      *errgroup.Group
	cancel     context.CancelFunc
	cancelWork context.CancelCauseFunc
	worked     chan struct{}
}

// newPlugin returns the plugin for a tenure. podUID is empty if plugins can't hand over to
// each other on this node.
func newPlugin(by *program, t tenure, podUID types.UID) (_ *plugin, err error) {
	p := &plugin{cfg: by.cfg, tenure: t, podUID: podUID, dir: t.dir, client: by.client, metrics: endpoints.NewRegistry(), worked: make(chan struct{})}
	bootID, err := bootid.Read()
	if err != nil {
		return nil, err
	}
	host := driverroot.NewHost(p.cfg.HostRoot)
	if err := p.openState(host); err != nil {
		return nil, err
	}
	if err := p.build(by, host, bootID); err != nil {
		return nil, errors.Join(err, p.journal.Close())
	}
	return p, nil
}

// build builds the parts, each from those before it.
func (p *plugin) build(by *program, host driverroot.Host, bootID string) (err error) {
	cfg := p.cfg
	p.events = events.New(userAgent, cfg.NodeName)
	p.statuses = claimstatus.New(p.client, gpu.DriverName, cfg.NodeName)
	p.facts = facts.New(cfg.NodeName)
	p.partitions = partition.New(partition.Config{
		Journal: p.journal, Specs: p.specs, Facts: p.facts, BootID: bootID, Registerer: p.metrics, Steps: failpoint.FromEnvironment(),
	})
	daemons, err := mps.Dial(cfg.MPSSocket)
	if err != nil {
		return err
	}
	prepared, err := p.specs.Claims()
	if err != nil {
		klog.Background().Error(err, "Claims count as prepared only once they have been restored", "node", cfg.NodeName)
	}
	p.sharing = sharing.New(sharing.Config{
		Journal: p.journal, Daemons: daemons, BootID: bootID, Prepared: prepared, ExclusiveProcess: cfg.MPSComputeMode == mpsExclusiveProcess,
		Registerer: p.metrics, ConditionsChanged: p.facts.RereadGPUs,
		Warn: p.events.WarnClaimOf, Steps: failpoint.FromEnvironment(),
	})
	p.reporter, err = report.New(report.Config{
		NodeName: cfg.NodeName, PluginVersion: cfg.Version, BootID: bootID, REST: by.api,
		Facts: p.facts,
	})
	if err != nil {
		return err
	}
	p.preparer = prepare.New(prepare.Config{
		Journal: p.journal, Facts: p.facts, Containers: p.containers, Partitions: p.partitions, Sharing: p.sharing, Specs: p.specs,
		Events: p.events, Statuses: p.statuses, Reporter: p.reporter,
		Cluster: draclient.New(p.client), Version: discovery.ToServerVersionInterfaceWithContext(p.client.Discovery()),
		Driver: gpu.DriverName, Pool: cfg.NodeName, BootID: bootID, Registerer: p.metrics, Steps: failpoint.FromEnvironment(),
	})
	p.readings = p.newReadings(host)
	p.health = healthmonitor.New(healthmonitor.Config{
		NodeName: cfg.NodeName, BootID: bootID, Client: p.client, Journal: p.journal, Facts: p.facts, Containers: p.containers,
		Preparer: p.preparer, Sharing: p.sharing, Readings: p.readings, Events: p.events, Registerer: p.metrics,
	})
	p.driver = driver.New(driver.Config{
		Parts: driver.Parts{
			NodeName: cfg.NodeName, Journal: p.journal, Partitions: p.partitions, Sharing: p.sharing, Preparer: p.preparer,
			Health: p.health,
		},
		BootID: bootID, Opener: by.opener, Specs: p.specs, Facts: p.facts, Steps: failpoint.FromEnvironment(), Registerer: p.metrics,
	})
	p.kubelet = kubelet.New(kubelet.Config{
		Driver: gpu.DriverName, Root: cfg.KubeletRoot, PodUID: p.podUID, DataDir: cfg.DataDir, CDIDir: cfg.CDIDir, DeviceMetadata: cfg.DeviceMetadata,
		Client: p.client, Claims: p.preparer, Pool: cfg.NodeName, Journal: p.journal, Facts: p.facts,
	})
	return p.registerUsage(host, bootID)
}

// openState installs the hook, and opens the node's stored state of its claims: the journal,
// the marks of their containers and their CDI specs. On an error the journal is closed.
func (p *plugin) openState(host driverroot.Host) error {
	hook, unusable, err := p.dir.InstallHook(p.cfg.CDIHook, host, p.cfg.HookDirs()...)
	if err != nil {
		return err
	}
	if unusable != nil {
		klog.Background().Error(unusable, "Claims can't be prepared on this node", "node", p.cfg.NodeName)
	} else {
		klog.Background().Info("Container runtimes start the hook program", "node", p.cfg.NodeName, "path", hook)
	}
	if p.journal, err = journal.Open(p.dir.Journal(), failpoint.FromEnvironment()); err != nil {
		return err
	}
	if p.containers, err = containers.New(p.dir.Marks(), host); err != nil {
		return errors.Join(err, p.journal.Close())
	}
	p.specs = cdi.New(cdi.Config{Dir: p.cfg.CDIDir, HookPath: hook, HookError: unusable, Host: host, DevDir: "/dev", Mark: p.containers.Mark})
	if err := p.dir.Check(p.specs); err != nil {
		return errors.Join(err, p.journal.Close())
	}
	if err := p.dir.RemoveOldHooks(hook, p.specs); err != nil {
		return errors.Join(err, p.journal.Close())
	}
	return nil
}

// start starts the parts. The context that it returns ends with ctx, or when a part can't go
// on.
func (p *plugin) start(ctx context.Context) context.Context {
	ctx, p.cancel = context.WithCancel(ctx)
	p.parts, ctx = errgroup.WithContext(ctx)
	working, cancelWork := context.WithCancelCause(ctx)
	p.cancelWork = cancelWork
	p.parts.Go(func() error {
		defer close(p.worked)
		return p.work(working)
	})
	p.parts.Go(func() error {
		if err := p.mayRegister(working); err != nil {
			return nil //nolint:nilerr // the context's end: nothing to register any more
		}
		return p.kubelet.Run(ctx)
	})
	return ctx
}

// endWork ends the parts that use the journal and the hardware, which stays as it is, for
// another plugin. It returns an error if something may use them still.
func (p *plugin) endWork(ctx context.Context) error {
	p.cancelWork(driver.ErrHandedOver)
	select {
	case <-p.worked:
	case <-ctx.Done():
		return fmt.Errorf("wait for the plugin's parts to end: %w", ctx.Err())
	}
	if p.driver.StaysOpen() {
		return errors.New("NVML isn't shut down: a call into the driver doesn't return, and could change the hardware later")
	}
	return nil
}

// end ends all parts. It returns the error of the first one that couldn't go on, or an error
// if they have not ended that long after a reset.
func (p *plugin) end() error {
	p.cancel()
	ended := make(chan error, 1)
	go func() { ended <- p.parts.Wait() }()
	p.driver.AwaitReset()
	select {
	case err := <-ended:
		return err
	case <-time.After(stopWithin):
		return fmt.Errorf("the plugin did not stop within %s and is terminated", stopWithin)
	}
}

// work runs the parts that use the journal and the hardware until ctx ends or one can't
// go on.
func (p *plugin) work(ctx context.Context) error {
	if err := p.specs.Tidy(); err != nil {
		klog.FromContext(ctx).Error(err, "Temporary files stay in the CDI directory", "node", p.cfg.NodeName)
	}
	if err := p.containers.Recover(); err != nil {
		klog.FromContext(ctx).Error(err, "Containers of claims that were being unprepared when the plugin ended may go unnoticed", "node", p.cfg.NodeName)
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context){
		p.passOnRequests, p.partitions.Run, p.sharing.Run, p.health.Run,
	} {
		group.Go(func() error { run(ctx); return nil })
	}
	for _, run := range []func(context.Context) error{p.containers.Run, p.followDriver, p.reporter.Run, p.statuses.Run, p.writeEvents} {
		group.Go(func() error { return run(ctx) })
	}
	return group.Wait()
}

func (p *plugin) writeEvents(ctx context.Context) error {
	return p.events.Run(ctx, &corev1client.EventSinkImpl{Interface: p.client.CoreV1().Events("")})
}

func (p *plugin) followDriver(ctx context.Context) error {
	p.recallGPUs(ctx)
	return p.driver.Run(ctx)
}

// mayRegister waits until the kubelet's calls can be handled. Another driver isn't waited
// for: beside a device plugin the kubelet must be able to unprepare, and prepares are
// refused (facts.MayPrepare). kubelet.Plugin waits for the end of a DRA driver of this
// name.
func (p *plugin) mayRegister(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	select {
	case <-p.driver.Looked():
		if p.facts.Trouble() != nil {
			p.driver.RecoverWithoutDriver(ctx)
		}
	case <-time.After(firstLookWithin):
		logger.Info("Registering before the hardware was looked at: the driver takes long to answer", "node", p.cfg.NodeName, "after", firstLookWithin)
	case <-ctx.Done():
		return ctx.Err()
	}
	wait := p.reporter.WaitReported
	if p.tenure.tookOver { // the plugin before has reported, and passes on calls now
		wait = p.facts.WaitNodeSeen
	}
	soon, cancel := context.WithTimeout(ctx, firstReportWithin)
	defer cancel()
	if err := wait(soon); err != nil && ctx.Err() == nil {
		logger.Info("Registering without a first report: the API server is away", "node", p.cfg.NodeName)
	}
	return ctx.Err()
}

// passOnRequests passes the requests of policies and admins in the inventory on to the parts.
func (p *plugin) passOnRequests(ctx context.Context) {
	var passedOn *v1alpha1.GPUInventory
	for {
		inv, changed := p.reporter.Inventory()
		if inv != nil && inv != passedOn {
			p.events.SetInventory(inv.UID)
			p.partitions.SetKeepWarm(inventory.KeepWarm(inv))
			p.sharing.SetTimeSlices(inventory.TimeSlices(inv))
			p.health.SawInventory(inv)
			passedOn = inv
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// ready returns nil if the kubelet has registered the plugin, if the node has no driver, or
// during the grace period if the plugin was ready before it handed over. A rollout stops at
// a plugin that isn't ready. It must not stop at a missing or broken driver, which the
// node's GPUInventory reports.
func (p *plugin) ready() error {
	if p.facts.IsRegistered() || p.facts.NoDriver() || p.tenure.wasReady && p.tenure.inGrace() {
		return nil
	}
	if known, _ := p.facts.State(); known.DRADriver != "" {
		return errors.New(known.DRADriver)
	}
	return errors.New("not registered with the kubelet yet")
}

// healthy returns an error if something is stuck.
func (p *plugin) healthy() error { return p.stuck(stuckAfter) }

// stuck returns an error if the driver's loop, or a call of the kubelet, has not
// ended for longer than after.
func (p *plugin) stuck(after time.Duration) error {
	if err := p.driver.Stuck(after); err != nil {
		return err
	}
	if age := p.kubelet.OldestCall(); age > after {
		return fmt.Errorf("a call of the kubelet has not ended for %s", age.Round(time.Second))
	}
	return nil
}

// cleanUp cleans up on the host, if nothing there is in use any more: the next
// plugin, if there is one, puts it back.
func (p *plugin) cleanUp(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	if n := len(p.journal.Claims()); n > 0 {
		logger.Info("Leaving what prepared claims need on the host", "node", p.cfg.NodeName, "claims", n)
		return nil
	}
	err := errors.Join(p.specs.RemoveCommon(), healthmonitor.ForgetHealthy(p.journal), p.journal.DeleteSeen(), journal.RemoveEmpty(p.dir.Journal()), p.dir.Clean(), p.kubelet.RemoveStaleMetadata())
	if err != nil {
		return fmt.Errorf("clean up on the host: %w", err)
	}
	// They stay if others have put something there, or if they are mounts.
	p.dir.Remove()
	_ = os.Remove(kubelet.MetadataDirectory(p.cfg.KubeletRoot, gpu.DriverName))
	_ = os.Remove(kubelet.DataDirectory(p.cfg.KubeletRoot, gpu.DriverName))
	return nil
}
