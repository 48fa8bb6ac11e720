//go:build nvidia

package nvidia

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/control/labels"
	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// hook is the path of nvidia-cdi-hook in specifications; nothing runs it.
const hook = "/usr/bin/nvidia-cdi-hook"

// host is a simulated machine with NVIDIA's programs and an open session.
type host struct {
	nodetest.Driver
	tools   string
	root    driverroot.Root
	session *nvml.Session
	version nvml.Driver
	gpus    []gpu.GPU
}

// installed is the machine of this process: it can load one library only.
var installed struct {
	nodetest.Driver
	tools string
}

func TestMain(m *testing.M) {
	tools, err := os.MkdirTemp("", "nvidia-tools-")
	if err == nil {
		defer os.RemoveAll(tools)
		var out []byte
		if out, err = exec.Command("go", "build", "-C", "tools", "-o", tools, "tool").CombinedOutput(); err != nil {
			err = fmt.Errorf("build NVIDIA's programs: %w\n%s", err, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	installed.tools = tools
	os.Exit(nodetest.Run(m, "{gpus: [{model: h100-80gb, count: 2}, {model: h100-80gb, migEnabled: true}]}",
		func(d nodetest.Driver) { installed.Driver = d }))
}

func open(t *testing.T) *host {
	t.Helper()
	h := &host{Driver: installed.Driver, tools: installed.tools}
	var err error
	if h.root, err = driverroot.Find(driverroot.NewHost(h.Host), ""); err != nil {
		t.Fatal(err)
	}
	if h.session, err = nvml.Open(driverroot.NewHost(h.Host).Path(h.root.Library)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.session.Close(); err != nil {
			t.Error(err)
		}
	})
	if h.version, err = h.session.Driver(); err != nil {
		t.Fatal(err)
	}
	h.read(t)
	return h
}

// read reads the GPUs again.
func (h *host) read(t *testing.T) {
	t.Helper()
	var err error
	if h.gpus, err = h.session.GPUs(); err != nil {
		t.Fatal(err)
	}
}

// run runs one of NVIDIA's programs as on the simulated host: with its library, its /sys,
// and its /proc/driver. The program's errors and warnings of files that it can't read fail the test.
func (h *host) run(t *testing.T, program string, args ...string) {
	t.Helper()
	root := filepath.Join(h.Host, h.Root)
	script := `mount --bind "$0/sys" /sys && mount --bind "$0/proc/driver" /proc/driver && exec "$@"`
	c := exec.CommandContext(t.Context(), "sh", append([]string{"-c", script, root, filepath.Join(h.tools, program)}, args...)...)
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	c.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(filepath.Join(h.Host, h.root.Library)))
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", program, err, out)
	}
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "/sys/bus/pci") && !strings.Contains(line, "vfio-dev") { // the GPUs aren't bound to vfio
			t.Errorf("%s: %s", program, line)
		}
	}
}

// labels returns the labels of GPU Feature Discovery with a MIG strategy, none or mixed.
func (h *host) labels(t *testing.T, strategy string) map[string]string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "labels")
	h.run(t, "gpu-feature-discovery", "--oneshot", "--no-timestamp", "--output-file="+file, "--mig-strategy="+strategy,
		"--driver-root-ctr-path="+filepath.Join(h.Host, h.Root))
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	labels := map[string]string{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), "=")
		labels[key] = value
	}
	return labels
}

// TestLabels compares the labels of a node that Tessera writes with those of GPU Feature
// Discovery: each has the same value. Labels that Tessera doesn't write are on the
// migration page.
func TestLabels(t *testing.T) {
	h := open(t)
	theirs := h.labels(t, "none")
	ours := labels.OfNode(gpu.Node{Name: "node-0", DriverVersion: h.version.Version, CUDADriverVersion: h.version.CUDAVersion, GPUs: h.gpus})
	for key, value := range ours {
		if theirs[key] != value && key != "nvidia.com/gpu.present" { // a rule of Node Feature Discovery writes it

			t.Errorf("%s: Tessera writes %q, GPU Feature Discovery %q", key, value, theirs[key])
		}
	}
	page, err := os.ReadFile("../../docs/user/migrate.md")
	if err != nil {
		t.Fatal(err)
	}
	for key := range theirs {
		if _, has := ours[key]; !has && !strings.Contains(string(page), "`"+key+"`") {
			t.Errorf("GPU Feature Discovery writes %s, Tessera doesn't, and docs/user/migrate.md doesn't say so", key)
		}
	}
}

