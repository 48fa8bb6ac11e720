package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/test/stack"
)

// sample has the values that could grow, by the name of their series, at a time since the
// beginning. A value that couldn't be read is missing.
type sample struct {
	at     time.Duration
	values map[string]float64
}

// The columns of the data: each of metrics for each of programs, and counts.
var (
	programs = []string{"plugin node-0", "plugin node-1", "controller"}
	metrics  = map[string]string{"MiB": "process_resident_memory_bytes", "goroutines": "go_goroutines", "open files": "process_open_fds"}
	counts   = []string{"pods ended", "slices", "journal and CDI files node-0", "journal and CDI files node-1"}
)

// columns lists the series in a fixed order.
func columns() []string {
	var all []string
	for _, what := range []string{"MiB", "goroutines", "open files"} {
		for _, p := range programs {
			all = append(all, p+" "+what)
		}
	}
	return append(all, counts...)
}

// watch takes a sample every ten seconds.
func (r *soak) watch(ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		s := r.sample(ctx)
		r.mu.Lock()
		r.samples = append(r.samples, s)
		made := len(r.faults)
		r.mu.Unlock()
		if n%6 == 0 {
			say(r.out, "%v of %v: %d pods have ended, %d faults", s.at.Round(time.Second), r.length, r.pods.ended.Load(), made)
		}
		sleep(ctx, 10*time.Second)
	}
}

func (r *soak) sample(ctx context.Context) sample {
	s := sample{at: time.Since(r.start), values: map[string]float64{"pods ended": float64(r.pods.ended.Load())}}
	if list, err := r.stack.Slices(ctx); err == nil {
		s.values["slices"] = float64(len(list))
	}
	for _, node := range r.stack.Cluster.Nodes() {
		r.program(ctx, s, "plugin "+node, "node", node)
		if records, specs, err := r.files(ctx, node); err == nil {
			s.values["journal and CDI files "+node] = float64(records + specs)
		}
	}
	r.program(ctx, s, "controller", "controller", "")
	return s
}

// program reads the metrics of a pod's program into a sample.
func (r *soak) program(ctx context.Context, s sample, name, component, node string) {
	pod, err := r.pod(ctx, component, node)
	if err != nil {
		return
	}
	port := "8081"
	if component == "controller" {
		port = "8080"
	}
	text, err := r.stack.Kubectl(ctx, "get", "--raw", fmt.Sprintf("/api/v1/namespaces/%s/pods/%s:%s/proxy/metrics", stack.Namespace, pod, port))
	if err != nil {
		return
	}
	for what, metric := range metrics {
		m := regexp.MustCompile(`(?m)^` + metric + ` (\S+)$`).FindStringSubmatch(text)
		if m == nil {
			continue
		}
		if v, err := strconv.ParseFloat(m[1], 64); err == nil {
			if what == "MiB" {
				v /= 1 << 20
			}
			s.values[name+" "+what] = v
		}
	}
}

// pod is the name of the pod of a component, on a node unless that is empty.
func (r *soak) pod(ctx context.Context, component, node string) (string, error) {
	o := metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=" + component}
	if node != "" {
		o.FieldSelector = "spec.nodeName=" + node
	}
	list, err := r.stack.Kube().CoreV1().Pods(stack.Namespace).List(ctx, o)
	if err != nil {
		return "", err
	}
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			return p.Name, nil
		}
	}
	return "", fmt.Errorf("no pod of %s on %q", component, node)
}

// files counts the records of the journal and the CDI specs of claims on a node. States of
// GPUs with which something is wrong aren't claims'.
func (r *soak) files(ctx context.Context, node string) (records, specs int, err error) {
	records, err1 := r.lines(ctx, node, `find /var/lib/tessera -name "*.json" ! -path "*/health/*" ! -path "*/seen/*" ! -path "*/settings/*"`)
	specs, err2 := r.lines(ctx, node, `find /var/run/cdi -name "*claim_*"`)
	return records, specs, errors.Join(err1, err2)
}

func (r *soak) lines(ctx context.Context, node, script string) (int, error) {
	out, err := r.stack.Cluster.Exec(ctx, node, "sh", "-c", script)
	return strings.Count(string(out), "\n"), err
}

// checkGrowth checks that the programs that were left alone are as large in the last quarter of
// the time as in the third one.
func (r *soak) checkGrowth() error {
	var all []error
	for _, p := range []string{"plugin node-1", "controller"} {
		for what, more := range map[string]float64{"MiB": 6, "goroutines": 15, "open files": 10} {
			name := p + " " + what
			before, after := r.median(name, 2), r.median(name, 3)
			say(r.out, "%s: %.0f in the third quarter, %.0f in the last", name, before, after)
			if math.IsNaN(before) || math.IsNaN(after) || after > before*1.05+more {
				all = append(all, fmt.Errorf("%s grew from %.0f to %.0f", name, before, after))
			}
		}
	}
	return errors.Join(all...)
}

// median of a series in a quarter of the time, 0 to 3; NaN without any sample.
func (r *soak) median(name string, quarter int) float64 {
	var values []float64
	for _, s := range r.samples {
		v, ok := s.values[name]
		if ok && min(int(4*s.at/r.length), 3) == quarter {
			values = append(values, v)
		}
	}
	if len(values) == 0 {
		return math.NaN()
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// csv is the data as a table: seconds, and a column a series, empty where there is no value.
func csv(samples []sample) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "seconds,%s\n", strings.Join(columns(), ","))
	for _, s := range samples {
		fmt.Fprintf(&b, "%.0f", s.at.Seconds())
		for _, name := range columns() {
			b.WriteByte(',')
			if v, ok := s.values[name]; ok {
				fmt.Fprintf(&b, "%.1f", v)
			}
		}
		b.WriteByte('\n')
	}
	return b.Bytes()
}
