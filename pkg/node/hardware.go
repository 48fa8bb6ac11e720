package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/report"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

const (
	// retryDriver is how often a driver that isn't there, or doesn't work, is
	// looked for.
	retryDriver = 5 * time.Second
	// rereadEvery is how often the facts are read without any sign of change.
	rereadEvery = time.Minute
	// burstPause is how long signs of change are gathered: they come in bursts.
	burstPause = 100 * time.Millisecond
	// calm is how long changes of MIG instances are gathered.
	calm = 2 * time.Second
	// leaveWithin bounds what is done to the hardware when the plugin ends.
	leaveWithin = 20 * time.Second
	// probeEvery is the pause between two looks for GPUs that don't respond.
	probeEvery = 5 * time.Second
	// recoverWithin is how long the kubelet waits for the recovery of the hardware:
	// it must be able to unprepare while a GPU keeps that from ending.
	recoverWithin = 15 * time.Second
)

// hardware keeps the other parts' knowledge of the driver and the GPUs up to
// date.
type hardware struct {
	nodeName   string
	driverRoot string // empty: found
	host       driverroot.Host
	specs      *cdi.Specs
	facts      *facts.Facts
	partitions *partition.Manager
	sharing    *sharing.Manager
	// conditions known from elsewhere, by GPU.
	conditions func() map[gpu.UUID][]gpu.Condition
	// arrived is called when a driver that works has come, or has been
	// replaced by another version.
	arrived func(context.Context)
	// held returns the GPUs that the journal names.
	held func() []gpu.UUID
	// reread is called after each later reading, with the full inventory.
	reread func(context.Context, gpu.Node)
	// leaving is called before the driver is let go of because the plugin ends.
	leaving func(context.Context)
	// wake asks for the facts to be read again.
	wake chan struct{}
	// hostChanged says that there may be other files on the host than before,
	// so that the facts of the GPUs aren't all that is to be looked at.
	hostChanged atomic.Bool
	// calming: the facts will be read in a while, see soon.
	calming atomic.Bool
	// first is closed when the driver has been looked for once.
	first chan struct{}
	// alive is beaten at each step of the loop.
	alive heartbeat
	// modules loads the driver's kernel modules.
	modules modules
	// cdiFailed says why the CDI specifications aren't as they should be; nil if
	// they are.
	cdiFailed error

	// switching is held while numbers of device nodes are passed on.
	switching sync.Mutex
	// switched is how often a MIG mode was switched.
	switched int
	session  *nvml.Session // nil: none

	// loaded is the NVML library that this process has loaded, if any: what go-nvml
	// calls stays bound to the first one.
	loaded string

	// opener opens the NVML sessions.
	opener *nvml.Opener

	said string // the last trouble that was logged
}

// Wake requests that the facts and the host's files of the driver are read
// again soon.
func (h *hardware) Wake() {
	h.hostChanged.Store(true)
	h.wakeForGPUs()
}

// wakeForGPUs asks for the facts of the GPUs to be read again soon.
func (h *hardware) wakeForGPUs() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// soon asks for the facts of the GPUs to be read again in a while, once for all
// who ask meanwhile: making a partition for a claim is worth some events, and
// changes nothing in the facts.
func (h *hardware) soon() {
	if h.calming.CompareAndSwap(false, true) {
		time.AfterFunc(calm, func() {
			h.calming.Store(false)
			h.wakeForGPUs()
		})
	}
}

// errOtherLibrary says that only a new process can go on.
var errOtherLibrary = errors.New("the plugin must be restarted to load the library of another driver")

// Run looks for the driver, follows it as long as it works, and starts again,
// until ctx ends; then it returns nil. It returns an error when the driver was
// replaced by one whose library this process can't load.
func (h *hardware) Run(ctx context.Context) error {
	looked := sync.OnceFunc(func() { close(h.first) })
	for ctx.Err() == nil {
		err := h.follow(ctx, looked)
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, errOtherLibrary) {
			return err
		}
		h.lose(ctx, err)
		looked()
		h.pause(ctx, retryDriver)
	}
	return nil //nolint:nilerr // the context's end is how it is told to stop
}