// TestPartitions compares partitions that Tessera created with those that NVIDIA's programs find.
func TestPartitions(t *testing.T) {
	h := open(t)
	divided := h.gpus[2]
	var made []gpu.Instance
	for _, profile := range []string{"1g.20gb", "2g.20gb"} {
		i := slices.IndexFunc(divided.MIG.Profiles, func(p gpu.Profile) bool { return p.Name == profile })
		p := divided.MIG.Profiles[i]
		instance, err := h.session.CreateInstance(gpu.Partition{GPU: divided.UUID, Profile: profile, Placement: p.Placements[len(p.Placements)-1]})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := h.session.DestroyInstance(divided.UUID, instance); err != nil {
				t.Error(err)
			}
		})
		made = append(made, instance)
	}
	labels := h.labels(t, "mixed")
	for _, instance := range made {
		i := slices.IndexFunc(divided.MIG.Profiles, func(p gpu.Profile) bool { return p.Name == instance.Profile })
		e, prefix := divided.MIG.Profiles[i].Engines, "nvidia.com/mig-"+instance.Profile+"."
		for label, want := range map[string]int{
			"count": 1, "multiprocessors": e.Multiprocessors, "engines.copy": e.CopyEngines, "engines.decoder": e.Decoders,
			"engines.encoder": e.Encoders, "engines.jpeg": e.JPEGEngines, "engines.ofa": e.OFAEngines,
		} {
			if labels[prefix+label] != fmt.Sprint(want) {
				t.Errorf("%s%s: GPU Feature Discovery writes %q, Tessera has %d", prefix, label, labels[prefix+label], want)
			}
		}
	}
	devices := h.theirs(t).Devices
	for _, instance := range made {
		if !slices.ContainsFunc(devices, func(d specs.Device) bool { return d.Name == string(instance.UUID) }) {
			t.Errorf("nvidia-ctk doesn't list %s of %s", instance.UUID, instance.Profile)
		}
	}
}

// theirs returns the CDI specification of nvidia-ctk.
func (h *host) theirs(t *testing.T) specs.Spec {
	t.Helper()
	file := filepath.Join(t.TempDir(), "cdi.json")
	root := filepath.Join(h.Host, h.Root)
	h.run(t, "nvidia-ctk", "cdi", "generate", "--mode=nvml", "--driver-root="+root, "--nvidia-cdi-hook-path="+hook, "--format=json",
		"--device-name-strategy=uuid", "--output="+file)
	return decode(t, file)
}

func decode(t *testing.T, file string) specs.Spec {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		t.Fatal(err)
	}
	return spec
}

// TestCDI compares the device nodes and mounts of a container with each GPU by Tessera's
// specifications with those by nvidia-ctk's.
func TestCDI(t *testing.T) {
	h := open(t)
	theirs := h.theirs(t)
	dir := t.TempDir()
	ours := cdi.New(cdi.Config{Dir: dir, HookPath: hook, Host: driverroot.NewHost(h.Host)})
	err := ours.SetDriver(&cdi.Driver{
		Version: h.version.Version, Root: h.root.Path, DevRoot: h.root.DevRoot, ProcRoot: h.root.ProcRoot, GPUs: h.gpus, Session: h.session,
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range h.gpus {
		if g.MIG != nil && g.MIG.Enabled { // only its partitions are devices
			continue
		}
		name := h.Names()[i]
		claim := fmt.Sprintf("claim-%d", i)
		if _, err := ours.Write(holding.Realized{Record: holding.Record{ClaimUID: claim, Holdings: []holding.Holding{holding.New(name, gpu.Whole{GPU: g.UUID})}}}); err != nil {
			t.Fatal(err)
		}
		files, err := filepath.Glob(filepath.Join(dir, "*.json"))
		if err != nil || len(files) != 2 {
			t.Fatalf("files %v, error %v", files, err)
		}
		var both []specs.ContainerEdits
		for _, file := range files {
			spec := decode(t, file)
			both = append(both, spec.ContainerEdits)
			for _, d := range spec.Devices {
				both = append(both, d.ContainerEdits)
			}
		}
		at := slices.IndexFunc(theirs.Devices, func(d specs.Device) bool { return d.Name == string(g.UUID) })
		if at < 0 {
			t.Errorf("nvidia-ctk doesn't list %s", g.UUID)
			continue
		}
		want, got := paths(theirs.ContainerEdits, theirs.Devices[at].ContainerEdits), paths(both...)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("GPU %d: (-nvidia-ctk +Tessera):\n%s", i, diff)
		}
		if err := ours.Remove(claim); err != nil {
			t.Fatal(err)
		}
	}
}

// paths returns the paths of the device nodes and mounts in the container.
func paths(all ...specs.ContainerEdits) []string {
	var paths []string
	for _, edits := range all {
		for _, n := range edits.DeviceNodes {
			paths = append(paths, n.Path)
		}
		for _, m := range edits.Mounts {
			paths = append(paths, m.ContainerPath)
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}
