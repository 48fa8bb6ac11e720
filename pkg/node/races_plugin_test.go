package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
)

// process is one run of the plugin. All of its goroutines pass through pause when they
// call something outside of it, and at each of its steps; there they stop for good once it
// is dead.
type process struct {
	*hardwareParts
	w      *world
	bootID string
	ctx    context.Context //nolint:containedctx // of the process
	cancel context.CancelFunc
	dead   chan struct{}
	specs  *cdi.Specs
	dir    *datadir.Dir
	// session with the GPUs.
	session *nvml.Session
	// running are its loops and the kubelet's calls.
	running sync.WaitGroup
	// serving is closed when the kubelet may call.
	serving chan struct{}

	mu sync.Mutex
	// ending: an operation ends the process.
	ending bool
	// closers are the files that the kernel closes when the process ends.
	closers []io.Closer
}

// kill ends the process as SIGKILL does: its goroutines stop where they are.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.dead)
	for _, c := range p.closers {
		if err := c.Close(); err != nil {
			p.w.broken("a file can't be closed", "%v", err)
		}
	}
}

// closeAtEnd closes something when the process ends, as the kernel does.
func (p *process) closeAtEnd(c io.Closer) {
	p.mu.Lock()
	if !p.isDead() {
		p.closers = append(p.closers, c)
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	_ = c.Close()
	p.live()
}

func (p *process) isDead() bool {
	select {
	case <-p.dead:
		return true
	default:
		return false
	}
}

// markEnding reports whether no other operation ends the process.
func (p *process) markEnding() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := !p.ending
	p.ending = true
	return first
}

func (p *process) isServing() bool {
	select {
	case <-p.serving:
		return !p.isDead()
	default:
		return false
	}
}

// newProcess returns a process that has not started.
func (w *world) newProcess() *process {
	p := &process{hardwareParts: &hardwareParts{}, w: w, bootID: w.c.bootID(), dead: make(chan struct{}), serving: make(chan struct{})}
	p.ctx, p.cancel = context.WithCancel(klog.NewContext(context.Background(), klog.Logger{}))
	return p
}

// start does the steps of a start of the plugin up to its registration.
func (p *process) start() error {
	p.pause("start", callMost)
	c := p.w.c
	var err error
	if p.dir, err = datadir.Lock(p.ctx, c.data()); err != nil {
		return err
	}
	p.closeAtEnd(p.dir)
	hook, _, err := p.dir.InstallHook("/bin/true", c.host)
	if err != nil {
		return err
	}
	if p.journal, err = journal.Open(p.dir.Journal(), failpoint.Call(p.step)); err != nil {
		return err
	}
	p.closeAtEnd(p.journal)
	if n := len(p.journal.Claims().Unreadable()) + len(p.journal.UnreadableGPUs()) + len(p.journal.UnreadableSettings()); n > 0 {
		p.w.broken("a record can't be read", "%d records", n)
	}
	// Run, which waits in the kernel, would keep time from passing in the bubble.
	marks, err := containers.New(p.dir.Marks(), c.host)
	if err != nil {
		return err
	}
	p.specs = cdi.New(cdi.Config{Dir: c.cdi(), HookPath: hook, Host: c.host, Mark: marks.Mark})
	if err := errors.Join(p.dir.Check(p.specs), p.specs.Tidy(), marks.Recover()); err != nil {
		return err
	}
	if err := p.wire(marks); err != nil {
		return err
	}
	p.running.Go(func() { p.partitions.Run(p.ctx) })
	p.running.Go(func() { p.sharing.Run(p.ctx) })
	p.parts().Recover(p.ctx)
	p.running.Go(p.mend)
	p.pause("policy", callMost)
	p.setPolicy(p.w.policyNow())
	close(p.serving)
	return nil
}

