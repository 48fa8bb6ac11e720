// Package labels keeps labels about GPUs on Nodes, those of GPU Feature Discovery, or removes them
// again. Labels that somebody else has written stay as they are.
package labels

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// prefix starts the key of each of them.
const prefix = "nvidia.com/"

// keys returns the keys, without the prefix, that OfNode may use.
func keys() []string {
	return []string{
		"gpu.present", "gpu.product", "gpu.count", "gpu.memory", "gpu.family", "gpu.compute.major", "gpu.compute.minor", "mig.capable",
		"cuda.driver.major", "cuda.driver.minor", "cuda.driver.rev",
		"cuda.driver-version.major", "cuda.driver-version.minor", "cuda.driver-version.revision", "cuda.driver-version.full",
		"cuda.runtime.major", "cuda.runtime.minor",
		"cuda.runtime-version.major", "cuda.runtime-version.minor", "cuda.runtime-version.full",
	}
}

// AboutGPUs reports whether a Node has labels that OfNode may use.
func AboutGPUs(node client.Object) bool {
	return slices.ContainsFunc(keys(), func(key string) bool { _, has := node.GetLabels()[prefix+key]; return has })
}

// OfNode returns the labels that GPU Feature Discovery (NVIDIA/k8s-device-plugin,
// internal/lm) would set on a node with these GPUs, in the same form. Where the
// node has several models they are about the one with the most GPUs, or else the
// lowest index. A GPU that is lost counts as gone.
func OfNode(n gpu.Node) labels.Set {
	g, count := mainModel(n.GPUs)
	if count == 0 {
		return nil
	}
	out := labels.Set{}
	set := func(key, value string) { out[prefix+key] = value }
	set("gpu.present", "true")
	set("gpu.product", valueOf(g.Model.ProductName))
	set("gpu.count", strconv.Itoa(count))
	if mib := g.MemoryBytes >> 20; mib > 0 {
		set("gpu.memory", strconv.FormatInt(mib, 10))
	}
	set("mig.capable", strconv.FormatBool(slices.ContainsFunc(n.GPUs, func(g gpu.GPU) bool { return g.MIG != nil })))
	if major, minor, ok := twoNumbers(g.Model.CUDAComputeCapability); ok {
		set("gpu.family", family(major, minor))
		set("gpu.compute.major", strconv.Itoa(major))
		set("gpu.compute.minor", strconv.Itoa(minor))
	}
	if v := strings.Split(n.DriverVersion, "."); len(v) == 2 || len(v) == 3 {
		v = append(v, "")
		for key, value := range map[string]string{
			"driver.major": v[0], "driver.minor": v[1], "driver.rev": v[2], "driver-version.major": v[0], "driver-version.minor": v[1],
			"driver-version.revision": v[2], "driver-version.full": n.DriverVersion,
		} {
			set("cuda."+key, valueOf(value))
		}
	}
	if major, minor, ok := twoNumbers(n.CUDADriverVersion); ok {
		for _, key := range []string{"cuda.runtime", "cuda.runtime-version"} {
			set(key+".major", strconv.Itoa(major))
			set(key+".minor", strconv.Itoa(minor))
		}
		set("cuda.runtime-version.full", fmt.Sprintf("%d.%d", major, minor))
	}
	return out
}

// mainModel returns a GPU of the model that the labels are about, and how many
// there are.
func mainModel(gpus []gpu.GPU) (main gpu.GPU, most int) {
	lost := func(c gpu.Condition) bool { return c.Type == gpu.Lost }
	count := make(map[string]int)
	for _, g := range gpus {
		if !slices.ContainsFunc(g.Conditions, lost) {
			count[g.Model.ProductName]++
		}
	}
	byIndex := slices.SortedStableFunc(slices.Values(gpus), func(a, b gpu.GPU) int { return cmp.Compare(a.Index, b.Index) })
	for _, g := range byIndex {
		if n := count[g.Model.ProductName]; n > most && !slices.ContainsFunc(g.Conditions, lost) {
			main, most = g, n
		}
	}
	return main, most
}

// valueOf writes a name as a label's value: words joined by dashes, without
// characters that a value must not have.
func valueOf(s string) string {
	s = regexp.MustCompile(`[^A-Za-z0-9-_. ]`).ReplaceAllString(s, "")
	s = strings.Join(strings.Fields(s), "-")
	return strings.Trim(s[:min(len(s), 63)], "-_.")
}

func twoNumbers(version string) (major, minor int, ok bool) {
	a, b, _ := strings.Cut(version, ".")
	major, err := strconv.Atoi(a)
	if err != nil || major <= 0 {
		return 0, 0, false
	}
	minor, err = strconv.Atoi(b)
	return major, minor, err == nil
}

// family names the architecture of a compute capability as the label does.
func family(major, minor int) string {
	switch {
	case major == 7 && minor >= 5:
		return "turing"
	case major == 8 && minor >= 9:
		return "ada-lovelace"
	case major == 10 || major == 12:
		return "blackwell"
	}
	if name, ok := map[int]string{3: "kepler", 5: "maxwell", 6: "pascal", 7: "volta", 8: "ampere", 9: "hopper"}[major]; ok {
		return name
	}
	return "undefined"
}
