package labels

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/undone"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestNodeLabels: keys and forms are those of GPU Feature Discovery.
func TestNodeLabels(t *testing.T) {
	of := func(product, capability string, mib int64) gpu.GPU {
		return gpu.GPU{Model: gpu.Model{ProductName: product, CUDAComputeCapability: capability}, MemoryBytes: mib << 20}
	}
	h100 := of("NVIDIA H100 80GB HBM3", "9.0", 81559)
	h100.MIG = &gpu.MIG{}
	h100On := h100
	h100On.Index = 1
	lost := of("Tesla T4", "7.5", 15360)
	lost.Conditions = []gpu.Condition{{Type: gpu.Lost}}
	odd := of("NVIDIA RTX PRO 6000 Blackwell (Max-Q) "+strings.Repeat("x", 80), "12.0", 0)
	versions := "cuda.driver.major=580 cuda.driver.minor=159 cuda.driver.rev=04 cuda.driver-version.major=580 cuda.driver-version.minor=159 " +
		"cuda.driver-version.revision=04 cuda.driver-version.full=580.159.04 cuda.runtime.major=13 cuda.runtime.minor=0 " +
		"cuda.runtime-version.major=13 cuda.runtime-version.minor=0 cuda.runtime-version.full=13.0 "
	for name, tc := range map[string]struct {
		node gpu.Node
		want string
	}{
		"two H100s": {gpu.Node{DriverVersion: "580.159.04", CUDADriverVersion: "13.0", GPUs: []gpu.GPU{h100, h100On}}, versions +
			"gpu.present=true gpu.product=NVIDIA-H100-80GB-HBM3 gpu.count=2 gpu.memory=81559 gpu.family=hopper gpu.compute.major=9 gpu.compute.minor=0 mig.capable=true"},
		"driver without a revision": {gpu.Node{DriverVersion: "580.95", GPUs: []gpu.GPU{of("NVIDIA L4", "8.9", 23034)}},
			"cuda.driver.major=580 cuda.driver.minor=95 cuda.driver.rev= cuda.driver-version.major=580 cuda.driver-version.minor=95 " +
				"cuda.driver-version.revision= cuda.driver-version.full=580.95 " +
				"gpu.present=true gpu.product=NVIDIA-L4 gpu.count=1 gpu.memory=23034 gpu.family=ada-lovelace gpu.compute.major=8 gpu.compute.minor=9 mig.capable=false"},
		"several models, and a lost one": {gpu.Node{GPUs: []gpu.GPU{lost, lost, of("Tesla V100", "7.0", 1), of("Tesla T4", "7.5", 15360), of("Tesla T4", "7.5", 15360)}},
			"gpu.present=true gpu.product=Tesla-T4 gpu.count=2 gpu.memory=15360 gpu.family=turing gpu.compute.major=7 gpu.compute.minor=5 mig.capable=false"},
		"a name that is no label": {gpu.Node{GPUs: []gpu.GPU{odd}},
			"gpu.present=true gpu.product=NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-" + strings.Repeat("x", 27) +
				" gpu.count=1 gpu.family=blackwell gpu.compute.major=12 gpu.compute.minor=0 mig.capable=false"},
		"no GPU":         {gpu.Node{DriverVersion: "580.159.04"}, ""},
		"only lost GPUs": {gpu.Node{GPUs: []gpu.GPU{lost}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			want := labels.Set{}
			for word := range strings.FieldsSeq(tc.want) {
				key, value, _ := strings.Cut(word, "=")
				want["nvidia.com/"+key] = value
			}
			got := OfNode(tc.node)
			if diff := cmp.Diff(maps.Collect(maps.All(want)), maps.Collect(maps.All(got))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			for key, value := range got {
				if e := validation.IsValidLabelValue(value); len(e) > 0 || !slices.Contains(keys(), strings.TrimPrefix(key, "nvidia.com/")) {
					t.Errorf("%s=%s: %v", key, value, e)
				}
			}
		})
	}
}

func request(node string) reconcile.Request {
	return reconcile.Request{NamespacedName: client.ObjectKey{Name: node}}
}

func labelsOf(t *testing.T, api client.Client, node string) map[string]string {
	t.Helper()
	n := &corev1.Node{}
	if err := api.Get(t.Context(), client.ObjectKey{Name: node}, n); err != nil {
		t.Fatal(err)
	}
	out := make(map[string]string)
	for key, value := range n.Labels {
		if short, ok := strings.CutPrefix(key, "nvidia.com/gpu."); ok {
			out[short] = value
		}
	}
	return out
}

// label sets a label as somebody else does; an empty value removes it.
func label(t *testing.T, api client.Client, node, key, value string) {
	t.Helper()
	n := &corev1.Node{}
	if err := api.Get(t.Context(), client.ObjectKey{Name: node}, n); err != nil {
		t.Fatal(err)
	}
	if n.Labels == nil {
		n.Labels = make(map[string]string)
	}
	n.Labels["nvidia.com/gpu."+key] = value
	if value == "" {
		delete(n.Labels, "nvidia.com/gpu."+key)
	}
	if err := api.Update(t.Context(), n, client.FieldOwner("somebody")); err != nil {
		t.Fatal(err)
	}
}

// TestLabelsOfGPUFeatureDiscovery: each label of GPU Feature Discovery (NVIDIA/k8s-device-plugin,
// internal/lm and docs/gfd_labels.md) is written here, or the page about migration names it.
func TestLabelsOfGPUFeatureDiscovery(t *testing.T) {
	page, err := os.ReadFile("../../../docs/user/migrate.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(page), "### Node selectors")
	section, _, _ = strings.Cut(section, "\n### ")
	if !found {
		t.Fatal("the page has no section about node selectors")
	}
	for _, key := range []string{
		"gpu.present", "gpu.product", "gpu.count", "gpu.memory", "gpu.family", "gpu.compute.major", "gpu.compute.minor", "mig.capable",
		"cuda.driver.major", "cuda.driver.minor", "cuda.driver.rev", "cuda.runtime.major", "cuda.runtime.minor",
		"cuda.driver-version.major", "cuda.driver-version.minor", "cuda.driver-version.revision", "cuda.driver-version.full",
		"cuda.runtime-version.major", "cuda.runtime-version.minor", "cuda.runtime-version.full",
		"gpu.replicas", "gpu.sharing-strategy", "mps.capable", "mig.strategy", "mig-1g.10gb.", "gpu.multiprocessors", "gpu.slices.gi", "gpu.slices.ci",
		"gpu.engines.", "gpu.mode", "gpu.machine", "gpu.clique", "gpu.imex-domain", "vgpu.present", "vgpu.host-driver-version",
		"vgpu.host-driver-branch", "gfd.timestamp",
	} {
		if !slices.Contains(keys(), key) && !strings.Contains(section, "`"+prefix+key) {
			t.Errorf("%s%s isn't written, and docs/user/migrate.md doesn't say what to select by instead", prefix, key)
		}
	}
	for _, ending := range []string{"`-SHARED`", "`-MIG-1g.10gb`"} {
		if !strings.Contains(section, "`"+prefix+"gpu.product` that ends in "+ending) {
			t.Errorf("docs/user/migrate.md doesn't say what to do about products that end in %s", ending)
		}
	}
}

// Only our own labels are changed and removed; labels of others stay.
func TestLabelsOfOthersAreLeftAlone(t *testing.T) {
	api := controltest.NewAPI(t, controltest.NodeWith("n", "", controltest.L4(0), controltest.L4(1))...)
	now := testingclock.NewFakeClock(time.Unix(1000, 0))
	l := NewLabeler(api, api, now, undone.New(now))
	reconciled := func() map[string]string {
		t.Helper()
		now.Step(2 * undone.Quiet)
		r := reconcile.Request{}
		r.Name = "n"
		if _, err := l.Reconcile(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		return labelsOf(t, api, "n")
	}
	check := func(when string, want map[string]string) {
		t.Helper()
		if diff := cmp.Diff(want, reconciled()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	label(t, api, "n", "product", "mine")
	label(t, api, "n", "replicas", "4")
	check("somebody names the product", map[string]string{"product": "mine", "replicas": "4", "present": "true", "count": "2", "memory": "81920"})
	version := func() string {
		n := &corev1.Node{}
		if err := api.Get(t.Context(), client.ObjectKey{Name: "n"}, n); err != nil {
			t.Fatal(err)
		}
		return n.ResourceVersion
	}
	before := version()
	check("nothing has changed", map[string]string{"product": "mine", "replicas": "4", "present": "true", "count": "2", "memory": "81920"})
	if version() != before {
		t.Error("the node was written again")
	}
	label(t, api, "n", "product", "")
	check("somebody gives it up", map[string]string{"product": "NVIDIA-L4", "replicas": "4", "present": "true", "count": "2", "memory": "81920"})
	label(t, api, "n", "count", "")
	check("somebody removes one of ours", map[string]string{"product": "NVIDIA-L4", "replicas": "4", "present": "true", "count": "2", "memory": "81920"})
	label(t, api, "n", "product", "mine")
	check("somebody takes one over", map[string]string{"product": "mine", "replicas": "4", "present": "true", "count": "2", "memory": "81920"})

	l = NewLabeler(api, api, now, undone.New(now)) // another controller
	controltest.Undefine(t, api, kinds.Inventories)
	inv := controltest.NodeWith("n", "")[1]
	if err := api.Delete(t.Context(), inv); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Name: "n"}}); err == nil {
		t.Error("labels go with the kind")
	}
	controltest.Define(t, api, kinds.Inventories, time.Time{})
	check("the inventory is gone", map[string]string{"product": "mine", "replicas": "4"})
}

// TestLabelsWhenKindsAreInstalledAgain checks that a node keeps its labels while the
// plugin has created the inventory and hasn't written its status yet.
func TestLabelsWhenKindsAreInstalledAgain(t *testing.T) {
	api := controltest.NewAPI(t, controltest.NodeWith("n", "", controltest.L4(0))...)
	now := testingclock.NewFakeClock(time.Unix(1000, 0))
	l := NewLabeler(api, api, now, undone.New(now))
	reconciled := func() map[string]string {
		t.Helper()
		if _, err := l.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Name: "n"}}); err != nil {
			t.Fatal(err)
		}
		return labelsOf(t, api, "n")
	}
	want := map[string]string{"product": "NVIDIA-L4", "present": "true", "count": "1", "memory": "81920"}
	if diff := cmp.Diff(want, reconciled()); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
	if err := api.Delete(t.Context(), controltest.NodeWith("n", "")[1]); err != nil {
		t.Fatal(err)
	}
	bare := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: "n", CreationTimestamp: metav1.NewTime(now.Now())}}
	if err := api.Create(t.Context(), bare); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, reconciled()); diff != "" {
		t.Errorf("without a status (-want +got):\n%s", diff)
	}
	now.Step(kinds.ReportWithin)
	if got := reconciled(); len(got) > 0 {
		t.Errorf("the status doesn't come, and the node has the labels %v", got)
	}
}

// TestLabelsWhileTheDriverFails: the GPUs of the node are unknown then, not gone.
func TestLabelsWhileTheDriverFails(t *testing.T) {
	api := controltest.NewAPI(t, controltest.NodeWith("n", "", controltest.L4(0))...)
	l := NewLabeler(api, api, testingclock.NewFakeClock(time.Unix(1000, 0)), undone.New(testingclock.NewFakeClock(time.Unix(1000, 0))))
	for _, gpus := range [][]v1alpha1.GPU{{controltest.L4(0)}, nil} {
		inv := &v1alpha1.GPUInventory{}
		if err := api.Get(t.Context(), client.ObjectKey{Name: "n"}, inv); err != nil {
			t.Fatal(err)
		}
		if inv.Status.GPUs = gpus; gpus == nil {
			inv.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNVMLError}}
		}
		if err := api.Status().Update(t.Context(), inv); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Reconcile(t.Context(), request("n")); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(map[string]string{"product": "NVIDIA-L4", "present": "true", "count": "1", "memory": "81920"}, labelsOf(t, api, "n")); diff != "" {
			t.Errorf("%d GPUs (-want +got):\n%s", len(gpus), diff)
		}
	}
}