// wire builds the parts and gives them the hardware, as soon as that answers.
func (p *process) wire(marks *containers.Containers) error {
	c, known := p.w.c, facts.New("node-0")
	session, gpus := p.read()
	p.session = session.Session // nothing closes it: a call may be under way when the process is killed
	version, err := session.Driver()
	if err != nil {
		return err
	}
	known.Found(gpu.Node{Name: "node-0", GPUs: gpus})
	known.SawNode(true, "")
	p.partitions = partition.New(partition.Config{Journal: p.journal, Specs: p.specs, Facts: known, BootID: p.bootID, Steps: failpoint.Call(p.step)})
	prepared, err := p.specs.Claims()
	if err != nil {
		return err
	}
	p.sharing = sharing.New(sharing.Config{
		Journal: p.journal, BootID: p.bootID, Prepared: prepared, Daemons: daemons{p}, ExclusiveProcess: true, Steps: failpoint.Call(p.step),
	})
	writers, err := newWriters(known)
	if err != nil {
		return err
	}
	p.running.Go(func() { writers.run(p.ctx) })
	server := claimReader(p.readClaim)
	p.preparer = prepare.New(prepare.Config{
		Journal: p.journal, Facts: known, Containers: marks, Partitions: p.partitions, Sharing: p.sharing, Specs: p.specs,
		Events: writers.events, Statuses: writers.statuses, Reporter: writers.reporter, Cluster: server, Version: server,
		Driver: gpu.DriverName, Pool: "node-0", BootID: p.bootID, Steps: failpoint.Call(p.step),
	})
	p.partitions.SetHardware(hardware{session.Session, p})
	p.sharing.SetHardware(hardware{session.Session, p}, p.smi)
	return p.specs.SetDriver(&cdi.Driver{
		Version: version.Version, Root: c.root.Path, DevRoot: c.root.DevRoot, ProcRoot: c.root.ProcRoot, GPUs: gpus, Session: session.Session,
	})
}

// read reads the GPUs until all answer.
func (p *process) read() (*nvmltest.Simulated, []gpu.GPU) {
	for {
		session, err := nvmltest.OpenSimulatedBy(nvml.NewOpener(), p.w.c.machine)
		if err == nil {
			gpus, err := session.GPUs()
			sick := func(g gpu.GPU) bool { return len(g.Conditions) > 0 }
			if err == nil && len(gpus) == len(installed.Machine.GPUs) && !slices.ContainsFunc(gpus, sick) {
				return session, asWithoutMIG(gpus)
			}
			_ = session.Close()
		}
		p.pause("read again", time.Second)
	}
}

// asWithoutMIG returns the GPUs as the plugin reports them: MIG modes that it has switched
// don't show.
func asWithoutMIG(gpus []gpu.GPU) []gpu.GPU {
	for i := range gpus {
		mig := *gpus[i].MIG
		mig.Enabled, mig.Pending, mig.Switchable, mig.Instances = false, false, true, nil
		gpus[i].MIG = &mig
	}
	return gpus
}

// mend restores prepared claims once a minute, as after each reading of the hardware. A
// partition has to be missing twice in a row.
func (p *process) mend() {
	before := map[gpu.Partition]bool{}
	for {
		select {
		case <-time.After(time.Minute):
		case <-p.ctx.Done():
			return
		}
		migs := map[gpu.UUID]gpu.MIG{}
		for _, g := range installed.Machine.GPUs {
			if mig, err := (hardware{p.session, p}).MIG(gpu.UUID(g.UUID)); err == nil {
				migs[gpu.UUID(g.UUID)] = mig
			}
		}
		lacking := map[gpu.Partition]bool{}
		_ = p.preparer.Mend(p.ctx, func(d gpu.Partition) bool {
			mig, ok := migs[d.GPU]
			lacking[d] = ok && !slices.ContainsFunc(mig.Instances, func(i gpu.Instance) bool {
				return i.UUID != "" && i.Profile == d.Profile && i.Placement == d.Placement
			})
			return lacking[d] && before[d]
		})
		before = maps.Clone(lacking)
	}
}

// end ends the process as SIGTERM does: calls of the kubelet are interrupted, and without
// prepared claims the host is left as it was.
func (p *process) end() {
	p.cancel()
	ended := make(chan struct{})
	go func() {
		p.parts().Restore(context.WithoutCancel(p.ctx))
		p.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(stopWithin):
	}
	p.live()
	if len(p.journal.Claims()) == 0 {
		err := errors.Join(p.specs.RemoveCommon(), journal.RemoveEmpty(p.dir.Journal()), p.dir.Clean())
		if err != nil {
			p.w.broken("the host can't be cleaned up", "%v", err)
		}
		p.dir.Remove()
	}
	p.kill()
}

