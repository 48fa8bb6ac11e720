//go:build integration

package control_test

import (
	"fmt"
	stdslices "slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/allocator"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/test/apiserver"
)

// TestVersions runs the controller on a server of each version.
func TestVersions(t *testing.T) {
	for _, s := range servers() {
		t.Run(s.String(), func(t *testing.T) {
			s.start(t)
			startController(t)
			n := newMIGNode(t, 2)
			n.report(t)
			n.startPlugin(t)
			s.offersPartitions(t, n, n.governs(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}))
			if !strings.Contains(controllerLog(), s.log()) {
				t.Errorf("the controller's log doesn't have %s", s.log())
			}
			s.offersShares(t, n, n.governs(t, v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}))
			counters, multiple, taints, _ := s.abilities()
			t.Run("largest slices", func(t *testing.T) { largestSlices(t, counters, taints) })
			t.Run("every offer", func(t *testing.T) {
				storesEveryOffer(t, counters, offer.Server{
					Counters: counters != publish.NoCounters, Multiple: multiple == publish.Yes, Charged: s.charges(),
				})
			})
		})
	}
}

// offersPartitions waits until a node offers what the server can hold of partitions.
func (s server) offersPartitions(t *testing.T, n *node, p *v1alpha1.SharingPolicy) {
	t.Helper()
	counters, _, _, _ := s.abilities()
	want, reason := map[string]int{"gpu": 2, "1g.10gb": 14, "3g.40gb": 4}, v1alpha1.ReasonApplied
	if counters == publish.NoCounters {
		want, reason = map[string]int{"gpu": 2}, v1alpha1.ReasonProblems
	}
	n.waitForDevices(t, want)
	eventually(t, "the pool is whole, and in the form of the server", func() bool { return inForm(n.pool(t), counters) == "" })
	got := applied(t, p, reason)
	if counters != publish.NoCounters {
		return
	}
	if !strings.Contains(got, "DRAPartitionableDevices") {
		t.Errorf("got %q, want the gate's name in it", got)
	}
	eventually(t, "an event tells it", func() bool { return warned(t, p, v1alpha1.ReasonProblems, "DRAPartitionableDevices") })
}

// warned reports whether there is an event about a policy.
func warned(t *testing.T, p *v1alpha1.SharingPolicy, reason, contains string) bool {
	t.Helper()
	var events corev1.EventList
	if err := api.List(t.Context(), &events); err != nil {
		t.Fatal(err)
	}
	return stdslices.ContainsFunc(events.Items, func(e corev1.Event) bool {
		return e.InvolvedObject.UID == p.UID && e.Type == corev1.EventTypeWarning && e.Reason == reason && strings.Contains(e.Message, contains)
	})
}

// A policy that refuses the controller's dry runs: whole GPUs and equal shares are
// offered, and it is said why nothing more is. The rest comes when the policy is gone.
func TestServerThatRefusesDryRuns(t *testing.T) {
	s := server{kubernetes: apiserver.Versions()[len(apiserver.Versions())-1], all: true}
	s.start(t)
	refusal := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "only-known-nodes"}, Spec: admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy: ptr.To(admissionv1.Fail),
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create},
			Rule:       admissionv1.Rule{APIGroups: []string{"resource.k8s.io"}, APIVersions: []string{"*"}, Resources: []string{"resourceslices"}},
		}}}},
		Validations: []admissionv1.Validation{{Expression: `object.spec.nodeName.startsWith("node-")`, Message: "no such node"}},
	}}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: refusal.Name}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: refusal.Name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
	}}
	for _, o := range []client.Object{refusal, binding} {
		if err := api.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	refuses := func() bool {
		_, err := slices.Create(t.Context(), &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "elsewhere"},
			Spec:       resourceapi.ResourceSliceSpec{Driver: "x", NodeName: new("elsewhere"), Pool: resourceapi.ResourcePool{Name: "x", ResourceSliceCount: 1}},
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err != nil
	}
	eventually(t, "the server refuses", refuses)
	stop := startController(t)
	n := newMIGNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	p := n.governs(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}})
	n.waitForDevices(t, map[string]int{"gpu": 2})
	for _, want := range []string{"It isn't known whether", "DRAPartitionableDevices", "tessera-probe-", "webhooks and policies on resourceslices"} {
		if got := applied(t, p, v1alpha1.ReasonProblems); !strings.Contains(got, want) {
			t.Errorf("got %q, want %q in it", got, want)
		}
	}
	eventually(t, "an event tells it", func() bool { return warned(t, p, v1alpha1.ReasonProblems, "It isn't known whether") })
	stop()
	if err := api.Delete(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the server doesn't refuse any more", func() bool { return !refuses() })
	// A controller that is started asks at once; one that runs, within a minute.
	startController(t)
	s.offersPartitions(t, n, p)
}

