package main

import (
	"encoding/csv"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

// wholeGPU is a GPU in thousandths, in which traces count.
const wholeGPU = 1000

// shape is the resources of a node, or the requests of a pod.
type shape struct {
	cpuMilli, memoryMiB, gpus int64
	// milli of each of the GPUs; less than wholeGPU is a share.
	milli int64
}

// total is all of its GPUs, in thousandths.
func (s shape) total() int64 { return s.gpus * s.milli }

// counted is a shape and how often it is there.
type counted struct {
	n int
	shape
}

// trace has the nodes of a cluster and the pods that arrive.
type trace struct{ nodes, pods []shape }

// readTrace reads nodes.csv and pods-NAME.csv of a directory.
func readTrace(dir, name string) (t trace, err error) {
	if t.nodes, err = readShapes(filepath.Join(dir, "nodes.csv"), "gpu"); err != nil {
		return t, err
	}
	t.pods, err = readShapes(filepath.Join(dir, "pods-"+name+".csv"), "num_gpu")
	return t, err
}

// readShapes reads a file of which a column has the number of GPUs. Where there is no
// column gpu_milli, the GPUs are whole.
func readShapes(file, gpus string) (all []shape, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read a trace: %w", err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil || len(rows) == 0 {
		return nil, fmt.Errorf("read the trace %s: %d rows: %w", file, len(rows), err)
	}
	for _, row := range rows[1:] {
		s := shape{milli: wholeGPU}
		for column, to := range map[string]*int64{"cpu_milli": &s.cpuMilli, "memory_mib": &s.memoryMiB, gpus: &s.gpus, "gpu_milli": &s.milli} {
			i := slices.Index(rows[0], column)
			if i < 0 {
				continue
			}
			if *to, err = strconv.ParseInt(row[i], 10, 64); err != nil {
				return nil, fmt.Errorf("read the trace %s: %w", file, err)
			}
		}
		all = append(all, s)
	}
	return all, nil
}

// mixedTrace is as a trace of the same mix.
func mixedTrace(name string) trace {
	return trace{nodes: repeated(mixOfNodes), pods: repeated(mixOfPods[name])}
}

func repeated(mix []counted) (all []shape) {
	for _, c := range mix {
		for range c.n {
			all = append(all, c.shape)
		}
	}
	return all
}

// oneOf returns one of every n nodes, of all shapes alike, and returns their GPUs in
// thousandths. The seed says which.
func (t trace) oneOf(n int, seed uint64) (nodes []shape, capacity int64) {
	sorted := slices.SortedStableFunc(slices.Values(t.nodes), func(a, b shape) int {
		return slices.Compare([]int64{b.gpus, b.cpuMilli, b.memoryMiB}, []int64{a.gpus, a.cpuMilli, a.memoryMiB})
	})
	for i := int(seed % uint64(n)); i < len(sorted); i += n {
		nodes = append(nodes, sorted[i])
		capacity += sorted[i].total()
	}
	return nodes, capacity
}

// arrival is a pod that comes when so many thousandths of GPUs have come before it, and
// ends, if it was placed, when so many have come. Time is counted in these.
type arrival struct {
	shape
	at, end int64
}

// arrivals draws pods, every one of the trace once before one comes twice, until so many
// thousandths of GPUs have come. From a time on they end: each stays for a time that is
// distributed exponentially, from its arrival or from that time.
func (t trace) arrivals(seed uint64, until, ends, stay int64) (all []arrival) {
	random := rand.New(rand.NewPCG(seed, 33))
	for now := int64(0); now < until; {
		for _, i := range random.Perm(len(t.pods)) {
			p := t.pods[i]
			all = append(all, arrival{p, now, max(now, ends) + int64(random.ExpFloat64()*float64(stay))})
			if now += p.total(); now >= until {
				break
			}
		}
	}
	return all
}
