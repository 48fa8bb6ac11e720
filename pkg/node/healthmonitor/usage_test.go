package healthmonitor

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/node/usage"
)

const (
	divided gpu.UUID = "GPU-11111111-0000-0000-0000-000000000000"
	shared  gpu.UUID = "GPU-22222222-0000-0000-0000-000000000000"

	// wantedFor is how long GPUs are read after a scrape, and firstWithin how long the first
	// one waits.
	wantedFor, firstWithin = 2 * time.Minute, time.Second
)

// healthy answers that nothing is wrong with GPUs.
type healthy struct{}

func (healthy) Vitals(gpu.UUID) (gpu.Vitals, error) {
	return gpu.Vitals{Recovery: gpu.RecoveryNone}, nil
}
func (healthy) Probe() []string { return nil }

// driver answers with the number of the reading as the GPU's used memory.
type driver struct {
	healthy

	mu     sync.Mutex
	reads  map[gpu.UUID]int64
	blocks map[gpu.UUID]chan error // calls for these GPUs return what comes there
	kept   map[gpu.UUID]bool       // something for the next call
	ended  map[gpu.UUID]int        // calls of EndUsage
}

// EndUsage fails the first time for each GPU.
func (d *driver) EndUsage(uuid gpu.UUID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended[uuid]++; d.ended[uuid] == 1 {
		return false
	}
	delete(d.kept, uuid)
	return true
}

func (d *driver) keeps() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.kept) > 0
}

func (d *driver) Usage(uuid gpu.UUID, _ time.Duration) (gpu.Usage, error) {
	d.mu.Lock()
	d.reads[uuid]++
	d.kept[uuid] = true
	u := gpu.Usage{Memory: gpu.MemoryUsage{Used: d.reads[uuid]}, Processes: []gpu.Process{{PID: 1}, {PID: 2}}}
	blocked := d.blocks[uuid]
	d.mu.Unlock()
	if blocked != nil {
		return u, <-blocked
	}
	return u, nil
}

func (d *driver) count(uuid gpu.UUID) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.reads[uuid]
}

const podUID = "3c0f6d1e-8a10-4135-bada-13f71feaef21"

// monitorOf returns a Monitor of GPUs, on a host whose process 1 is in a pod.
func monitorOf(t *testing.T, seesProcesses bool, gpus ...gpu.UUID) *Monitor {
	t.Helper()
	host := t.TempDir()
	process := filepath.Join(host, "proc/1")
	err := errors.Join(os.MkdirAll(process, 0o755), os.WriteFile(filepath.Join(process, "cgroup"), []byte("0::/kubepods/pod"+podUID+"/a\n"), 0o600),
		os.WriteFile(filepath.Join(process, "mountinfo"), nil, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	in, err := containers.New(t.TempDir(), driverroot.NewHost(host))
	if err != nil {
		t.Fatal(err)
	}
	known, node := facts.New("node-0"), gpu.Node{Name: "node-0"}
	for _, uuid := range gpus {
		node.GPUs = append(node.GPUs, gpu.GPU{UUID: uuid})
	}
	known.Found(node)
	j, err := journal.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return New(Config{
		NodeName: "node-0", Journal: j, Facts: known, Containers: in, Sharing: sharing.New(sharing.Config{Journal: j}),
		Readings: usage.NewReadings(known, in, seesProcesses), Events: noEvents{},
	})
}

// reading runs a test of readings of two GPUs, in which time passes when all wait.
func reading(t *testing.T, seesProcesses bool, test func(t *testing.T, r *usage.Readings, d *driver)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		d := &driver{reads: map[gpu.UUID]int64{}, kept: map[gpu.UUID]bool{}, ended: map[gpu.UUID]int{}, blocks: map[gpu.UUID]chan error{}}
		m := monitorOf(t, seesProcesses, divided, shared)
		m.SetHardware(&Hardware{Session: d})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { m.Run(ctx) })
		synctest.Wait() // it knows the GPUs: each new one is read if there are scrapes
		test(t, m.cfg.Readings, d)
		cancel()
		wg.Wait()
	})
}

// numbers returns, for each GPU, the number of the reading that the scrape returned.
func numbers(r *usage.Readings) map[gpu.UUID]int64 {
	got := map[gpu.UUID]int64{}
	for uuid, u := range r.Scrape() {
		got[uuid] = u.Memory.Used
	}
	return got
}

func TestReadWhileAsked(t *testing.T) {
	reading(t, true, func(t *testing.T, r *usage.Readings, d *driver) {
		time.Sleep(time.Hour + usageEvery/2) // not at the time of a tick, which would see that somebody asks
		if n := d.count(shared); n != 0 {
			t.Errorf("a GPU was read %d times although nobody asked", n)
		}
		began := time.Now()
		if diff := cmp.Diff(map[gpu.UUID]int64{divided: 1, shared: 1}, numbers(r)); diff != "" || time.Since(began) > 0 {
			t.Errorf("the first scrape, after %s (-want +got):\n%s", time.Since(began), diff)
		}
		time.Sleep(usageEvery + usageEvery/2)
		if diff := cmp.Diff(map[gpu.UUID]int64{divided: 2, shared: 2}, numbers(r)); diff != "" {
			t.Errorf("the next scrape (-want +got):\n%s", diff)
		}
		if !d.keeps() {
			t.Error("nothing was kept for the next reading")
		}
		time.Sleep(time.Hour)
		if n, most := d.count(shared), 2+int64(wantedFor/usageEvery); n > most {
			t.Errorf("a GPU was read %d times, want at most %d: nobody asked any more", n, most)
		}
		if d.keeps() {
			t.Error("something is kept for a next reading, although nobody asks any more")
		}
		users := r.Scrape()[shared].Users
		if diff := cmp.Diff(map[int]containers.User{1: {PodUID: podUID}}, users); diff != "" {
			t.Errorf("users (-want +got):\n%s", diff)
		}
	})
}

