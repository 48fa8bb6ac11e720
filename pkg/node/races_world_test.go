package node

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// world is a node while a history is played, in a bubble of testing/synctest.
type world struct {
	c      *computer
	seed   uint64
	began  time.Time
	sup    *supervisor
	pods   *pods
	claims []*modelClaim
	gpus   []gpu.GPU
	// over is closed in the end.
	over chan struct{}

	mu sync.Mutex
	// plugin is the last process.
	plugin *process
	// paces counts the paces of each key.
	paces map[string]uint64
	to    policy
	// serverAway is until when the API server is away.
	serverAway time.Time
	rule       string // the first rule that was broken
	trace      []string
	// outcomes counts the kubelet's calls.
	outcomes map[string]int
}

// play plays a history, and returns the first rule that was broken, empty if none was, and
// a trace. It counts the outcomes of the kubelet's calls.
func play(c *computer, h history, outcomes map[string]int) (broken string, trace []string) {
	w := &world{c: c, outcomes: outcomes, seed: h.Pace, began: time.Now(), over: make(chan struct{}), paces: map[string]uint64{}, to: policyOf(0)}
	run := filepath.Join("/run/mps", "races")
	w.sup = &supervisor{
		c: c, dir: filepath.Join(run, "d"), pace: w.pace, all: map[string]mps.State{}, watchers: map[chan struct{}]bool{}, revision: 1, pids: 100_000,
		wrong: func(format string, args ...any) {
			w.broken("the supervisor is asked for what must not be", format, args...)
		},
	}
	w.pods = &pods{dir: filepath.Join(c.data(), "containers"), c: c, pid: map[string]int{}}
	for n := range claimCount {
		w.claims = append(w.claims, &modelClaim{number: n, name: fmt.Sprintf("c%d", n), state: gone})
	}
	err := errors.Join(c.machine.ClearFaults(), c.machine.Reboot(), os.RemoveAll(c.data()), os.RemoveAll(c.cdi()), os.RemoveAll(c.host.Path(run)))
	if err == nil {
		w.gpus, err = c.hw.GPUs()
	}
	if err != nil {
		return "the computer can't be reset", []string{err.Error()}
	}
	w.boot()
	go w.watch()
	for i, b := range h.Batches {
		w.note("batch %d", i)
		if w.play(b); w.rule != "" {
			break
		}
	}
	if w.rule == "" {
		w.tearDown()
	}
	w.stop()
	return w.rule, w.trace
}

// stop ends all goroutines.
func (w *world) stop() {
	for _, s := range w.claims {
		w.pods.stop(s.name)
	}
	w.sup.setAway(false)
	p := w.process()
	p.cancel()
	if !p.isDead() {
		p.kill()
	}
	close(w.over)
	time.Sleep(lasting) // time stands still for those that are left when this goroutine ends
}

// pace is how long something takes: it follows from the history, and from how often it has
// been done.
func (w *world) pace(key string, most time.Duration) time.Duration {
	w.mu.Lock()
	w.paces[key]++
	n := w.paces[key]
	w.mu.Unlock()
	sum := fnv.New64a()
	fmt.Fprintf(sum, "%d %s %d", w.seed, key, n)
	x := sum.Sum64()
	x ^= x >> 31 // FNV's low bits are weak
	x *= 0x9e3779b97f4a7c15
	if x>>60 == 0 {
		most *= 10
	}
	return time.Duration(x % uint64(most))
}

// note adds a line to the trace.
func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trace = append(w.trace, fmt.Sprintf("%9.3f ", time.Since(w.began).Seconds())+fmt.Sprintf(format, args...))
}

// broken says that a rule is broken.
func (w *world) broken(rule, format string, args ...any) {
	w.note("BROKEN: "+rule+": "+format, args...)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rule == "" {
		w.rule = rule
	}
}

func (w *world) process() *process {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.plugin
}

func (w *world) policyNow() policy {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to
}

// boot starts a plugin, again until it serves or is killed.
func (w *world) boot() {
	for {
		p := w.newProcess()
		w.mu.Lock()
		w.plugin = p
		w.mu.Unlock()
		started := make(chan error, 1)
		go func() { started <- p.start() }()
		select {
		case err := <-started:
			if err == nil {
				return
			}
			w.note("the plugin can't start: %v", err)
		case <-p.dead:
			return // whoever has killed it starts the next
		}
		if !p.markEnding() {
			return
		}
		p.cancel()
		p.kill()
		time.Sleep(time.Second)
	}
}

