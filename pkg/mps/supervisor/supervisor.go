package supervisor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/bootid"
	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/endpoints"
	"github.com/tessera-dra/tessera/pkg/files"
	"github.com/tessera-dra/tessera/pkg/keylock"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/mps/mpspb"
	"github.com/tessera-dra/tessera/pkg/notify"
)

// Supervisor has the MPS daemons of one node.
type Supervisor struct {
	cfg    Config
	driver *driver
	boot   string
	locks  keylock.Locks[string]
	// restarts has the delays of restarts, and attention those of looks at daemons without
	// a server, by daemon.
	restarts, attention *flowcontrol.Backoff
	// tasks are the goroutines that outlive calls.
	tasks sync.WaitGroup
	// ended is closed when Run ends.
	ended  chan struct{}
	logger klog.Logger
	// groups are the cgroups for daemons, as they were found at the start.
	groups []group
	// serving is set while calls are answered.
	serving atomic.Bool
	metrics *metrics

	// mu wakes the watchers at each change that is reported.
	mu      notify.Mutex
	daemons map[string]*daemon
	// revision grows with each of these changes.
	revision mps.Revision
}

// daemon is the state of one; its supervisor's mutex guards it, and only who
// has the lock of its name changes it.
type daemon struct {
	record  mps.Record
	phase   mps.Phase
	message string
	trouble string // why its clients may not be served though it runs
	server  int    // process id of its server; 0 where none is known
	unsure  bool   // whether it has its limits: an earlier supervisor may not have set them
	unwatch context.CancelFunc
}

// reportsAs reports whether watchers see no difference between the two states.
func (d daemon) reportsAs(other daemon) bool {
	return reflect.DeepEqual(d.record, other.record) && d.phase == other.phase && d.message == other.message &&
		d.trouble == other.trouble && d.server == other.server
}

// New returns a supervisor that does nothing until Run.
func New(cfg Config) (*Supervisor, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	boot, err := bootid.Read()
	if err != nil {
		return nil, err
	}
	revision, err := firstRevision()
	if err != nil {
		return nil, err
	}
	s := &Supervisor{
		revision: revision, cfg: cfg, boot: boot,
		restarts: flowcontrol.NewBackOff(restartFirst, restartLast), attention: flowcontrol.NewBackOff(attendFirst, attendLast),
		daemons: map[string]*daemon{}, ended: make(chan struct{}),
	}
	s.driver = &driver{host: driverroot.NewHost(cfg.HostRoot), cfg: &s.cfg}
	s.metrics = newMetrics(s)
	return s, nil
}

// firstRevision is the time since the boot in nanoseconds: more than an earlier
// supervisor can have counted to. The time of day is no good, because it may be set back.
func firstRevision() (mps.Revision, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0, fmt.Errorf("read the time since the boot: %w", err)
	}
	return mps.Revision(now.Nano()), nil
}

// nextDelay returns the delay before the next restart of a daemon: none at first, then one
// that grows until the daemon has needed no restart for twice restartLast.
func (s *Supervisor) nextDelay(name string) time.Duration {
	s.restarts.GC()
	delay := s.restarts.Get(name)
	s.restarts.Next(name, s.restarts.Clock.Now())
	return delay
}

// Run adopts the daemons that are there and serves until ctx ends; it leaves the
// daemons running. It waits while another supervisor has the run directory.
func (s *Supervisor) Run(ctx context.Context) error {
	if err := checkKernel(); err != nil {
		return err
	}
	return endpoints.Serve(ctx, s.adoptAndServe, s.servers()...)
}

// adoptAndServe is Run without metrics and probes.
func (s *Supervisor) adoptAndServe(ctx context.Context) error {
	s.logger = klog.FromContext(ctx)
	defer s.tasks.Wait()
	end := sync.OnceFunc(func() { close(s.ended) })
	defer end()
	defer context.AfterFunc(ctx, end)() // before the calls have ended: some wait for it
	if err := os.MkdirAll(s.cfg.runDir().Daemons(), 0o755); err != nil {
		return fmt.Errorf("make the run directory: %w", err)
	}
	unlock, err := s.claimRunDir(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	s.report(ctx)
	if err := s.adoptAll(ctx); err != nil {
		return err
	}
	return s.serve(ctx)
}

// claimRunDir keeps a second supervisor out of the run directory. The lock is on
// the directory itself, so that no file stays behind.
func (s *Supervisor) claimRunDir(ctx context.Context) (unlock func(), err error) {
	f, err := os.Open(s.cfg.RunDir)
	if err != nil {
		return nil, fmt.Errorf("lock the run directory: %w", err)
	}
	locked := make(chan error, 1)
	go func() { locked <- unix.Flock(int(f.Fd()), unix.LOCK_EX) }()
	select {
	case err = <-locked:
	case <-ctx.Done():
		err = ctx.Err() // the process ends, and with it the wait
	}
	if err != nil {
		return nil, fmt.Errorf("lock the run directory, which another supervisor may have: %w", err)
	}
	return func() { _ = f.Close() }, nil // closing unlocks
}

// report logs the program and the cgroups that daemons would be started with.
func (s *Supervisor) report(ctx context.Context) {
	logger := klog.FromContext(ctx)
	all, err := hostGroups()
	s.groups = all
	switch {
	case err != nil:
		logger.Error(err, "MPS daemons can't leave this container's cgroup and can't be started")
	case len(all) == 0:
		logger.Info("Not in a container, MPS daemons stay in this process's cgroup")
	default:
		logger.Info("MPS daemons have cgroups of their own", "parent", all[0].parent)
	}
	p, err := s.driver.find()
	if err == nil {
		_, err = s.driver.able(ctx, p)
	}
	if err != nil {
		logger.Info("MPS daemons can't be started yet", "reason", err.Error())
	}
}

// hasGroup reports whether a daemon of the name has, or may have, processes: each has
// a cgroup, which is removed after the last of them. Where there are no cgroups for
// daemons, it can't be told.
func (s *Supervisor) hasGroup(name string) bool {
	for _, g := range s.groups {
		if _, err := os.Lstat(g.dir(name)); !errors.Is(err, os.ErrNotExist) {
			return true
		}
	}
	return len(s.groups) == 0
}

// outlive returns a context for work that continues after the call that begins it, until
// Run ends.
func (s *Supervisor) outlive(ctx context.Context) (context.Context, context.CancelFunc) {
	// Not a child of the call's: daemons that die again and again would make a
	// longer and longer chain.
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.FromContext(ctx)))
	s.tasks.Go(func() {
		select {
		case <-s.ended:
			cancel()
		case <-ctx.Done():
		}
	})
	return ctx, cancel
}