// lose notifies all parts that there is no driver now.
func (h *hardware) lose(ctx context.Context, err error) {
	reason := facts.ReasonNVMLError
	if notFound := (*driverroot.NotFoundError)(nil); errors.As(err, &notFound) {
		reason = facts.ReasonDriverNotFound
	}
	if h.said != err.Error() {
		klog.FromContext(ctx).Info("No working NVIDIA driver, waiting for one", "reason", reason, "err", err)
		h.said = err.Error()
	}
	h.facts.Missing(reason, err.Error())
	_ = h.specs.SetDriver(nil) // nil never fails
}

// follow opens the driver and reads it again and again; it returns why that
// can't go on. found is called after the first reading.
func (h *hardware) follow(ctx context.Context, found func()) error {
	root, err := driverroot.Find(h.host, h.driverRoot)
	if err != nil {
		return err
	}
	session, err := h.open(root)
	if err != nil {
		return err
	}
	defer h.close(ctx, session)
	defer func() { _ = h.specs.SetDriver(nil) }() // it must not use a closed session
	defer h.setSession(nil)
	h.setSession(session)
	node, err := h.read(ctx, root, session, h.specs.SetDriver)
	if err != nil {
		return err
	}
	h.partitions.SetHardware(session)
	defer h.partitions.SetHardware(nil) // after what is under way; nor must this
	h.sharing.SetHardware(session, nvidiaSMI(h.host, root))
	defer h.sharing.SetHardware(nil, nil)
	defer h.leave(ctx)
	klog.FromContext(ctx).Info("Found the NVIDIA driver", "node", h.nodeName, "driverRoot", root.Path, "devRoot", root.DevRoot,
		"library", root.Library, "driver", node.DriverVersion, "gpus", len(node.GPUs))
	h.said = ""
	recovered := h.recover(ctx)
	defer func() { <-recovered }()
	found()

	ctx, cancel := context.WithCancel(ctx)
	probes := h.watchSilence(ctx, session)
	defer func() { cancel(); <-probes }()
	events := h.watchEvents(ctx, session)
	defer func() { cancel(); <-events }()
	nodes := h.watchNodes(ctx, root)
	defer func() { <-nodes }()
	defer cancel()
	return h.keepReading(ctx, root, session, node.DriverVersion)
}

// close ends a session. A session that can't be ended now ends with the
// process.
func (h *hardware) close(ctx context.Context, session *nvml.Session) {
	if err := session.Close(); err != nil {
		klog.FromContext(ctx).Error(err, "NVML isn't shut down", "node", h.nodeName)
	}
}

// recover starts to make the hardware agree with the journal. It returns when that
// is done, or after recoverWithin. The channel is closed when it is done.
func (h *hardware) recover(ctx context.Context) (done <-chan struct{}) {
	recovered := make(chan struct{})
	go func() {
		defer close(recovered)
		h.arrived(ctx)
	}()
	select {
	case <-recovered:
	case <-time.After(recoverWithin):
		klog.FromContext(ctx).Info("Recovering the GPUs takes long, going on meanwhile", "node", h.nodeName, "after", recoverWithin)
	case <-ctx.Done():
	}
	return recovered
}

// leave restores the hardware if ctx has ended.
func (h *hardware) leave(ctx context.Context) {
	if ctx.Err() == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin)
	defer cancel()
	h.leaving(ctx)
}

func (h *hardware) open(root driverroot.Root) (*nvml.Session, error) {
	if h.loaded != "" && h.loaded != root.Library {
		return nil, fmt.Errorf("%w: it was %s, now it is %s", errOtherLibrary, h.loaded, root.Library)
	}
	session, err := h.opener.Open(h.host.Path(root.Library))
	if !errors.Is(err, nvml.ErrLibraryNotFound) {
		h.loaded = root.Library
	}
	if err != nil {
		return nil, fmt.Errorf("the driver at %s doesn't answer: %w", root.Path, err)
	}
	return session, nil
}

