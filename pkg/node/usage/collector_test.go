package usage

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	divided gpu.UUID = "GPU-11111111-0000-0000-0000-000000000000"
	shared  gpu.UUID = "GPU-22222222-0000-0000-0000-000000000000"
	broken  gpu.UUID = "GPU-33333333-0000-0000-0000-000000000000"
)

// h100 is a GPU that can be divided as NVIDIA documents for the H100 80GB
// (MIG user guide, profiles of the H100).
func h100(uuid gpu.UUID, conditions ...gpu.Condition) gpu.GPU {
	at := func(size int, starts ...int) (all []gpu.Placement) {
		for _, start := range starts {
			all = append(all, gpu.Placement{Start: start, Size: size})
		}
		return all
	}
	return gpu.GPU{UUID: uuid, Conditions: conditions, MIG: &gpu.MIG{Switchable: true, Profiles: []gpu.Profile{
		{Name: "1g.10gb", MaxInstances: 7, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)},
		{Name: "1g.10gb+me", MaxInstances: 1, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)},
		{Name: "1g.20gb", MaxInstances: 4, Placements: at(2, 0, 2, 4, 6)},
		{Name: "2g.20gb", MaxInstances: 3, Placements: at(2, 0, 2, 4)},
		{Name: "3g.40gb", MaxInstances: 2, Placements: at(4, 0, 4)},
		{Name: "4g.40gb", MaxInstances: 1, Placements: at(4, 0)},
		{Name: "7g.80gb", MaxInstances: 1, Placements: at(8, 0)},
	}}}
}

func partition(uuid gpu.UUID, profile string, start, size int) gpu.Partition {
	return gpu.Partition{GPU: uuid, Profile: profile, Placement: gpu.Placement{Start: start, Size: size}}
}

// fixed has the metrics of a state.
type fixed struct {
	*Collector
	at state
}

func (f *fixed) Collect(to chan<- prometheus.Metric) { f.collect(to, f.at) }

// collector has the metrics of a node with one claim of a partition, one of an MPS
// share, and a sick GPU.
func collector(containers Containers) *fixed {
	small := holding.New("gpu-11111111-mig-1g-10gb-2-1", partition(divided, "1g.10gb", 2, 1))
	share := holding.New("gpu-22222222-mps-4-0", gpu.Share{Of: gpu.Whole{GPU: shared}, Count: 4})
	share.MPS = &holding.MPS{ThreadPercentage: 25, MemoryMiB: 1024}
	return &fixed{Collector: New(Config{NodeName: "node-0"}), at: state{
		claims: []holding.Record{
			{Namespace: "team", Name: "small", Holdings: []holding.Holding{small}, Pods: []holding.Pod{{UID: "1", Name: "trainer"}}},
			{Namespace: "team", Name: "share", Holdings: []holding.Holding{share}},
		},
		made: map[gpu.UUID][]holding.MadePartition{
			divided: {{Partition: small.Partition, Made: &holding.MadeInstance{GPUInstanceID: 9, UUID: "MIG-1"}}},
		},
		gpus: []gpu.GPU{
			h100(divided), h100(shared),
			h100(broken, gpu.Condition{Type: gpu.Lost, Message: "gone"}, gpu.Condition{Type: gpu.NVLinkDown, Message: "down"}),
		},
		containers: containers,
	}}
}

