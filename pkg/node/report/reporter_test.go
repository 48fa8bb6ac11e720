package report_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/report"
)

var quantity = resource.MustParse

var h100 = gpu.GPU{
	UUID: "GPU-980fb007-8a10-0135-bada-13f71feaef21", PCI: "0000:07:00.0",
	Model: gpu.Model{ProductName: "NVIDIA H100 80GB HBM3"}, MemoryBytes: 80 << 30,
}

func node(gpus ...gpu.GPU) gpu.Node {
	return gpu.Node{Name: "node-0", DriverVersion: "580.159.04", CUDADriverVersion: "13.0", GPUs: gpus}
}

// reporting is a reporter with its facts and its log.
type reporting struct {
	*report.Reporter
	*facts.Facts
	logged func() string
}

// start runs a reporter until the test ends, or stop is called.
func start(t *testing.T, s *server) (r reporting, stop func()) {
	t.Helper()
	return startWith(t, report.Config{BootID: "boot", REST: s.config()})
}

func startWith(t *testing.T, cfg report.Config) (r reporting, stop func()) {
	t.Helper()
	cfg.NodeName, cfg.PluginVersion, cfg.Facts = "node-0", "v1", facts.New("node-0")
	reporter, err := report.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	r = reporting{Reporter: reporter, Facts: cfg.Facts, logged: logger.GetSink().(ktesting.Underlier).GetBuffer().String}
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := r.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return r, stop
}

// TestReportOfThePluginBefore checks that an earlier report can be read.
func TestReportOfThePluginBefore(t *testing.T) {
	s := newServer(t)
	before, stop := start(t, s)
	if inv, err := before.Get(t.Context()); inv != nil || err != nil {
		t.Errorf("without a report: %v, error %v", inv, err)
	}
	before.Found(node(h100))
	if err := before.WaitReported(t.Context()); err != nil {
		t.Fatal(err)
	}
	stop()
	r, _ := start(t, s)
	inv, err := r.Get(t.Context())
	if err != nil || inv == nil || inv.Status.BootID != "boot" {
		t.Fatalf("the report before: %v, error %v, want that of boot %q", inv, err, "boot")
	}
	if diff := cmp.Diff([]gpu.GPU{h100}, inventory.Node(inv).GPUs); diff != "" {
		t.Errorf("GPUs (-reported +got):\n%s", diff)
	}
	s.setAway(true)
	if inv, err := r.Get(t.Context()); err == nil {
		t.Errorf("while the server is away: %v, want an error", inv)
	}
}

// eventually waits until the inventory is as wanted.
func eventually(t *testing.T, s *server, what string, holds func(*v1alpha1.GPUInventory) bool) *v1alpha1.GPUInventory {
	t.Helper()
	for range 6000 {
		if inv, _ := s.get(); inv != nil && holds(inv) {
			return inv
		}
		<-time.After(10 * time.Millisecond)
	}
	inv, _ := s.get()
	t.Fatalf("%s doesn't come to hold: %+v", what, inv)
	return nil
}

func ready(reason string) func(*v1alpha1.GPUInventory) bool {
	return func(inv *v1alpha1.GPUInventory) bool {
		c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionReady)
		return c != nil && c.Reason == reason
	}
}