// keepReading reads the facts when something may have changed, and from time
// to time.
func (h *hardware) keepReading(ctx context.Context, root driverroot.Root, session *nvml.Session, version string) error {
	for {
		woken := h.pause(ctx, h.rereadAfter())
		if ctx.Err() != nil {
			return ctx.Err()
		}
		set := h.specs.UpdateDriver
		if h.hostChanged.Swap(false) || !woken || h.cdiFailed != nil {
			set = h.specs.SetDriver
		}
		now, err := driverroot.Find(h.host, h.driverRoot)
		if err != nil {
			return err
		}
		if !sameRoot(root, now) {
			return fmt.Errorf("the driver has moved from %s to %s", root.Library, now.Library)
		}
		node, err := h.read(ctx, root, session, set)
		if err != nil {
			return err
		}
		if node.DriverVersion != version {
			return fmt.Errorf("the driver was updated from %s to %s", version, node.DriverVersion)
		}
		h.reread(ctx, node)
	}
}

func sameRoot(a, b driverroot.Root) bool {
	return a.Path == b.Path && a.DevRoot == b.DevRoot && a.ProcRoot == b.ProcRoot && a.Library == b.Library && slices.Equal(a.LibraryDirs, b.LibraryDirs)
}

// rereadAfter returns after what time the facts are read again if no event comes
// first: a short time while something is being retried.
func (h *hardware) rereadAfter() time.Duration {
	if h.cdiFailed != nil || h.modules.missing {
		return retryDriver
	}
	return rereadEvery
}

// read reads the facts, stores them without the partitions that are created for
// claims, and returns them with these. The error is about the driver as a whole.
func (h *hardware) read(ctx context.Context, root driverroot.Root, session *nvml.Session, set func(*cdi.Driver) error) (there gpu.Node, _ error) {
	dirs := report.Dirs{
		Sys: h.host.Path(filepath.Join(root.SysRoot, "sys")),
		Dev: h.host.Path(filepath.Join(root.DevRoot, "dev")),
	}
	h.modules.load(ctx, h.host, root, dirs.Dev)
	before := h.remember(session)
	for {
		switched := h.switches()
		node, err := h.partitions.Read(before, func() (_ gpu.Node, err error) {
			there, err = report.Read(h.nodeName, session, dirs)
			return there, err
		})
		if err != nil {
			return gpu.Node{}, fmt.Errorf("read the GPUs of node %s: %w", h.nodeName, err)
		}
		if !h.setDriver(ctx, switched, there, root, session, set) {
			continue // the facts are out of date
		}
		return there, h.facts.Found(h.withConditions(node))
	}
}

// remember tells the session which GPUs the machine has had, and returns those
// that it has had since it started.
func (h *hardware) remember(session *nvml.Session) []gpu.GPU {
	has, hadBefore := h.facts.Remembered()
	session.Remember(has, false)
	for _, uuid := range h.held() {
		i := slices.IndexFunc(hadBefore, func(g gpu.GPU) bool { return g.UUID == uuid })
		g := gpu.GPU{UUID: uuid, Index: -1, Minor: -1}
		if i >= 0 {
			g = hadBefore[i]
		}
		session.Remember([]gpu.GPU{g}, false)
	}
	session.Remember(hadBefore, true)
	return has
}

// withConditions adds the conditions that other parts know of.
func (h *hardware) withConditions(node gpu.Node) gpu.Node {
	known := h.conditions()
	for i, g := range node.GPUs {
		node.GPUs[i].Conditions = slices.Concat(g.Conditions, known[g.UUID])
		if h.cdiFailed != nil {
			node.GPUs[i].Conditions = append(node.GPUs[i].Conditions, gpu.Condition{Type: gpu.CDIFailed, Message: h.cdiFailed.Error()})
		}
	}
	return node
}

// setDriver computes container edits from the facts; false where a MIG mode was
// switched since then: device nodes may have other numbers now.
func (h *hardware) setDriver(ctx context.Context, switched int, there gpu.Node, root driverroot.Root, session *nvml.Session, set func(*cdi.Driver) error) bool {
	h.switching.Lock()
	defer h.switching.Unlock()
	if h.switched != switched {
		return false
	}
	err := set(&cdi.Driver{
		Version: there.DriverVersion, Root: root.Path, DevRoot: root.DevRoot, ProcRoot: root.ProcRoot,
		LibraryDirs: root.LibraryDirs, GPUs: there.GPUs, Session: session,
	})
	if err != nil && (h.cdiFailed == nil || h.cdiFailed.Error() != err.Error()) {
		klog.FromContext(ctx).Error(err, "Restoring CDI specifications failed, retrying", "node", h.nodeName)
	}
	h.cdiFailed = err
	return true
}