// policy has the settings of SharingPolicies for the node.
type policy struct {
	keepWarm map[gpu.UUID]time.Duration
	slices   map[gpu.UUID]string
}

// policyOf returns the n-th of eight policies; number 0 is that there is none.
func policyOf(n int) policy {
	all := policy{keepWarm: map[gpu.UUID]time.Duration{}, slices: map[gpu.UUID]string{}}
	for i, g := range installed.Machine.GPUs {
		if n&1 != 0 {
			all.keepWarm[gpu.UUID(g.UUID)] = []time.Duration{3 * time.Second, time.Hour}[i]
		}
		if n&2 != 0 {
			all.slices[gpu.UUID(g.UUID)] = []string{"Long", "Short"}[i]
		}
		if n&4 != 0 && i == 1 {
			all.slices[gpu.UUID(g.UUID)] = "Medium"
		}
	}
	return all
}

func (p *process) setPolicy(to policy) {
	p.partitions.SetKeepWarm(to.keepWarm)
	p.sharing.SetTimeSlices(to.slices)
}

// prepare is the kubelet's call for claims of one pod: the plugin's gRPC server announces
// it, reads the claims from the API server, and prepares them at the same time.
func (p *process) prepare(ctx context.Context, claims []*modelClaim) []error {
	var uids []types.UID
	for _, s := range claims {
		uids = append(uids, s.claim.UID)
	}
	ctx, done := p.preparer.Begin(ctx, uids...)
	defer done()
	return each(claims, func(s *modelClaim) error {
		p.pause("read "+s.claim.Name, 10*callMost)
		if p.w.isServerAway() {
			return errServerAway
		}
		_, err := p.preparer.Prepare(ctx, s.claim)
		return err
	})
}

func (p *process) unprepare(ctx context.Context, claims []*modelClaim) []error {
	return each(claims, func(s *modelClaim) error {
		return p.preparer.Unprepare(ctx, kubeletplugin.NamespacedObject{
			NamespacedName: types.NamespacedName{Namespace: s.claim.Namespace, Name: s.claim.Name}, UID: s.claim.UID,
		})
	})
}

// each calls f for all claims at the same time.
func each(claims []*modelClaim, f func(*modelClaim) error) []error {
	errs := make([]error, len(claims))
	var wg sync.WaitGroup
	for i, s := range claims {
		wg.Go(func() { errs[i] = f(s) })
	}
	wg.Wait()
	return errs
}

var errServerAway = errors.New("the API server doesn't answer")

// errNotServed is the kubelet's error while no plugin runs.
var errNotServed = errors.New("the plugin doesn't run")

// errUnanswered says that the call had no answer: it was cancelled, or the plugin ended.
var errUnanswered = errors.New("no answer")

// serve makes a call of the kubelet for claims. It returns when the call is answered or
// cancelled, or the plugin has died; the plugin may go on with it.
func (p *process) serve(ctx context.Context, claims []*modelClaim, call func(context.Context, []*modelClaim) []error) []error {
	all := func(err error) []error { return slices.Repeat([]error{err}, len(claims)) }
	if !p.isServing() || p.ctx.Err() != nil {
		return all(errNotServed)
	}
	ctx, cancel := context.WithCancel(klog.NewContext(ctx, klog.Logger{}))
	stop := context.AfterFunc(p.ctx, cancel)
	answered := make(chan []error, 1)
	p.running.Go(func() {
		defer stop()
		defer cancel()
		answered <- call(ctx, claims)
	})
	select {
	case errs := <-answered:
		return errs
	case <-p.dead:
	case <-ctx.Done():
	}
	select {
	case errs := <-answered: // both were possible
		return errs
	default:
		return all(fmt.Errorf("%w: %w", errUnanswered, context.Cause(ctx)))
	}
}