// TestBlockedGPU checks that a call that doesn't return delays only the first scrape, a
// little, and that the other GPU goes on.
func TestBlockedGPU(t *testing.T) {
	reading(t, true, func(t *testing.T, r *usage.Readings, d *driver) {
		if got := len(r.Scrape()); got != 2 {
			t.Fatalf("%d GPUs, want 2", got)
		}
		blocked := make(chan error)
		d.mu.Lock()
		d.blocks[divided] = blocked
		d.mu.Unlock()
		time.Sleep(10*usageEvery + usageEvery/2)
		began := time.Now()
		if got := numbers(r)[shared]; got != 11 || time.Since(began) > 0 {
			t.Errorf("after %s, reading %d of the GPU that works, want the eleventh", time.Since(began), got)
		}
		if n := d.count(divided); n != 2 {
			t.Errorf("the GPU that doesn't respond was asked %d times, want once more", n)
		}
		blocked <- errors.New("it does not respond")
		synctest.Wait()
		if got := slices.Collect(maps.Keys(numbers(r))); !slices.Equal(got, []gpu.UUID{shared}) {
			t.Errorf("readings of %v, want only the GPU that works", got)
		}
		time.Sleep(time.Hour) // without a scrape; the next one is like the first
		began = time.Now()
		if got, took := len(r.Scrape()), time.Since(began); got != 1 || took > firstWithin {
			t.Errorf("%d GPUs after %s", got, took)
		}
		close(blocked)
	})
}

// TestHangsUnasked lets a GPU hang while there are no scrapes: its old reading is dropped.
func TestHangsUnasked(t *testing.T) {
	reading(t, true, func(t *testing.T, r *usage.Readings, d *driver) {
		if got := len(r.Scrape()); got != 2 {
			t.Fatalf("%d GPUs, want 2", got)
		}
		time.Sleep(time.Hour + usageEvery/2)
		blocked := make(chan error)
		d.mu.Lock()
		d.blocks[divided] = blocked
		d.mu.Unlock()
		if got := slices.Collect(maps.Keys(numbers(r))); !slices.Equal(got, []gpu.UUID{shared}) {
			t.Errorf("readings of %v, want only the GPU that works", got)
		}
		close(blocked)
	})
}

// TestTwoScrapersAfterPause has a second scraper come while the first waits for the first
// readings: it gets them too.
func TestTwoScrapersAfterPause(t *testing.T) {
	reading(t, true, func(t *testing.T, r *usage.Readings, d *driver) {
		time.Sleep(time.Hour + usageEvery/2)
		begun := make(chan error)
		d.mu.Lock()
		d.blocks[divided], d.blocks[shared] = begun, begun
		d.mu.Unlock()
		got := make(chan int, 2)
		for range 2 {
			go func() { got <- len(r.Scrape()) }()
			synctest.Wait()
		}
		begun <- nil
		begun <- nil
		for range 2 {
			if n := <-got; n != 2 {
				t.Errorf("a scrape got %d GPUs, want both", n)
			}
		}
	})
}

// slowDriver is one whose calls take a moment.
type slowDriver struct {
	healthy

	begun    chan bool
	returned atomic.Bool
}

func (*slowDriver) EndUsage(gpu.UUID) bool { return true }

func (d *slowDriver) Usage(gpu.UUID, time.Duration) (gpu.Usage, error) {
	d.begun <- true
	time.Sleep(50 * time.Millisecond)
	d.returned.Store(true)
	return gpu.Usage{}, nil
}

// TestHardwareTaken checks that nothing uses the hardware, and nothing is known of it,
// after it was taken.
func TestHardwareTaken(t *testing.T) {
	m := monitorOf(t, true, shared)
	r, d := m.cfg.Readings, &slowDriver{begun: make(chan bool)}
	m.SetHardware(&Hardware{Session: d})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { m.Run(ctx) })
	defer running.Wait()
	defer cancel()
	go r.Scrape()
	<-d.begun
	m.SetHardware(nil)
	if !d.returned.Load() {
		t.Error("the hardware was taken while a call was under way")
	}
	if n := len(r.Scrape()); n != 0 {
		t.Errorf("%d readings without hardware", n)
	}
}

func TestOtherPIDNamespace(t *testing.T) {
	reading(t, false, func(t *testing.T, r *usage.Readings, _ *driver) {
		if got := r.Scrape()[shared]; got.Processes != nil || got.Memory.Used == 0 {
			t.Errorf("%+v, want the memory and no processes", got)
		}
	})
}
