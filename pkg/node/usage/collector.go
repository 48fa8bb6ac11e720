package usage

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// podResourcesTimeout is how long a scrape waits for the kubelet's answer.
const podResourcesTimeout = 2 * time.Second

// healthy is the value of the label condition for a GPU without conditions.
const healthy = "Healthy"

// Config says where a Collector finds what it reports. All parts are required.
type Config struct {
	NodeName string
	// BootID of the running kernel. Partitions in records of other boots are gone, and
	// instances of this one may have their IDs.
	BootID  string
	Journal *journal.Journal
	Facts   *facts.Facts
	// Kubelet says which containers use claims, and Containers the names of other pods.
	Kubelet    *PodResources
	Containers *containers.Containers
	Readings   *Readings
}

// Collector computes the metrics at each scrape. It implements prometheus.Collector.
type Collector struct {
	cfg      Config
	hardware hardwareDescs

	allocation, memoryLimit, threadLimit, placements, fragmentation, health, readable *family
}

// New returns a Collector.
func New(cfg Config) *Collector {
	share := []string{"parent_uuid", "device", "share_id", "namespace", "claim"}
	return &Collector{
		cfg: cfg, hardware: newHardwareDescs(),
		allocation: newFamily("tessera_allocation_info", "1 for each device that a claim has and each container that uses it. "+
			"uuid: of the GPU or MIG device; parent_uuid: of the GPU; container is empty where the kubelet doesn't say which containers use the claim.",
			"node", "uuid", "parent_uuid", "gpu_instance_id", "type", "profile", "device", "share_id", "namespace", "claim", "pod", "container"),
		memoryLimit: newFamily("tessera_share_memory_limit_bytes", "GPU memory that each process of a claim can have on an MPS share.", share...),
		threadLimit: newFamily("tessera_share_thread_limit_ratio", "Fraction of the multiprocessors that each process of a claim can use on an MPS share.", share...),
		placements: newFamily("tessera_placements_free", "MIG partitions of the profile that can still be created on the GPU at the same time, beside those that claims have; 0 while the GPU is blocked.",
			"uuid", "profile"),
		fragmentation: newFamily("tessera_gpu_fragmentation_ratio", "Fraction of the memory slices that MIG partitions can still have, and that the largest of them leaves over.", "uuid"),
		health:        newFamily("tessera_gpu_health", "1 for each condition that the GPU has; condition is Healthy for a GPU that has none.", "uuid", "condition"),
		readable: newFamily("tessera_pod_resources_readable", "Whether the kubelet's PodResources API answered. "+
			"If not, tessera_allocation_info has the pods that claims were prepared for, and no containers."),
	}
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*family{c.allocation, c.memoryLimit, c.threadLimit, c.placements, c.fragmentation, c.health, c.readable} {
		to <- d.Desc
	}
	for _, d := range c.hardware.all() {
		to <- d.Desc
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	c.collect(to, c.now())
}

// state is all that an answer is computed from.
type state struct {
	claims []holding.Record
	gpus   []gpu.GPU
	made   map[gpu.UUID][]holding.MadePartition
	// containers are nil if the kubelet doesn't answer.
	containers Containers
	readings   map[gpu.UUID]Reading
}

// now returns the state at a scrape.
func (c *Collector) now() state {
	now := state{
		claims: c.cfg.Journal.Claims().Records(), gpus: gpusOf(c.cfg.Facts),
		made: map[gpu.UUID][]holding.MadePartition{}, readings: c.cfg.Readings.Scrape(),
	}
	for _, r := range c.cfg.Journal.GPUs() {
		if r.BootID == c.cfg.BootID {
			now.made[r.GPU] = r.Partitions
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), podResourcesTimeout)
	defer cancel()
	now.containers, _ = c.cfg.Kubelet.Containers(ctx) // whether it answered is a metric
	return now
}

// gpusOf returns the GPUs, each UUID once, because the UUID is the label of metrics.
func gpusOf(known *facts.Facts) []gpu.GPU {
	now, _ := known.State()
	seen := map[gpu.UUID]bool{}
	return slices.DeleteFunc(slices.Clone(now.Node.GPUs), func(g gpu.GPU) bool {
		again := seen[g.UUID]
		seen[g.UUID] = true
		return again
	})
}

func (c *Collector) collect(to chan<- prometheus.Metric, now state) {
	s := scrape{to: to, sent: map[series]bool{}}
	s.gauge(c.readable, boolToFloat(now.containers != nil))
	for _, r := range now.claims {
		c.collectClaim(s, r, now)
	}
	for _, g := range now.gpus {
		c.collectGPU(s, g, now.claims)
		if r, ok := now.readings[g.UUID]; ok {
			c.collectUsage(s, g, r, now.made[g.UUID])
		}
	}
	c.collectShares(s, now)
}

// collectClaim has the metrics of one claim's devices.
func (c *Collector) collectClaim(s scrape, r holding.Record, now state) {
	for _, h := range r.Holdings {
		if h.Admin {
			continue
		}
		uuid, instance := string(h.GPU), ""
		if m := instanceOf(now.made[h.GPU], h.Partition); m != nil {
			uuid, instance = string(m.UUID), strconv.Itoa(m.GPUInstanceID)
		} else if h.Partition != (holding.Partition{}) {
			uuid = ""
		}
		for _, container := range containersOf(r, now.containers) {
			s.gauge(c.allocation, 1, c.cfg.NodeName, uuid, string(h.GPU), instance, h.Device.Type(), h.Partition.Profile,
				string(h.Device), h.ShareID, r.Namespace, r.Name, container.Pod, container.Name)
		}
		if h.Share == nil || h.MPS == nil {
			continue
		}
		labels := []string{string(h.GPU), string(h.Device), h.ShareID, r.Namespace, r.Name}
		if h.MPS.MemoryMiB > 0 {
			s.gauge(c.memoryLimit, float64(h.MPS.MemoryMiB<<20), labels...)
		}
		if h.MPS.ThreadPercentage > 0 {
			s.gauge(c.threadLimit, float64(h.MPS.ThreadPercentage)/100, labels...)
		}
	}
}

// instanceOf returns the instance of a partition; nil for a whole GPU, and until the
// instance is made.
func instanceOf(made []holding.MadePartition, p holding.Partition) *holding.MadeInstance {
	for _, m := range made {
		if m.Partition == p {
			return m.Made
		}
	}
	return nil
}

// containersOf returns the containers that use a claim, or, where the kubelet doesn't name
// any, the pods that the claim was prepared for; always at least one.
func containersOf(r holding.Record, all Containers) []Container {
	if found := all[Claim{Namespace: r.Namespace, Name: r.Name}]; len(found) > 0 {
		return found
	}
	var pods []Container
	for _, p := range r.Pods {
		pods = append(pods, Container{Pod: p.Name})
	}
	if len(pods) == 0 {
		pods = append(pods, Container{})
	}
	return pods
}

// collectGPU has the metrics of one GPU.
func (c *Collector) collectGPU(s scrape, g gpu.GPU, claims []holding.Record) {
	uuid := string(g.UUID)
	conditions := make([]string, 0, len(g.Conditions))
	for _, is := range g.Conditions {
		conditions = append(conditions, string(is.Type))
	}
	if len(conditions) == 0 {
		conditions = append(conditions, healthy)
	}
	slices.Sort(conditions)
	for _, condition := range slices.Compact(conditions) {
		s.gauge(c.health, 1, uuid, condition)
	}
	if g.MIG == nil || !g.MIG.Enabled && !g.MIG.Switchable {
		return
	}
	room := roomOn(g, claims)
	for _, p := range g.MIG.Profiles {
		n := room.fits(p)
		if slices.ContainsFunc(g.Conditions, gpu.Condition.BlocksAllDevices) {
			n = 0
		}
		s.gauge(c.placements, float64(n), uuid, p.Name)
	}
	s.gauge(c.fragmentation, room.fragmentation(), uuid)
}

// scrape has the series of one answer. Two claims can have one name, one after the other,
// and a claim can have a device twice, once with admin access; Prometheus refuses an
// answer with two equal series.
type scrape struct {
	to   chan<- prometheus.Metric
	sent map[series]bool
}

type series struct {
	of     *family
	labels string
}

func (s scrape) gauge(of *family, value float64, labels ...string) {
	key := series{of, strings.Join(labels, "\xff")}
	if s.sent[key] {
		return
	}
	s.sent[key] = true
	s.to <- &gauge{of, value, labels}
}

func boolToFloat(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