func (h *hardware) switches() int {
	h.switching.Lock()
	defer h.switching.Unlock()
	return h.switched
}

func (h *hardware) setSession(s *nvml.Session) {
	h.switching.Lock()
	defer h.switching.Unlock()
	h.session = s
}

// modeSwitched is called after a GPU's MIG mode was switched, before anything
// else is done with the GPU: its device node may have another number now.
func (h *hardware) modeSwitched(uuid gpu.UUID) error {
	h.switching.Lock()
	defer h.switching.Unlock()
	h.switched++
	if h.session == nil {
		return cdi.ErrNoDriver
	}
	minor, err := h.session.Minor(uuid)
	if err != nil {
		return err
	}
	return h.specs.SetMinor(uuid, minor)
}

// pause waits for a sign of change, the time, or the end of ctx.
func (h *hardware) pause(ctx context.Context, d time.Duration) (woken bool) {
	h.alive.beat()
	defer h.alive.beat()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return false
	case <-ctx.Done():
		return false
	case <-h.wake:
		select {
		case <-time.After(burstPause):
		case <-ctx.Done():
		}
		return true
	}
}

// watchEvents wakes at each event of the GPUs. The channel is closed when the
// session isn't used any more.
func (h *hardware) watchEvents(ctx context.Context, session *nvml.Session) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		pause := retryDriver // after an error; each wakes a reading, so the pause grows
		for ctx.Err() == nil {
			event, err := session.WaitEvent(ctx)
			switch {
			case ctx.Err() != nil:
				return
			case errors.Is(err, nvml.ErrNotSupported):
				klog.FromContext(ctx).V(2).Info("GPUs have no events to watch, facts are read from time to time", "node", h.nodeName, "err", err)
				return
			case err != nil: // such as a GPU that is lost
				klog.FromContext(ctx).V(2).Info("Waiting for GPU events", "node", h.nodeName, "err", err)
				select {
				case <-time.After(pause):
				case <-ctx.Done():
				}
				pause = min(2*pause, rereadEvery)
			case event.Xid == 0:
				pause = retryDriver
				h.soon()
				continue
			default:
				pause = retryDriver
				klog.FromContext(ctx).Info("GPU reports an Xid", "gpu", event.GPU, "xid", event.Xid)
			}
			h.wakeForGPUs()
		}
	}()
	return done
}

// watchSilence wakes the loop when a GPU stops responding, and when it responds
// again.
func (h *hardware) watchSilence(ctx context.Context, session *nvml.Session) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		var before []string
		for {
			select {
			case <-time.After(probeEvery):
			case <-ctx.Done():
				return
			}
			silent := session.Probe()
			if slices.Equal(silent, before) {
				continue
			}
			klog.FromContext(ctx).Info("The set of GPUs that don't respond has changed", "node", h.nodeName, "gpus", silent, "before", before)
			before = silent
			h.wakeForGPUs()
		}
	}()
	return done
}

// watchNodes wakes when device nodes appear and disappear.
func (h *hardware) watchNodes(ctx context.Context, root driverroot.Root) <-chan struct{} {
	done := make(chan struct{})
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		err = watcher.Add(h.host.Path(filepath.Join(root.DevRoot, "dev")))
	}
	if err != nil {
		klog.FromContext(ctx).Info("Device nodes are not watched, only looked at from time to time", "node", h.nodeName, "err", err)
		if watcher != nil {
			watcher.Close()
		}
		close(done)
		return done
	}
	go func() {
		defer close(done)
		defer watcher.Close()
		for {
			select {
			case <-ctx.Done():
				return
			case err := <-watcher.Errors:
				klog.FromContext(ctx).Info("Changes of device nodes may have been missed, reading them again", "err", err)
				h.Wake()
			case event := <-watcher.Events:
				if strings.HasPrefix(filepath.Base(event.Name), "nvidia") && event.Op&(fsnotify.Create|fsnotify.Remove|fsnotify.Rename) != 0 {
					h.Wake()
				}
			}
		}
	}()
	return done
}
