package usage

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/notify"
)

const (
	// wantedFor is how long readings are wanted after the last scrape.
	wantedFor = 2 * time.Minute
	// firstWithin is how long the first scrape waits for readings.
	firstWithin = time.Second
)

// Readings has the last reading of each GPU. The GPUs are read in the background, independently
// of each other, as long as there are scrapes (pkg/node/healthmonitor): a driver that is slow or
// doesn't respond delays no scrape.
type Readings struct {
	facts         *facts.Facts
	containers    *containers.Containers
	seesProcesses bool
	asked         chan struct{}

	mu     notify.Mutex // of all below
	latest map[gpu.UUID]Reading
	// askedAt is the time of the last scrape.
	askedAt time.Time
	// awaited are the GPUs whose readings scrapes after a pause wait for.
	awaited map[gpu.UUID]bool
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

// NewReadings returns Readings without any, of the GPUs that are known. Unless seesProcesses, this
// process is in a PID namespace in which the driver doesn't report the host's processes, and
// readings have none.
func NewReadings(known *facts.Facts, in *containers.Containers, seesProcesses bool) *Readings {
	return &Readings{
		facts: known, containers: in, seesProcesses: seesProcesses, asked: make(chan struct{}, 1),
		latest: map[gpu.UUID]Reading{}, attributes: map[gpu.UUID]bool{},
	}
}

// Asked returns a channel that receives after the first scrape in a while: the GPUs are to be read
// at once.
func (r *Readings) Asked() <-chan struct{} { return r.asked }

// Wanted reports whether there was a scrape lately, so that the GPUs are to be read.
func (r *Readings) Wanted() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Since(r.askedAt) < wantedFor
}

// Scrape returns the last reading of each GPU whose last reading succeeded, and keeps readings
// wanted. If there was no scrape for longer, it drops the readings from before; this scrape, and
// those that come meanwhile, wait up to firstWithin for new ones.
func (r *Readings) Scrape() map[gpu.UUID]Reading {
	if afterPause := r.recordScrape(); afterPause {
		select {
		case r.asked <- struct{}{}:
		default:
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), firstWithin)
	defer cancel()
	late := r.mu.Wait(ctx, func() bool { return len(r.awaited) == 0 })
	r.mu.Lock()
	defer r.mu.Unlock()
	if late != nil {
		clear(r.awaited)
		r.mu.Wake()
	}
	return maps.Clone(r.latest)
}

// recordScrape notes a scrape. After a pause it drops old readings and reports true.
func (r *Readings) recordScrape() (afterPause bool) {
	gpus := gpusOf(r.facts)
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	afterPause = now.Sub(r.askedAt) >= wantedFor
	r.askedAt = now
	if afterPause {
		clear(r.latest)
		r.awaited = map[gpu.UUID]bool{}
		for _, g := range gpus {
			r.awaited[g.UUID] = true
		}
	}
	return afterPause
}

// Store stores what the driver has said of a GPU; err: the GPU could not be read, and its
// conditions say why.
func (r *Readings) Store(uuid gpu.UUID, u gpu.Usage, err error) {
	if !r.seesProcesses {
		u.Processes = nil
	}
	reading := Reading{Usage: u, Users: map[int]containers.User{}}
	for _, p := range u.Processes {
		if user, ok := r.containers.UserOf(p.PID); ok {
			reading.Users[p.PID] = user
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.awaited, uuid)
	r.mu.Wake()
	if err != nil {
		delete(r.latest, uuid)
		return
	}
	reading.AttributesMPS = r.attributes[uuid] || slices.ContainsFunc(reading.Processes, func(p gpu.Process) bool {
		return p.MPSClient && p.Utilization != nil && *p.Utilization > 0
	})
	r.attributes[uuid] = reading.AttributesMPS
	r.latest[uuid] = reading
}

// Drop drops all readings.
func (r *Readings) Drop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.latest)
}
