package healthmonitor_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/journal"
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
	load    string
	holders []healthmonitor.Pod
	log     string // path of the kernel log
	resets  healthmonitor.Resetter
	logger  klog.Logger

	mu       sync.Mutex
	recovery map[gpu.UUID]gpu.RecoveryAction
	err      map[gpu.UUID]error
	hangs    map[gpu.UUID]bool
	readings map[gpu.UUID]int
	takes    time.Duration // how long each reading takes
	events   []string
	faults   []health.DaemonFault
}

func newNode(t *testing.T) *node {
	n := &node{
		t: t, dir: t.TempDir(), load: "load-1", log: filepath.Join(t.TempDir(), "kmsg"),
		holders:  []healthmonitor.Pod{pod, other},
		recovery: map[gpu.UUID]gpu.RecoveryAction{gpu0: gpu.RecoveryNone, gpu1: gpu.RecoveryNone},
		err:      map[gpu.UUID]error{}, hangs: map[gpu.UUID]bool{}, readings: map[gpu.UUID]int{},
	}
	if err := os.WriteFile(n.log, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.start()
	return n
}

// start starts a plugin, with a driver that is there at once.
func (n *node) start() {
	n.t.Helper()
	n.startWithoutDriver()
	n.drive()
}

func (n *node) drive() {
	n.facts.Found(gpu.Node{Name: "node-0", GPUs: []gpu.GPU{{UUID: gpu0}, {UUID: gpu1, Index: 1}}})
	n.monitor.SetHardware(&healthmonitor.Hardware{Session: n, Load: n.loaded, KernelLog: n.log})
	time.Sleep(time.Second) // the first readings
}

// loaded is which load of the driver there is, reload another one.
func (n *node) loaded() health.Load {
	n.mu.Lock()
	defer n.mu.Unlock()
	return health.Load{Boot: "boot", Driver: n.load}
}

func (n *node) reload(load string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.load = load
}

func (n *node) startWithoutDriver() {
	n.t.Helper()
	j, err := journal.Open(n.dir, nil)
	if err != nil {
		n.t.Fatal(err)
	}
	n.journal, n.facts = j, facts.New("node-0")
	var unreadable []gpu.UUID
	for _, u := range j.UnreadableHealth() {
		unreadable = append(unreadable, u.GPU)
	}
	n.monitor = healthmonitor.New(healthmonitor.Config{
		NodeName: "node-0", Journal: j, Unreadable: unreadable, Facts: n.facts, Events: n, Resetter: n.resets,
		Holders: func(gpu.XID) []healthmonitor.Pod { return n.holders },
		PodOf: func(pid int) (healthmonitor.Pod, bool) {
			if pid != 4711 {
				return healthmonitor.Pod{}, false
			}
			return healthmonitor.Pod{UID: pod.UID}, true
		},
		DaemonFaults: n.daemonFaults,
		Address: func(uuid gpu.UUID) gpu.PCIAddress {
			return map[gpu.UUID]gpu.PCIAddress{gpu0: "0000:00:06.0", gpu1: "0000:00:07.0"}[uuid]
		},
	})
	n.logger = ktesting.NewLogger(n.t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	ctx, cancel := context.WithCancel(klog.NewContext(n.t.Context(), n.logger))
	var running sync.WaitGroup
	running.Go(func() { n.monitor.Run(ctx) })
	n.stop = func() {
		cancel()
		running.Wait()
		j.Close()
	}
}

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

func (n *node) OnPod(p healthmonitor.Pod, reason, message string) {
	n.OnNode("", p.Name+" "+reason, message)
}

func (n *node) OnNode(_, reason, message string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.events = append(n.events, reason+": "+message)
}

func (n *node) daemonFaults(uuid gpu.UUID) ([]health.DaemonFault, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if uuid != gpu0 {
		return nil, true
	}
	return n.faults, true
}

// setFault begins a fault of gpu0's MPS daemon now, or ends it.
func (n *node) setFault(fails bool) {
	n.mu.Lock()
	n.faults = nil
	if fails {
		n.faults = []health.DaemonFault{{Since: time.Now(), Message: "MPS daemon a has ended"}}
	}
	n.mu.Unlock()
	n.monitor.SawEvent("")
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