func TestReport(t *testing.T) {
	s := newServer(t)
	r, _ := start(t, s)
	r.Found(node(h100))
	if err := r.WaitReported(t.Context()); err != nil {
		t.Fatal(err)
	}
	inv := eventually(t, s, "a report before registration", ready(report.ReasonNotRegistered))
	if inv.Status.RegisteredAt != nil {
		t.Error("the plugin says it is registered before it is")
	}
	if len(inv.OwnerReferences) != 1 || inv.OwnerReferences[0].UID != "node-uid" {
		t.Errorf("owner is %v, want the Node", inv.OwnerReferences)
	}
	if s := inv.Status; s.GPUCount != 1 || s.DriverVersion != "580.159.04" || s.BootID != "boot" || s.PluginVersion != "v1" {
		t.Errorf("status %+v", s)
	}
	r.SetRegistered()
	inv = eventually(t, s, "registration", ready(report.ReasonRegistered))
	if inv.Status.RegisteredAt == nil {
		t.Error("registered, but no time")
	}

	lost := h100
	lost.Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "fell off the bus"}}
	r.Found(node(lost))
	eventually(t, s, "a lost GPU", func(inv *v1alpha1.GPUInventory) bool { return len(inv.Status.GPUs[0].Conditions) == 1 })

	unidentified := func(want string) func(*v1alpha1.GPUInventory) bool {
		return func(inv *v1alpha1.GPUInventory) bool {
			c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionUnidentifiedGPUs)
			return c == nil && want == "" || c != nil && c.Status == metav1.ConditionTrue && c.Message == want
		}
	}
	r.SetListing(facts.Listing{Listed: 2, Identified: 1, Message: "nvmlDeviceGetUUID of GPU 1: Unknown Error"})
	r.Found(node(lost))
	eventually(t, s, "a GPU that isn't identified", unidentified("NVML lists 2 GPUs, 1 are identified: nvmlDeviceGetUUID of GPU 1: Unknown Error"))
	r.SetListing(facts.Listing{Listed: 2, Identified: 2})
	r.Found(node(lost))
	eventually(t, s, "all GPUs identified", unidentified(""))

	r.Missing(facts.ReasonDriverNotFound, "no driver under /")
	eventually(t, s, "a driver that went away", func(inv *v1alpha1.GPUInventory) bool {
		return ready(facts.ReasonDriverNotFound)(inv) && inv.Status.GPUCount == 0
	})
}

func TestNothingIsWrittenWithoutNeed(t *testing.T) {
	s := newServer(t)
	r, stop := start(t, s)
	r.Found(node(h100))
	r.SetRegistered()
	eventually(t, s, "registration", ready(report.ReasonRegistered))
	_, before := s.get()
	for range 10 {
		r.Found(node(h100))
	}
	s.request(1) // the answer shows that all before it has been looked at
	eventually(t, s, "the answer", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.PublishResponse == 1 })
	if _, after := s.get(); after != before+1 {
		t.Errorf("%d writes, want 1, the answer", after-before)
	}
	stop()

	// The next plugin finds the object as its predecessor left it.
	_, before = s.get()
	r, _ = start(t, s)
	r.Found(node(h100))
	if err := r.WaitReported(t.Context()); err != nil {
		t.Fatal(err)
	}
	if inv, after := s.get(); after != before || !ready(report.ReasonRegistered)(inv) {
		t.Errorf("a restart wrote %d times, want 0 before registration", after-before)
	}
}

func TestOnlyARegisteredPluginAnswers(t *testing.T) {
	s := newServer(t)
	r, _ := start(t, s)
	r.Found(node(h100))
	if err := r.WaitReported(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.request(7)
	lost := h100
	lost.Conditions = []gpu.Condition{{Type: gpu.Lost}}
	r.Found(node(lost)) // a change that shows that the request was seen
	inv := eventually(t, s, "a change", func(inv *v1alpha1.GPUInventory) bool { return len(inv.Status.GPUs[0].Conditions) == 1 })
	if inv.Status.PublishResponse != 0 {
		t.Error("a plugin that isn't registered has answered")
	}
	r.SetRegistered()
	eventually(t, s, "the answer", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.PublishResponse == 7 })
	s.request(8)
	eventually(t, s, "the next answer", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.PublishResponse == 8 })
}

func TestObjectDeleted(t *testing.T) {
	s := newServer(t)
	r, _ := start(t, s)
	r.Found(node(h100))
	r.SetRegistered()
	first := eventually(t, s, "registration", ready(report.ReasonRegistered))
	s.remove()
	second := eventually(t, s, "the object's return", ready(report.ReasonRegistered))
	if first.UID == second.UID {
		t.Error("the object wasn't deleted")
	}
}

