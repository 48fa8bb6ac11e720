//go:build integration

package control_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	stdslices "slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/test/apiserver"
)

// server is an API server of a Kubernetes version.
type server struct {
	kubernetes string
	// gates of Dynamic Resource Allocation: all of the version, or those that are on
	// by default.
	all bool
	// without these.
	off []string
	// api is the only version of resource.k8s.io; empty: those that are on by
	// default, or, where none is, all but alphas.
	api string
}

func (s server) String() string {
	name := s.kubernetes + " with the gates that are on by default"
	if s.all {
		name = s.kubernetes + " with all gates"
	}
	if s.off != nil {
		name += " without " + strings.Join(s.off, ", ")
	}
	return name
}

func (s server) minor() int {
	_, minor, _ := strings.Cut(s.kubernetes, ".")
	n, _ := strconv.Atoi(minor)
	return n
}

func (s server) gates() []string {
	dra := cluster.DRAOn
	if s.all {
		dra = cluster.DRAAll
	}
	return stdslices.DeleteFunc(cluster.Gates(s.kubernetes, dra), func(gate string) bool { return stdslices.Contains(s.off, gate) })
}

// flags of its API server.
func (s server) flags() (featureGates, runtimeConfig string) {
	var gates []string
	for _, gate := range s.gates() {
		gates = append(gates, gate+"=true")
	}
	for _, gate := range s.off {
		gates = append(gates, gate+"=false")
	}
	runtimeConfig = cluster.RuntimeConfig(s.kubernetes, cluster.DRAOn)
	if s.api != "" {
		_, runtimeConfig, _ = strings.Cut(runtimeConfigFor(s.api), "=")
	}
	return strings.Join(gates, ","), runtimeConfig
}

// start runs the rest of the story with this server.
func (s server) start(t *testing.T) *envtest.Environment {
	t.Helper()
	gates, config := s.flags()
	return anotherServer(t, binariesOf(t, s.kubernetes), "feature-gates="+gates, "runtime-config="+config)
}

// replace makes a started server this one, on the same etcd.
func (s server) replace(t *testing.T, env *envtest.Environment) {
	t.Helper()
	gates, config := s.flags()
	if err := apiserver.Upgrade(env, binariesOf(t, s.kubernetes), gates, config); err != nil {
		t.Fatal(err)
	}
}

// abilities follow from the sources of the version, pkg/apis/resource/validation and
// pkg/registry/resource/resourceslice.
func (s server) abilities() (counters publish.Counters, multiple, taints, informationalTaints publish.Answer) {
	has := func(gate string) publish.Answer {
		if stdslices.Contains(s.gates(), gate) {
			return publish.Yes
		}
		return publish.No
	}
	multiple, taints, informationalTaints = has("DRAConsumableCapacity"), has("DRADeviceTaints"), has("DRADeviceTaints")
	if s.minor() < 35 {
		informationalTaints = publish.No
	}
	switch counters = publish.NoCounters; {
	case has("DRAPartitionableDevices") == publish.No:
	case s.minor() < 35:
		counters = publish.JointCounters
	default:
		counters = publish.SplitCounters
	}
	return counters, multiple, taints, informationalTaints
}

// log is how the controller says that it has found all this out.
func (s server) log() string {
	api := strings.ToUpper(s.api[:min(1, len(s.api))]) + s.api[min(1, len(s.api)):]
	switch {
	case api != "":
	case s.minor() <= 32: // of 1.31 translated
		api = "V1beta1"
	case s.minor() == 33:
		api = "V1beta2"
	default:
		api = "V1"
	}
	counters, multiple, taints, informationalTaints := s.abilities()
	return fmt.Sprintf(`resourceAPI=%q counters=%q consumableCapacity=%q taints=%q informationalTaints=%q kubernetes="v%s.`,
		api, counters, multiple, taints, informationalTaints, s.kubernetes)
}

// servers are those of the versions that the test is run for, oldest first, each
// with the gates that are on by default and with all.
func servers() []server {
	var all []server
	for _, version := range apiserver.Versions() {
		all = append(all, server{kubernetes: version})
		if more := (server{kubernetes: version, all: true}); len(more.gates()) != len(all[len(all)-1].gates()) {
			all = append(all, more)
		}
	}
	return all
}

var built = struct {
	sync.Mutex
	dirs map[string]string
}{dirs: map[string]string{apiserver.Newest: ""}}

// binariesOf a version of Kubernetes, which are built if they aren't there.
func binariesOf(t *testing.T, version string) string {
	t.Helper()
	built.Lock()
	defer built.Unlock()
	if dir := built.dirs[version]; dir != "" {
		return dir
	}
	dir := filepath.Join(binaries, version)
	if version == apiserver.Newest {
		dir = binaries
	} else if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	} else if err := apiserver.BinariesOf(context.Background(), version, dir, os.Stderr); err != nil {
		t.Fatal(err)
	}
	built.dirs[version] = dir
	return dir
}

// charges says whether the newest patch release of the version, which the servers
// here are at least, charges counters for devices that are allocated several times.
func (s server) charges() bool { return s.minor() >= 36 }