// serve answers calls until ctx ends.
func (s *Supervisor) serve(ctx context.Context) error {
	socket := s.cfg.runDir().Socket()
	if err := files.RemoveIfThere(socket); err != nil {
		return fmt.Errorf("remove the socket of an earlier supervisor: %w", err)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		return errors.Join(fmt.Errorf("protect the socket: %w", err), l.Close())
	}
	server := grpc.NewServer()
	mpspb.RegisterSupervisorServer(server, &calls{s: s})
	stop := context.AfterFunc(ctx, server.GracefulStop)
	defer stop()
	s.tasks.Go(func() { s.keepLogsShort(ctx) })
	klog.FromContext(ctx).Info("Serving", "socket", socket, "daemons", len(s.list().Daemons))
	s.serving.Store(true)
	defer s.serving.Store(false)
	if err := server.Serve(l); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serve: %w", err)
	}
	server.GracefulStop() // waits for the calls
	return nil
}

// now returns the revision.
func (s *Supervisor) now() mps.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.revision
}

// get returns the daemon of a name.
func (s *Supervisor) get(name string) (daemon, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, ok := s.daemons[name]
	if !ok {
		return daemon{}, false
	}
	return *d, true
}

// set changes the state of a daemon, and notifies the watchers if they see a difference.
func (s *Supervisor) set(name string, change func(*daemon)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, known := s.daemons[name]
	if !known {
		d = &daemon{unwatch: func() {}}
		s.daemons[name] = d
	}
	before := *d
	if change(d); !known || !d.reportsAs(before) {
		s.tell()
	}
}

// forget drops the daemon, and notifies the watchers.
func (s *Supervisor) forget(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := s.daemons[name]; d != nil {
		d.unwatch()
		s.restarts.Reset(name)
		s.attention.Reset(name)
		delete(s.daemons, name)
		s.tell()
	}
}

// tell notifies the watchers of a change. Needs the lock.
func (s *Supervisor) tell() {
	s.revision++
	s.mu.Wake()
}

// list returns all daemons.
func (s *Supervisor) list() mps.Report {
	report, _ := s.watch()
	return report
}

// watch returns all daemons, and a channel that is closed at the next change.
func (s *Supervisor) watch() (mps.Report, <-chan struct{}) {
	s.mu.Lock()
	changed, report := s.mu.Changed(), mps.Report{Revision: s.revision}
	all := make(map[string]daemon, len(s.daemons))
	for name, d := range s.daemons {
		all[name] = *d
	}
	s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		report.Daemons = append(report.Daemons, s.state(all[name], report.Revision))
	}
	return report, changed
}

// stateOf returns the state of the daemon of a name.
func (s *Supervisor) stateOf(name string) mps.State {
	s.mu.Lock()
	var d daemon
	if s.daemons[name] != nil {
		d = *s.daemons[name]
	}
	revision := s.revision
	s.mu.Unlock()
	return s.state(d, revision)
}

func (s *Supervisor) state(d daemon, revision mps.Revision) mps.State {
	at := s.cfg.place(d.record.Daemon.Name)
	state := mps.State{
		Daemon: d.record.Daemon, Revision: revision, PID: d.record.PID, PipeDir: at.clients(),
		Phase: d.phase, Message: d.message, Restarts: d.record.Restarts,
		ServerPID: d.server, Trouble: d.trouble,
	}
	if s.driver.sharesMemory() || !isEmpty(at.shm()) {
		state.ShmDir = at.shm()
	}
	return state
}

func isEmpty(dir string) bool {
	entries, err := os.ReadDir(dir)
	return err != nil || len(entries) == 0
}

// adoptAll adopts the daemons in the run directory. A daemon that can't be adopted as
// it is, is restarted or stopped in the background.
func (s *Supervisor) adoptAll(ctx context.Context) error {
	entries, err := os.ReadDir(s.cfg.runDir().Daemons())
	if err != nil {
		return fmt.Errorf("list the run directory: %w", err)
	}
	var each sync.WaitGroup
	for _, e := range entries {
		if !e.IsDir() || strings.HasSuffix(e.Name(), asideSuffix) {
			continue
		}
		each.Go(func() { s.adopt(ctx, e.Name()) })
	}
	each.Wait()
	return nil
}