func TestWhoHasWhichDevice(t *testing.T) {
	const help = `
# HELP tessera_allocation_info 1 for each device that a claim has and each container that uses it. uuid: of the GPU or MIG device; parent_uuid: of the GPU; container is empty where the kubelet doesn't say which containers use the claim.
# TYPE tessera_allocation_info gauge
`
	for name, test := range map[string]struct {
		containers Containers
		want       string
	}{
		"containers": {
			containers: Containers{
				{Namespace: "team", Name: "small"}:  {{Pod: "trainer", Name: "main"}, {Pod: "trainer", Name: "sidecar"}},
				{Namespace: "team", Name: "share"}:  {{Pod: "server", Name: "main"}},
				{Namespace: "other", Name: "small"}: {{Pod: "stranger", Name: "main"}},
			},
			want: `
tessera_allocation_info{claim="share",container="main",device="gpu-22222222-mps-4-0",gpu_instance_id="",namespace="team",node="node-0",parent_uuid="GPU-22222222-0000-0000-0000-000000000000",pod="server",profile="",share_id="",type="mps",uuid="GPU-22222222-0000-0000-0000-000000000000"} 1
tessera_allocation_info{claim="small",container="main",device="gpu-11111111-mig-1g-10gb-2-1",gpu_instance_id="9",namespace="team",node="node-0",parent_uuid="GPU-11111111-0000-0000-0000-000000000000",pod="trainer",profile="1g.10gb",share_id="",type="mig",uuid="MIG-1"} 1
tessera_allocation_info{claim="small",container="sidecar",device="gpu-11111111-mig-1g-10gb-2-1",gpu_instance_id="9",namespace="team",node="node-0",parent_uuid="GPU-11111111-0000-0000-0000-000000000000",pod="trainer",profile="1g.10gb",share_id="",type="mig",uuid="MIG-1"} 1
`,
		},
		"no answer of the kubelet": {
			want: `
tessera_allocation_info{claim="share",container="",device="gpu-22222222-mps-4-0",gpu_instance_id="",namespace="team",node="node-0",parent_uuid="GPU-22222222-0000-0000-0000-000000000000",pod="",profile="",share_id="",type="mps",uuid="GPU-22222222-0000-0000-0000-000000000000"} 1
tessera_allocation_info{claim="small",container="",device="gpu-11111111-mig-1g-10gb-2-1",gpu_instance_id="9",namespace="team",node="node-0",parent_uuid="GPU-11111111-0000-0000-0000-000000000000",pod="trainer",profile="1g.10gb",share_id="",type="mig",uuid="MIG-1"} 1
`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if err := testutil.CollectAndCompare(collector(test.containers), strings.NewReader(help+test.want), "tessera_allocation_info"); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestEqualSeries checks that nothing that claims can be makes the answer one with two
// equal series, which Prometheus refuses as a whole.
func TestEqualSeries(t *testing.T) {
	whole := holding.New("gpu-22222222", gpu.Whole{GPU: shared})
	looks := whole
	looks.Admin = true
	share := holding.New("gpu-11111111-mps-2-0", gpu.Share{Of: gpu.Whole{GPU: divided}, Count: 2})
	share.MPS = &holding.MPS{MemoryMiB: 1024, ThreadPercentage: 50}
	for name, claims := range map[string][]holding.Record{
		"a device with and without admin access": {{Namespace: "team", Name: "claim", Holdings: []holding.Holding{whole, looks}}},
		"a pod created again under its name":     {{Namespace: "team", Name: "claim", Holdings: []holding.Holding{whole}, Pods: []holding.Pod{{UID: "1", Name: "pod"}, {UID: "2", Name: "pod"}}}},
		"a claim created again under its name": {
			{ClaimUID: "1", Namespace: "team", Name: "claim", Holdings: []holding.Holding{share}},
			{ClaimUID: "2", Namespace: "team", Name: "claim", Holdings: []holding.Holding{share}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := collector(nil)
			c.at.claims = claims
			if n, err := testutil.GatherAndCount(registryOf(c), "tessera_allocation_info"); err != nil || n != 1 {
				t.Errorf("%d series (%v), want one", n, err)
			}
		})
	}
}

// TestAdminAccess checks that a pod that looks at a GPU isn't taken for its user.
func TestAdminAccess(t *testing.T) {
	looks := holding.New("gpu-22222222", gpu.Whole{GPU: shared})
	looks.Admin = true
	c := collector(nil)
	c.at.claims = []holding.Record{{Namespace: "team", Name: "monitor", Holdings: []holding.Holding{looks}}}
	if n, err := testutil.GatherAndCount(registryOf(c), "tessera_allocation_info"); err != nil || n != 0 {
		t.Errorf("%d series (%v), want none", n, err)
	}
}

func registryOf(c prometheus.Collector) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(c)
	return r
}

func TestLimitsOfShares(t *testing.T) {
	const want = `
# HELP tessera_share_memory_limit_bytes GPU memory that each process of a claim can have on an MPS share.
# TYPE tessera_share_memory_limit_bytes gauge
tessera_share_memory_limit_bytes{claim="share",device="gpu-22222222-mps-4-0",namespace="team",parent_uuid="GPU-22222222-0000-0000-0000-000000000000",share_id=""} 1.073741824e+09
# HELP tessera_share_thread_limit_ratio Fraction of the multiprocessors that each process of a claim can use on an MPS share.
# TYPE tessera_share_thread_limit_ratio gauge
tessera_share_thread_limit_ratio{claim="share",device="gpu-22222222-mps-4-0",namespace="team",parent_uuid="GPU-22222222-0000-0000-0000-000000000000",share_id=""} 0.25
`
	err := testutil.CollectAndCompare(collector(nil), strings.NewReader(want), "tessera_share_memory_limit_bytes", "tessera_share_thread_limit_ratio")
	if err != nil {
		t.Error(err)
	}
}

func TestConditions(t *testing.T) {
	const want = `
# HELP tessera_gpu_health 1 for each condition that the GPU has; condition is Healthy for a GPU that has none.
# TYPE tessera_gpu_health gauge
tessera_gpu_health{condition="Healthy",uuid="GPU-11111111-0000-0000-0000-000000000000"} 1
tessera_gpu_health{condition="Healthy",uuid="GPU-22222222-0000-0000-0000-000000000000"} 1
tessera_gpu_health{condition="Lost",uuid="GPU-33333333-0000-0000-0000-000000000000"} 1
tessera_gpu_health{condition="NVLinkDown",uuid="GPU-33333333-0000-0000-0000-000000000000"} 1
`
	if err := testutil.CollectAndCompare(collector(nil), strings.NewReader(want), "tessera_gpu_health"); err != nil {
		t.Error(err)
	}
}

// TestNames checks the metrics by Prometheus' conventions.
func TestNames(t *testing.T) {
	c := collector(Containers{{Namespace: "team", Name: "share"}: {{Pod: "server", Name: "main"}}})
	c.at.readings = map[gpu.UUID]Reading{
		divided: {Usage: gpu.Usage{Partitions: []gpu.PartitionUsage{{UUID: "MIG-1", GPUInstanceID: 9}}}},
		shared:  {Usage: gpu.Usage{Utilization: new(0.5), Processes: []gpu.Process{}}, AttributesMPS: true},
	}
	problems, err := testutil.CollectAndLint(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestWhatStillFits(t *testing.T) {
	holds := func(devices ...gpu.Device) []holding.Record {
		var all []holding.Record
		for _, d := range devices {
			all = append(all, holding.Record{Holdings: []holding.Holding{holding.New("device", d)}})
		}
		return all
	}
	looks := holds(gpu.Whole{GPU: divided})
	looks[0].Holdings[0].Admin = true
	for name, test := range map[string]struct {
		claims        []holding.Record
		want          map[string]int // 0 for the others
		fragmentation float64
	}{
		"an empty GPU": {
			want: map[string]int{"1g.10gb": 7, "1g.10gb+me": 1, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1},
		},
		"admin access takes nothing": {
			claims: looks,
			want:   map[string]int{"1g.10gb": 7, "1g.10gb+me": 1, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1},
		},
		"the first slice taken": {
			claims:        holds(partition(divided, "1g.10gb", 0, 1)),
			want:          map[string]int{"1g.10gb": 6, "1g.10gb+me": 1, "1g.20gb": 3, "2g.20gb": 2, "3g.40gb": 1},
			fragmentation: 3. / 7,
		},
		"two places apart": {
			claims: holds(partition(divided, "4g.40gb", 0, 4), partition(divided, "1g.10gb", 5, 1)),
			want:   map[string]int{"1g.10gb": 2, "1g.10gb+me": 1, "1g.20gb": 1}, fragmentation: 1. / 3,
		},
		"nothing fits": {
			claims: holds(partition(divided, "4g.40gb", 0, 4), partition(divided, "1g.20gb", 4, 2), partition(divided, "1g.10gb", 6, 1)),
		},
		"two shares of one partition take it once": {
			claims: holds(gpu.Share{Of: partition(divided, "3g.40gb", 4, 4), Count: 2, Number: 0},
				gpu.Share{Of: partition(divided, "3g.40gb", 4, 4), Count: 2, Number: 1}),
			want: map[string]int{"1g.10gb": 4, "1g.10gb+me": 1, "1g.20gb": 2, "2g.20gb": 2, "3g.40gb": 1, "4g.40gb": 1},
		},
		"the only one of a profile": {
			claims: holds(partition(divided, "1g.10gb+me", 6, 1)),
			want:   map[string]int{"1g.10gb": 6, "1g.20gb": 3, "2g.20gb": 3, "3g.40gb": 1, "4g.40gb": 1}, fragmentation: 2. / 6,
		},
		"the whole GPU": {claims: holds(gpu.Whole{GPU: divided})},
		"a replica":     {claims: holds(gpu.Replica{GPU: divided, Count: 2})},
		"another GPU": {
			claims: holds(gpu.Whole{GPU: shared}),
			want:   map[string]int{"1g.10gb": 7, "1g.10gb+me": 1, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			room := roomOn(h100(divided), test.claims)
			for _, p := range room.profiles {
				if n := room.fits(p); n != test.want[p.Name] {
					t.Errorf("%d of %s fit, want %d", n, p.Name, test.want[p.Name])
				}
			}
			if is := room.fragmentation(); is != test.fragmentation {
				t.Errorf("fragmentation %g, want %g", is, test.fragmentation)
			}
		})
	}
}

// TestPartitionsFitBesideAFailingDaemon checks that an MPS daemon that fails takes nothing
// from partitions.
func TestPartitionsFitBesideAFailingDaemon(t *testing.T) {
	c := collector(nil)
	c.at.gpus = []gpu.GPU{h100(broken, gpu.Condition{Type: gpu.MPSDaemonFailed})}
	const want = `
# HELP tessera_placements_free MIG partitions of the profile that can still be created on the GPU at the same time, beside those that claims have; 0 while the GPU is blocked.
# TYPE tessera_placements_free gauge
tessera_placements_free{profile="1g.10gb",uuid="GPU-33333333-0000-0000-0000-000000000000"} 7
tessera_placements_free{profile="1g.10gb+me",uuid="GPU-33333333-0000-0000-0000-000000000000"} 1
tessera_placements_free{profile="1g.20gb",uuid="GPU-33333333-0000-0000-0000-000000000000"} 4
tessera_placements_free{profile="2g.20gb",uuid="GPU-33333333-0000-0000-0000-000000000000"} 3
tessera_placements_free{profile="3g.40gb",uuid="GPU-33333333-0000-0000-0000-000000000000"} 2
tessera_placements_free{profile="4g.40gb",uuid="GPU-33333333-0000-0000-0000-000000000000"} 1
tessera_placements_free{profile="7g.80gb",uuid="GPU-33333333-0000-0000-0000-000000000000"} 1
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want), "tessera_placements_free"); err != nil {
		t.Error(err)
	}
}

// TestNothingFitsOnABlockedGPU checks that a GPU that gets no claims has no room.
func TestNothingFitsOnABlockedGPU(t *testing.T) {
	metrics, err := testutil.CollectAndFormat(collector(nil), expfmt.TypeTextPlain, "tessera_placements_free")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(string(metrics), "\n") {
		if strings.Contains(line, string(broken)) && !strings.HasSuffix(line, " 0") {
			t.Errorf("%s, although the GPU is lost", line)
		}
	}
	if !strings.Contains(string(metrics), string(broken)) {
		t.Errorf("no metric of the lost GPU in\n%s", metrics)
	}
}