func TestServerAway(t *testing.T) {
	s := newServer(t)
	s.setAway(true)
	r, _ := start(t, s)
	r.Found(node(h100))
	names, err := gpu.NewNames([]gpu.GPU{h100})
	if err != nil {
		t.Fatal(err)
	}
	name, _ := names.Name(gpu.Whole{GPU: h100.UUID})
	if _, g, err := r.Device(name); err != nil || g.UUID != h100.UUID {
		t.Errorf("without an API server: device %v, %v", g, err)
	}
	s.setAway(false)
	eventually(t, s, "the report", ready(report.ReasonNotRegistered))
}

// NVIDIA's device plugin offers MIG devices and time-sliced replicas under names of
// their own; other plugins of NVIDIA offer devices that aren't GPUs.
func TestDevicePluginResources(t *testing.T) {
	for name, want := range map[corev1.ResourceName]string{
		"nvidia.com/gpu": "True", "nvidia.com/gpu.shared": "True", "nvidia.com/mig-1g.10gb": "True", "nvidia.com/mig-1g.10gb.shared": "True",
		"nvidia.com/hostdev": "False", "nvidia.com/gpumem": "False", "example.com/gpu": "False", "cpu": "False",
	} {
		t.Run(string(name), func(t *testing.T) {
			s := newServer(t)
			s.allocatable(name, "8")
			r, _ := start(t, s)
			r.Found(node(h100))
			inv := eventually(t, s, "a report", func(inv *v1alpha1.GPUInventory) bool {
				return meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionConflicting) != nil
			})
			c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionConflicting)
			if string(c.Status) != want || (want == "True") != strings.Contains(c.Message, "a device plugin offers 8 "+string(name)+" on node") {
				t.Errorf("condition %+v, want status %s", c, want)
			}
		})
	}
}

func TestDevicePlugin(t *testing.T) {
	s := newServer(t)
	s.allocatable("nvidia.com/gpu", "8")
	r, _ := start(t, s)
	r.Found(node(h100))
	inv := eventually(t, s, "the conflict", ready(report.ReasonConflicting))
	c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionConflicting)
	if c.Status != "True" || !strings.Contains(c.Message, "remove the NVIDIA device plugin") {
		t.Errorf("condition %+v doesn't say what to remove", c)
	}
	if err := r.MayPrepare(); err == nil || !strings.Contains(err.Error(), "remove the NVIDIA device plugin") {
		t.Errorf("preparing beside a device plugin: %v, want an error that says what to remove", err)
	}
	r.SetRegistered()
	inv = eventually(t, s, "the registration", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.RegisteredAt != nil })
	if !ready(report.ReasonConflicting)(inv) {
		t.Errorf("registered beside a device plugin, the conditions are %+v, want the conflict", inv.Status.Conditions)
	}
	s.allocatable("nvidia.com/gpu", "0") // what a device plugin leaves behind
	eventually(t, s, "the conflict's end", ready(report.ReasonRegistered))
	if err := r.MayPrepare(); err != nil {
		t.Error(err)
	}
}

func TestConditionsKeepTheirTime(t *testing.T) {
	s := newServer(t)
	r, _ := start(t, s)
	r.Found(node(h100))
	r.SetRegistered()
	first := eventually(t, s, "registration", ready(report.ReasonRegistered))
	r.SetRegistered() // the kubelet has restarted
	second := eventually(t, s, "the next registration", func(inv *v1alpha1.GPUInventory) bool {
		return !inv.Status.RegisteredAt.Equal(first.Status.RegisteredAt)
	})
	if diff := cmp.Diff(first.Status.Conditions, second.Status.Conditions); diff != "" {
		t.Errorf("conditions changed with nothing to tell (-first +second):\n%s", diff)
	}
}