// lasting is longer than anything takes.
const lasting = 20 * time.Minute

// await calls wait, and reports a failure if it doesn't return in time.
func (w *world) await(what string, wait func()) bool {
	done := make(chan struct{})
	go func() {
		wait()
		close(done)
	}()
	select {
	case <-done:
		return true
	case <-time.After(lasting):
		w.broken(what+" doesn't end", "after %s", lasting)
		return false
	}
}

// play plays a batch.
func (w *world) play(b batch) {
	w.allocate(b)
	var wg sync.WaitGroup
	for i, o := range b.Ops {
		wg.Go(func() {
			time.Sleep(o.At + time.Duration(i)*time.Microsecond)
			w.do(o)
		})
	}
	if !w.await("a batch", wg.Wait) || !w.await("a start of the plugin", func() { <-w.process().serving }) {
		return
	}
	if err := w.c.machine.ClearFaults(); err != nil {
		w.broken("faults can't be cleared", "%v", err)
	}
	w.sup.setAway(false)
	time.Sleep(time.Minute) // calls that the kubelet has cancelled end, and containers do
	w.checkFailures(b)
	for _, s := range w.claims {
		s.state, s.calls = s.after(), nil
	}
	if b.Settle && w.rule == "" {
		w.settle()
	}
}

// do does an operation.
func (w *world) do(o op) {
	w.note("%s", o.short())
	switch o.Kind {
	case opPrepare:
		_ = w.prepare(o)
	case opUnprepare:
		_ = w.unprepare(o)
	case opDeletePods:
		w.update(func() { w.claims[o.Claim].unused = true })
	case opStart:
		w.startContainer(w.claims[o.Claim])
	case opRestart, opKill, opReboot, opSandbox:
		w.restart(o)
	case opServer:
		w.update(func() { w.serverAway = time.Now().Add(o.For) })
	case opFail, opSlow:
		f := nvmlsim.Fault{Call: o.Call, GPU: o.GPU, Code: o.Code, DelayMS: int(o.For.Milliseconds()), Count: o.Count}
		if o.Kind == opFail {
			f.DelayMS = 0
		}
		if err := w.c.machine.Fault(f); err != nil {
			w.broken("a fault can't be added", "%v", err)
		}
	case opAway:
		w.sup.setAway(true)
		time.Sleep(o.For)
		w.sup.setAway(false)
	case opDies:
		w.sup.die(o.GPU, o.For)
	case opPolicy:
		w.update(func() { w.to = policyOf(o.Count) })
		if p := w.process(); p.isServing() {
			p.setPolicy(w.policyNow())
		}
	}
}

// update changes the model.
func (w *world) update(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// restart ends the plugin, and starts it after a while.
func (w *world) restart(o op) {
	p := w.process()
	if !p.markEnding() {
		return // another operation restarts it
	}
	if o.Kind == opRestart && p.isServing() {
		p.end()
	} else {
		p.kill()
		p.cancel()
	}
	if o.endsContainers() {
		w.endContainers(o)
	}
	time.Sleep(o.For)
	w.boot()
}

// endsContainers reports whether all containers end, and the kubelet with them.
func (o op) endsContainers() bool { return o.Kind == opReboot || o.Kind == opSandbox }

// endContainers ends everything that isn't on a disk. The kubelet knows nothing of its claims
// then. Only a reboot changes the hardware.
func (w *world) endContainers(o op) {
	for _, s := range w.claims {
		w.pods.stop(s.name)
		w.update(func() {
			s.has = false
			s.unprepares++ // a prepare before this counts no more
			s.calls = append(s.calls, kubeletCall{op: o, start: time.Now(), err: errUnanswered})
		})
	}
	err := errors.Join(w.sup.endAll(), os.RemoveAll(w.c.cdi()))
	if o.Kind == opReboot {
		w.c.boots++
		err = errors.Join(err, w.c.machine.Reboot())
	}
	if err != nil {
		w.broken("the node can't be restarted", "%v", err)
	}
}