// offersShares waits until a node offers what the server can hold of shares by size.
func (s server) offersShares(t *testing.T, n *node, p *v1alpha1.SharingPolicy) {
	t.Helper()
	change(t, p, func() { p.Spec.Priority = 1 })
	counters, multiple, _, _ := s.abilities()
	if s.minor() == 34 || s.minor() == 35 {
		multiple = publish.No // a scheduler of 1.34 would crash
	}
	want := map[string]int{"mps for several": 2}
	reason := v1alpha1.ReasonApplied
	if multiple == publish.No {
		want = map[string]int{"mps": 8}
	}
	if counters != publish.NoCounters && (multiple == publish.No || s.charges()) {
		want["gpu"] = 2
	}
	switch {
	case multiple == publish.No:
		reason = v1alpha1.ReasonProblems
	case counters == publish.NoCounters || !s.charges():
		reason = v1alpha1.ReasonAppliedWithoutWhole
	}
	n.waitForDevices(t, want)
	got := applied(t, p, reason)
	unsafe := counters != publish.NoCounters && reason == v1alpha1.ReasonAppliedWithoutWhole
	missing := "DRAConsumableCapacity"
	if s.minor() == 34 || s.minor() == 35 {
		missing = "kubernetes/kubernetes#133705"
	}
	if multiple == publish.No && !strings.Contains(got, missing) || unsafe && !strings.Contains(got, allocator.Issue) {
		t.Errorf("got %q, want in it what is missing", got)
	}
}

// inForm returns what is wrong with a pool on a server that wants counters in some
// form; "" if nothing is.
func inForm(pool []resourceapi.ResourceSlice, form publish.Counters) string {
	sets := make(map[string]string) // and the slices that they are in
	for _, s := range pool {
		if s.Spec.Pool.Generation != pool[0].Spec.Pool.Generation || s.Spec.Pool.ResourceSliceCount != int64(len(pool)) {
			return "it isn't whole"
		}
		for _, c := range s.Spec.SharedCounters {
			sets[c.Name] = s.Name
		}
		if both := len(s.Spec.SharedCounters) > 0 && len(s.Spec.Devices) > 0; both && form == publish.SplitCounters {
			return s.Name + " has devices and counters"
		}
	}
	if form == publish.NoCounters && len(sets) > 0 {
		return "it has counters"
	}
	for _, s := range pool {
		for _, d := range s.Spec.Devices {
			for _, c := range d.ConsumesCounters {
				if in, ok := sets[c.CounterSet]; !ok || form == publish.JointCounters && in != s.Name {
					return d.Name + " consumes counters that aren't there"
				}
			}
			if (form == publish.NoCounters) != (d.ConsumesCounters == nil) {
				return fmt.Sprintf("%s consumes %v", d.Name, d.ConsumesCounters)
			}
		}
	}
	return ""
}

