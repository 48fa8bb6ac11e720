package usage

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const gib = 1 << 30

// process is one of the whole GPU.
func process(pid int, memory int64, utilization float64, mps bool) gpu.Process {
	return gpu.Process{PID: pid, MemoryBytes: &memory, Utilization: &utilization, MPSClient: mps}
}

// TestUsageOfGPUs checks the metrics of GPUs and partitions: a GPU that can't be read
// has none.
func TestUsageOfGPUs(t *testing.T) {
	c := collector(nil)
	c.at.readings = map[gpu.UUID]Reading{
		shared: {Usage: gpu.Usage{Memory: gpu.MemoryUsage{Total: 80 * gib, Used: 20 * gib}, Utilization: new(0.75)}},
		divided: {Usage: gpu.Usage{
			Memory:     gpu.MemoryUsage{Total: 80 * gib, Used: 5 * gib},
			Partitions: []gpu.PartitionUsage{{UUID: "MIG-1", GPUInstanceID: 9, Memory: gpu.MemoryUsage{Total: 10 * gib, Used: 5 * gib}, Utilization: new(0.25)}},
		}},
	}
	const want = `
# HELP tessera_gpu_memory_used_bytes Memory of the GPU that programs use, without what the driver reserves.
# TYPE tessera_gpu_memory_used_bytes gauge
tessera_gpu_memory_used_bytes{uuid="GPU-11111111-0000-0000-0000-000000000000"} 5.36870912e+09
tessera_gpu_memory_used_bytes{uuid="GPU-22222222-0000-0000-0000-000000000000"} 2.147483648e+10
# HELP tessera_gpu_utilization_ratio Fraction of the driver's last sample period in which any program ran on the GPU's multiprocessors. The driver doesn't tell it in MIG mode.
# TYPE tessera_gpu_utilization_ratio gauge
tessera_gpu_utilization_ratio{uuid="GPU-22222222-0000-0000-0000-000000000000"} 0.75
# HELP tessera_partition_memory_total_bytes Memory of the MIG device.
# TYPE tessera_partition_memory_total_bytes gauge
tessera_partition_memory_total_bytes{gpu_instance_id="9",parent_uuid="GPU-11111111-0000-0000-0000-000000000000",profile="1g.10gb",uuid="MIG-1"} 1.073741824e+10
# HELP tessera_partition_memory_used_bytes Memory of the MIG device that programs use.
# TYPE tessera_partition_memory_used_bytes gauge
tessera_partition_memory_used_bytes{gpu_instance_id="9",parent_uuid="GPU-11111111-0000-0000-0000-000000000000",profile="1g.10gb",uuid="MIG-1"} 5.36870912e+09
# HELP tessera_partition_utilization_ratio Fraction of the time since the reading before, about five seconds, in which any program ran on the MIG device's GPU instance. Drivers tell it from Hopper on.
# TYPE tessera_partition_utilization_ratio gauge
tessera_partition_utilization_ratio{gpu_instance_id="9",parent_uuid="GPU-11111111-0000-0000-0000-000000000000",profile="1g.10gb",uuid="MIG-1"} 0.25
`
	err := testutil.CollectAndCompare(c, strings.NewReader(want), "tessera_gpu_memory_used_bytes", "tessera_gpu_utilization_ratio",
		"tessera_partition_memory_total_bytes", "tessera_partition_memory_used_bytes", "tessera_partition_utilization_ratio")
	if err != nil {
		t.Error(err)
	}
}

