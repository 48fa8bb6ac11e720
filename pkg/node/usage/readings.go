package usage

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/facts"
)

const (
	// readEvery is the interval of readings, and the time over which the utilization by
	// processes is read.
	readEvery = 5 * time.Second
	// awakeFor is how long readings go on after the last scrape.
	awakeFor = 2 * time.Minute
	// firstWithin is how long the first scrape waits for readings.
	firstWithin = time.Second
)

// Reader reads the hardware (*nvml.Session). It must return in the end, also for a GPU
// that doesn't respond.
type Reader interface {
	Usage(uuid gpu.UUID, over time.Duration) (gpu.Usage, error)
	// EndUsage frees what Usage keeps for its next call. It doesn't block.
	EndUsage()
}

// Readings has the last reading of each GPU. GPUs are read in the background, independently
// of each other, as long as there are scrapes: a driver that is slow or doesn't respond
// delays no scrape and no other GPU.
type Readings struct {
	facts         *facts.Facts
	containers    *containers.Containers
	seesProcesses bool

	using  sync.RWMutex // held for reading while the hardware is read
	reader Reader

	mu       sync.Mutex
	latest   map[gpu.UUID]Reading
	underway map[gpu.UUID]bool
	asked    time.Time
	wake     chan struct{}
	// first is closed when scrapes after a pause needn't wait for readings any more.
	first chan struct{}
	// attributes has the GPUs whose driver has reported the utilization of MPS clients.
	attributes map[gpu.UUID]bool
}

// Reading is one GPU's usage as the driver reported it.
type Reading struct {
	gpu.Usage
	// Users are the containers of the processes, by PID; none for processes that are in no
	// container, such as MPS servers.
	Users map[int]containers.User
	// AttributesMPS: the driver reports the utilization of MPS clients, instead of counting it
	// as the server's.
	AttributesMPS bool
}

// NewReadings returns Readings without any, of the GPUs that are known. Unless seesProcesses, this process is in a PID namespace in which
// the driver doesn't report the host's processes, and readings have none.
func NewReadings(known *facts.Facts, in *containers.Containers, seesProcesses bool) *Readings {
	return &Readings{
		facts: known, containers: in, seesProcesses: seesProcesses, latest: map[gpu.UUID]Reading{}, underway: map[gpu.UUID]bool{},
		wake: make(chan struct{}, 1), attributes: map[gpu.UUID]bool{},
	}
}

// SetHardware sets the reader of the hardware, nil for none, and drops all readings. When it
// returns, the previous reader isn't used any more.
func (r *Readings) SetHardware(reader Reader) {
	r.using.Lock()
	defer r.using.Unlock()
	r.reader = reader
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.latest)
}

// Run reads the GPUs until ctx ends, while there are scrapes.
func (r *Readings) Run(ctx context.Context) {
	ticker := time.NewTicker(readEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
			ticker.Reset(readEvery)
		case <-ticker.C:
			if r.awake() {
				r.read()
			} else {
				r.endUsage()
			}
		}
	}
}

func (r *Readings) awake() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Since(r.asked) < awakeFor
}

// endUsage frees the samples that readings keep in the driver. It is called repeatedly while
// there are no scrapes, because a slow reading may end late.
func (r *Readings) endUsage() {
	r.using.RLock()
	defer r.using.RUnlock()
	if r.reader != nil {
		r.reader.EndUsage()
	}
}

// Scrape returns the last reading of each GPU whose last reading succeeded, and keeps the
// GPUs being read for awakeFor. If there was no scrape for longer, it drops the readings
// from before; this scrape, and those that come meanwhile, wait up to firstWithin for new
// ones.
func (r *Readings) Scrape() map[gpu.UUID]Reading {
	first, asleep := r.recordScrape()
	if asleep {
		select {
		case r.wake <- struct{}{}:
		default:
		}
		timer := time.NewTimer(firstWithin)
		select {
		case <-r.read():
		case <-timer.C:
		}
		timer.Stop()
		close(first)
	}
	<-first
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.latest)
}

// recordScrape reports whether the GPUs weren't being read, and returns the channel that
// scrapes wait for. The caller closes it if they weren't.
func (r *Readings) recordScrape() (first chan struct{}, asleep bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if asleep = now.Sub(r.asked) >= awakeFor; asleep {
		clear(r.latest)
		r.first = make(chan struct{})
	}
	r.asked = now
	return r.first, asleep
}

// read begins to read the GPUs that aren't being read. The channel is closed when they
// have been.
func (r *Readings) read() <-chan struct{} {
	var wg sync.WaitGroup
	gpus := gpusOf(r.facts)
	r.mu.Lock()
	maps.DeleteFunc(r.latest, func(uuid gpu.UUID, _ Reading) bool {
		return !slices.ContainsFunc(gpus, func(g gpu.GPU) bool { return g.UUID == uuid })
	})
	for _, g := range gpus {
		if !r.underway[g.UUID] {
			r.underway[g.UUID] = true
			wg.Go(func() { r.readGPU(g.UUID) })
		}
	}
	r.mu.Unlock()
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	return done
}

func (r *Readings) readGPU(uuid gpu.UUID) {
	r.using.RLock()
	defer r.using.RUnlock()
	reading, ok := r.ask(uuid)
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.underway, uuid)
	if !ok {
		delete(r.latest, uuid)
		return
	}
	reading.AttributesMPS = r.attributes[uuid] || slices.ContainsFunc(reading.Processes, func(p gpu.Process) bool {
		return p.MPSClient && p.Utilization != nil && *p.Utilization > 0
	})
	r.attributes[uuid] = reading.AttributesMPS
	r.latest[uuid] = reading
}

// ask reads one GPU; false if that fails.
func (r *Readings) ask(uuid gpu.UUID) (Reading, bool) {
	if r.reader == nil {
		return Reading{}, false
	}
	u, err := r.reader.Usage(uuid, readEvery)
	if err != nil {
		return Reading{}, false // its conditions say what is wrong
	}
	if !r.seesProcesses {
		u.Processes = nil
	}
	reading := Reading{Usage: u, Users: map[int]containers.User{}}
	for _, p := range u.Processes {
		if user, ok := r.containers.UserOf(p.PID); ok {
			reading.Users[p.PID] = user
		}
	}
	return reading, true
}
