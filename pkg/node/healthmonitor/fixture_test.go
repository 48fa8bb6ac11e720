package healthmonitor_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/node/usage"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// node has two GPUs, whose driver a test controls.
type node struct {
	t       *testing.T
	dir     string
	journal *journal.Journal
	facts   *facts.Facts
	monitor *healthmonitor.Monitor
	stop    func()
	host    string // the host's root directory
	log     string // path of the kernel log
	// preparer is the plugin's; reset is how GPUs are reset, nil if they never are.
	preparer *prepare.Preparer
	reset    func() error
	logger   klog.Logger
	daemons  *nodetest.Daemons

	mu       sync.Mutex
	recovery map[gpu.UUID]gpu.RecoveryAction
	err      map[gpu.UUID]error
	hangs    map[gpu.UUID]bool
	readings map[gpu.UUID]int
	takes    time.Duration // how long each reading takes
	listed   bool          // NVML lists also GPUs that are lost
	events   []string
}

func newNode(t *testing.T) *node {
	n := &node{
		t: t, dir: t.TempDir(), host: t.TempDir(), log: filepath.Join(t.TempDir(), "kmsg"),
		recovery: map[gpu.UUID]gpu.RecoveryAction{gpu0: gpu.RecoveryNone, gpu1: gpu.RecoveryNone},
		err:      map[gpu.UUID]error{}, hangs: map[gpu.UUID]bool{}, readings: map[gpu.UUID]int{},
	}
	if err := os.WriteFile(n.log, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.daemons = nodetest.NewDaemons(n.host, "/run/mps/d")
	n.process(4711, pod)
	n.reload()
	n.open()
	n.use(pod, other)
	n.journal.Close()
	n.start()
	return n
}

// process lets a process of a pod run on the host.
func (n *node) process(pid int, p healthmonitor.Pod) {
	n.t.Helper()
	dir := filepath.Join(n.host, "proc", strconv.Itoa(pid))
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "cgroup"), []byte("0::/kubepods/pod"+p.UID+"/container\n"), 0o600)); err != nil {
		n.t.Fatal(err)
	}
}

// use makes the pods those that have a claim of gpu0.
func (n *node) use(pods ...healthmonitor.Pod) {
	n.t.Helper()
	for _, r := range n.journal.Claims() {
		if err := n.journal.Delete(r.ClaimUID); err != nil {
			n.t.Fatal(err)
		}
	}
	for _, p := range pods {
		h := holding.Holding{GPU: gpu0}
		if p.MPS {
			h.MPS = &holding.MPS{}
		}
		r := holding.Record{ClaimUID: p.UID, BootID: "boot", Namespace: p.Namespace, Name: p.Name, Holdings: []holding.Holding{h}, Pods: []holding.Pod{{UID: p.UID, Name: p.Name}}}
		if err := n.journal.Put(r); err != nil {
			n.t.Fatal(err)
		}
	}
}

// open opens the journal.
func (n *node) open() {
	n.t.Helper()
	var err error
	if n.journal, err = journal.Open(n.dir, nil); err != nil {
		n.t.Fatal(err)
	}
}

// start starts a plugin, with a driver that is there at once.
func (n *node) start() {
	n.t.Helper()
	n.startWithoutDriver()
	n.drive()
}

func (n *node) drive() {
	n.facts.Found(gpu.Node{Name: "node-0", GPUs: []gpu.GPU{{UUID: gpu0, PCI: "0000:00:06.0"}, {UUID: gpu1, PCI: "0000:00:07.0", Index: 1}}})
	n.monitor.SetHardware(&healthmonitor.Hardware{Session: n, Sys: filepath.Join(n.host, "sys"), KernelLog: n.log})
	time.Sleep(time.Second) // the first readings
}