// TestMemoryOfTheComputer checks that no memory is told of a GPU without its own.
func TestMemoryOfTheComputer(t *testing.T) {
	const want = `
# HELP tessera_gpu_utilization_ratio Fraction of the driver's last sample period in which any program ran on the GPU's multiprocessors. The driver doesn't tell it in MIG mode.
# TYPE tessera_gpu_utilization_ratio gauge
tessera_gpu_utilization_ratio{uuid="GPU-22222222-0000-0000-0000-000000000000"} 0.5
`
	c := collector(nil)
	c.at.readings = map[gpu.UUID]Reading{shared: {Usage: gpu.Usage{Utilization: new(0.5)}}}
	names := []string{"tessera_gpu_utilization_ratio", "tessera_gpu_memory_total_bytes", "tessera_gpu_memory_used_bytes"}
	if err := testutil.CollectAndCompare(c, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
}

// TestUsageOfShares checks which container's processes count for which share, and that
// values that aren't measured have no series.
func TestUsageOfShares(t *testing.T) {
	share := func(number int) holding.Holding {
		h := holding.New(gpu.DeviceName("gpu-22222222-mps-2-"+string(rune('0'+number))), gpu.Share{Of: gpu.Whole{GPU: shared}, Count: 2, Number: number})
		h.MPS = &holding.MPS{MemoryMiB: 1024}
		return h
	}
	a := holding.Record{ClaimUID: "a", Namespace: "team", Name: "a", Holdings: []holding.Holding{share(0)}, Pods: []holding.Pod{{UID: "1", Name: "one"}}}
	b := holding.Record{ClaimUID: "b", Namespace: "team", Name: "b", Holdings: []holding.Holding{share(1)}, Pods: []holding.Pod{{UID: "2", Name: "two"}}}
	replica := holding.Record{
		ClaimUID: "r", Namespace: "team", Name: "r", Pods: []holding.Pod{{UID: "1", Name: "one"}},
		Holdings: []holding.Holding{holding.New("gpu-22222222-ts-2-0", gpu.Replica{GPU: shared, Count: 2})},
	}
	both := a
	both.Holdings = []holding.Holding{share(0), share(1)}
	one := func(container string, claims ...string) containers.User {
		return containers.User{PodUID: "1", Container: container, Claims: claims}
	}
	host := t.TempDir()
	if err := os.MkdirAll(filepath.Join(host, "var/log/pods/team_pod-7_7"), 0o755); err != nil {
		t.Fatal(err)
	}
	marks, err := containers.New(t.TempDir(), driverroot.NewHost(host))
	if err != nil {
		t.Fatal(err)
	}
	known := Containers{
		{Namespace: "team", Name: "a"}: {{Pod: "one", Name: "main"}, {Pod: "one", Name: "sidecar"}},
		{Namespace: "team", Name: "b"}: {{Pod: "two", Name: "main"}},
	}
	for name, test := range map[string]struct {
		claims     []holding.Record
		containers Containers
		processes  []gpu.Process
		users      map[int]containers.User
		server     bool // the driver counts the utilization of MPS clients as the server's
		noRates    bool // the GPU's utilization is unknown
		want       string
	}{
		"the processes of a container, an idle container, another claim, and an MPS server": {
			claims: []holding.Record{a, b}, containers: known,
			processes: []gpu.Process{process(1, gib, 0.25, true), process(2, gib, 0.125, true), process(3, 3*gib, 0, true), process(9, gib, 0, false)},
			users:     map[int]containers.User{1: one("main", "a"), 2: one("main", "a"), 3: {PodUID: "2", Container: "main", Claims: []string{"b"}}},
			want: `
largest a one/main 1073741824
largest a one/sidecar 0
largest b two/main 3221225472
memory a one/main 2147483648
memory a one/sidecar 0
memory b two/main 3221225472
utilization a one/main 0.375
utilization a one/sidecar 0
utilization b two/main 0
`,
		},
		"utilization that the driver counts as the server's": {
			claims: []holding.Record{a}, containers: known, server: true,
			processes: []gpu.Process{process(1, gib, 0, true), process(9, gib, 0.9, false)},
			users:     map[int]containers.User{1: one("main", "a")},
			want:      "largest a one/main 1073741824\nlargest a one/sidecar 0\nmemory a one/main 1073741824\nmemory a one/sidecar 0\n",
		},
		"time-sliced": {
			claims: []holding.Record{replica}, server: true,
			processes: []gpu.Process{process(1, gib, 0.5, false)},
			users:     map[int]containers.User{1: one("main", "r")},
			want:      "memory r one/main 1073741824\nutilization r one/main 0.5\n",
		},
		"idle, with a kubelet that names no containers": {
			claims: []holding.Record{replica}, processes: []gpu.Process{},
			want: "memory r one/ 0\nutilization r one/ 0\n",
		},
		"a pod that came after the claim was prepared": {
			claims: []holding.Record{replica}, processes: []gpu.Process{process(1, gib, 0.5, false)},
			users: map[int]containers.User{1: {PodUID: "7", Container: "main", Claims: []string{"r"}}},
			want:  "memory r one/ 0\nmemory r pod-7/main 1073741824\nutilization r one/ 0\nutilization r pod-7/main 0.5\n",
		},
		"a container whose claims can't be seen": {
			claims: []holding.Record{replica, b}, processes: []gpu.Process{process(1, gib, 0.5, false)},
			containers: Containers{{Namespace: "team", Name: "b"}: {{Pod: "two", Name: "main"}}},
			users:      map[int]containers.User{1: one("")},
			want:       "largest b two/main 0\nmemory b two/main 0\nmemory r one/ 1073741824\nutilization b two/main 0\nutilization r one/ 0.5\n",
		},
		"two shares of one GPU in one container": {
			claims: []holding.Record{both}, containers: known,
			processes: []gpu.Process{process(1, gib, 0.5, true)},
			users:     map[int]containers.User{1: one("main", "a")},
			want:      "largest a one/sidecar 0\nlargest a one/sidecar 0\nmemory a one/sidecar 0\nmemory a one/sidecar 0\nutilization a one/sidecar 0\nutilization a one/sidecar 0\n",
		},
		"memory and utilization unknown": {
			claims: []holding.Record{replica}, noRates: true,
			processes: []gpu.Process{{PID: 1}},
			users:     map[int]containers.User{1: one("main", "r")},
		},
		"processes unknown": {claims: []holding.Record{replica}},
	} {
		t.Run(name, func(t *testing.T) {
			c := collector(test.containers)
			c.cfg.Containers, c.at.claims = marks, test.claims
			r := Reading{Usage: gpu.Usage{Utilization: new(0.5), Processes: test.processes}, Users: test.users, AttributesMPS: !test.server}
			if test.noRates {
				r.Utilization = nil
			}
			c.at.readings = map[gpu.UUID]Reading{shared: r}
			if got := sharesOf(t, c); got != strings.TrimPrefix(test.want, "\n") {
				t.Errorf("got:\n%swant:\n%s", got, test.want)
			}
		})
	}
}

// sharesOf returns the usage of shares, a line each: "memory (largest, utilization) CLAIM POD/CONTAINER VALUE".
func sharesOf(t *testing.T, c prometheus.Collector) string {
	t.Helper()
	families, err := registryOf(c).Gather()
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, f := range families {
		what, ok := map[string]string{
			"tessera_share_memory_used_bytes": "memory", "tessera_share_process_memory_max_bytes": "largest", "tessera_share_utilization_ratio": "utilization",
		}[f.GetName()]
		if !ok {
			continue
		}
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			value := strconv.FormatFloat(m.GetGauge().GetValue(), 'f', -1, 64)
			lines = append(lines, what+" "+labels["claim"]+" "+labels["pod"]+"/"+labels["container"]+" "+value+"\n")
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}