// largestSlices creates, in dry runs, slices that are as large as docs/adr/0029 says
// every version stores.
func largestSlices(t *testing.T, form publish.Counters, taints publish.Answer) {
	devices := func(n int) []resourceapi.Device {
		all := make([]resourceapi.Device, n)
		for i := range all {
			all[i] = resourceapi.Device{Name: fmt.Sprint("device-", i)}
		}
		return all
	}
	pools := map[string][]offer.GPU{"plain": {{Name: "gpu", Devices: devices(128)}}}
	if form != publish.NoCounters {
		counted := offer.GPU{Name: "gpu", Devices: devices(64), Counters: &resourceapi.CounterSet{Name: "gpu", Counters: make(map[string]resourceapi.Counter)}}
		for i := range 16 {
			counted.Counters.Counters[fmt.Sprint("counter-", i)] = resourceapi.Counter{}
		}
		for i := range counted.Devices {
			counted.Devices[i].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "gpu", Counters: counted.Counters.Counters}}
		}
		pools["counted"] = []offer.GPU{counted}
	}
	if taints == publish.Yes {
		tainted := offer.GPU{Name: "gpu", Devices: devices(64)}
		for i := range tainted.Devices {
			for k := range 4 {
				tainted.Devices[i].Taints = append(tainted.Devices[i].Taints, resourceapi.DeviceTaint{
					Key: fmt.Sprint("key-", k), Effect: resourceapi.DeviceTaintEffectNoSchedule, TimeAdded: &metav1.Time{Time: time.Unix(0, 0)},
				})
			}
		}
		pools["tainted"] = []offer.GPU{tainted}
	}
	for name, gpus := range pools {
		t.Run(name, func(t *testing.T) {
			storesPool(t, publish.Pool(metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: "any", UID: "1"}, gpus, form))
		})
	}
}

// upgrades are what TestUpgrade makes of one server after the other.
func upgrades() []server {
	if all := servers(); len(apiserver.Versions()) > 1 {
		return all
	}
	newest := server{kubernetes: apiserver.Versions()[0], all: true}
	before := newest
	before.off = []string{"DRAPartitionableDevices", "DRAConsumableCapacity"}
	if before.minor() >= 34 {
		before.api = "v1beta1"
	}
	return []server{before, newest}
}

// The server is replaced by one of another version, or with other gates, on the same
// etcd, while the controller runs: the pool becomes one that the new server's
// scheduler understands, and nothing that the new server refuses is written.
func TestUpgrade(t *testing.T) {
	all := upgrades()
	env := all[0].start(t)
	// It would lose its lease, and end, while a slow machine starts a server.
	startController(t, "--leader-elect=false")
	n := newMIGNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	p := n.governs(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}})
	t.Log(all[0])
	all[0].offersPartitions(t, n, p)
	asked := n.inventory(t).Spec.PublishRequest
	for i, s := range all[1:] {
		old := len(controllerLog())
		s.replace(t, env)
		begun := time.Now()
		t.Log(s)
		// The API version stays as long as it is served, and only changes are logged.
		_, want, _ := strings.Cut(s.log(), " ")
		_, before, _ := strings.Cut(all[i].log(), " ")
		eventually(t, "the controller has found out "+want, func() bool {
			return want == before || strings.Contains(controllerLog()[old:], want)
		})
		s.offersPartitions(t, n, p)
		t.Logf("known and published %s after the start", time.Since(begun).Round(time.Millisecond))
		if log := controllerLog()[old:]; strings.Contains(log, "is invalid") {
			t.Errorf("a slice was refused:\n%s", log)
		}
	}
	if diff := cmp.Diff(asked, n.inventory(t).Spec.PublishRequest); diff != "" {
		t.Errorf("the plugin was asked about a change of form (-want +got):\n%s", diff)
	}
}

// A controller that is started while the server is away waits for it: after a while
// without a server it has lost its lease, and the kubelet has started it again.
func TestControllerWaitsForTheServer(t *testing.T) {
	all := upgrades()
	env := all[0].start(t)
	n := newMIGNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	if err := env.ControlPlane.GetAPIServer().Stop(); err != nil {
		t.Fatal(err)
	}
	startController(t)
	eventually(t, "it waits", func() bool { return strings.Contains(controllerLog(), "Waiting for the API server") })
	all[1].replace(t, env)
	all[1].offersPartitions(t, n, n.governs(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}))
}