// reload loads the driver again.
func (n *node) reload() {
	n.t.Helper()
	module := filepath.Join(n.host, "sys/module/nvidia")
	// Made before the other is removed, so that it has another inode.
	err := os.MkdirAll(module+".new", 0o755)
	if err := errors.Join(err, os.RemoveAll(module), os.Rename(module+".new", module)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) startWithoutDriver() {
	n.t.Helper()
	n.open()
	n.facts = facts.New("node-0")
	marks, err := containers.New(n.t.TempDir(), driverroot.NewHost(n.host))
	if err != nil {
		n.t.Fatal(err)
	}
	cfg := healthmonitor.Config{
		NodeName: "node-0", BootID: "boot", Journal: n.journal, Facts: n.facts, Containers: marks, Events: n,
		Sharing:  sharing.New(sharing.Config{Journal: n.journal, BootID: "boot", Daemons: n.daemons, Prepared: []string{client.UID}}),
		Readings: usage.NewReadings(n.facts, marks, false),
	}
	if n.reset != nil {
		n.preparer = prepare.New(prepare.Config{Journal: n.journal})
		cfg.Preparer = n.preparer
	}
	n.monitor = healthmonitor.New(cfg)
	n.logger = ktesting.NewLogger(n.t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	ctx, cancel := context.WithCancel(klog.NewContext(n.t.Context(), n.logger))
	var running sync.WaitGroup
	running.Go(func() { cfg.Sharing.Watch(ctx) })
	running.Go(func() { n.monitor.Run(ctx) })
	running.Go(func() { n.follow(ctx) })
	n.stop = func() {
		cancel()
		running.Wait()
		n.journal.Close()
	}
}

// follow carries out orders, as the driver's follower does.
func (n *node) follow(ctx context.Context) {
	for {
		select {
		case o := <-n.monitor.Orders():
			if !o.Take() {
				continue
			}
			if o.Reset {
				o.Done(n.reset())
			} else {
				o.Done(n.forget(o.GPU))
			}
		case <-ctx.Done():
			return
		}
	}
}

// forget removes a GPU from the facts, unless NVML lists it.
func (n *node) forget(uuid gpu.UUID) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listed {
		return errListed
	}
	n.facts.Forget(uuid)
	return nil
}

// errListed says that NVML lists a GPU.
var errListed = errors.New("NVML lists it")

// restart stops the plugin and starts it again.
func (n *node) restart() {
	n.stop()
	n.start()
}

func (n *node) Vitals(uuid gpu.UUID) (gpu.Vitals, error) {
	n.mu.Lock()
	n.readings[uuid]++
	hangs, takes := n.hangs[uuid], n.takes
	n.mu.Unlock()
	time.Sleep(takes)
	if hangs {
		time.Sleep(10 * time.Second)
		return gpu.Vitals{}, fmt.Errorf("a call: %w", nvml.ErrNotResponding)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return gpu.Vitals{Recovery: n.recovery[uuid]}, n.err[uuid]
}

// Usage of a GPU, for which nobody asks.
func (*node) Usage(gpu.UUID, time.Duration) (gpu.Usage, error) { return gpu.Usage{}, nil }

// EndUsage has nothing to end.
func (*node) EndUsage(gpu.UUID) bool { return true }

// Probe returns the GPUs that don't respond.
func (n *node) Probe() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var silent []string
	for uuid, hangs := range n.hangs {
		if hangs {
			silent = append(silent, string(uuid))
		}
	}
	return silent
}

func (n *node) WarnPod(namespace string, p holding.Pod, reason, message string) {
	n.OnNode("", p.Name+" "+reason, message)
}

func (n *node) OnNode(_, reason, message string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.events = append(n.events, reason+": "+message)
}

// setFault begins a fault of the client's MPS daemon, or ends it.
func (n *node) setFault(fails bool) {
	s := mps.State{Daemon: mps.Daemon{Name: holding.Record{ClaimUID: client.UID}.OwnDaemonName()}, PID: 1, Phase: mps.Running, ServerPID: 2}
	if fails {
		s.ServerPID, s.Trouble = 0, "it has no server"
	}
	n.daemons.SetState(s)
}

// eventsWith counts the events that contain a text.
func (n *node) eventsWith(text string) (count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range n.events {
		if strings.Contains(e, text) {
			count++
		}
	}
	return count
}

func (n *node) set(uuid gpu.UUID, action gpu.RecoveryAction, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.recovery[uuid], n.err[uuid] = action, err
}

func (n *node) xid(uuid gpu.UUID, code uint64) {
	n.monitor.SawXID(gpu.XID{GPU: uuid, Code: code, At: time.Now()})
}

// has checks the conditions of a GPU in the facts, a moment after what happened last.
func (n *node) has(uuid gpu.UUID, want ...gpu.ConditionType) {
	n.t.Helper()
	time.Sleep(50 * time.Millisecond)
	synctest.Wait()
	known, _ := n.facts.State()
	for _, g := range known.Node.GPUs {
		var have []gpu.ConditionType
		for _, c := range g.Conditions {
			have = append(have, c.Type)
		}
		if g.UUID == uuid && !slices.Equal(have, want) {
			n.t.Errorf("GPU %s has %v, want %v", uuid, have, want)
		}
	}
}

func inBubble(t *testing.T, test func(*testing.T, *node)) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		defer func() { n.stop() }()
		test(t, n)
	})
}

// list makes NVML list GPUs that are lost, or not.
func (n *node) list(lost bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listed = lost
}
