package test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/pkg/rank"
)

// Without Node Feature Discovery there is no label to go by, and a driver that
// runs nowhere by default says nothing; with it, nodes without a GPU are spared
// privileged pods.
func TestWhichNodes(t *testing.T) {
	const seen, nvidia = "feature.node.kubernetes.io/kernel-version.full", "nvidia.com/gpu.present"
	byDefault := map[string]bool{"": true, seen: false, nvidia: true, seen + " " + nvidia: true}
	for _, device := range []string{"pci-10de", "pci-0300_10de", "pci-0302_10de"} {
		byDefault[seen+" feature.node.kubernetes.io/"+device+".present"] = true
	}
	byDefault[seen+" feature.node.kubernetes.io/pci-0300_1002.present"] = false
	const processor = " feature.node.kubernetes.io/cpu-model.vendor_id"
	byDefault[seen+processor+"=NVIDIA"], byDefault[seen+processor+"=ARM"] = true, false
	const pausing = "nvidia.com/gpu.deploy.dra-driver"
	byDefault[pausing] = true
	byDefault[pausing+"=paused-for-driver-upgrade"] = false
	byDefault[nvidia+" "+pausing+"=paused-for-driver-upgrade"] = false
	own := "node.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0]"
	for name, c := range map[string]struct {
		set  string
		want map[string]bool
	}{
		"by default":           {"node.logVerbosity=2", byDefault},
		"an affinity of yours": {own + ".key=gpus," + own + ".operator=Exists", map[string]bool{"": false, "gpus": true, nvidia: false}},
		"no affinity":          {"node.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution=null", map[string]bool{"": true, seen: true}},
		"simulated GPUs": {"simulator.enabled=true", map[string]bool{
			"": true, seen: true, pausing: true, pausing + "=paused-for-driver-upgrade": false,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			out, all, err := template(t, "--set", c.set)
			if err != nil {
				t.Fatalf("helm template: %v\n%s", err, all)
			}
			for _, set := range daemonSets(t, out) {
				if strings.HasSuffix(set.Name, "-simulator") {
					continue // the simulated driver runs on all nodes
				}
				for node, want := range c.want {
					nodeLabels := labels.Set{}
					for l := range strings.FieldsSeq(node) {
						key, value, ok := strings.Cut(l, "=")
						if !ok {
							value = "true"
						}
						nodeLabels[key] = value
					}
					if got := runsOn(t, set.Spec.Template.Spec.Affinity, nodeLabels); got != want {
						t.Errorf("%s on a node with the labels %q: %t, want %t", set.Name, node, got, want)
					}
				}
			}
		})
	}
}

// inHardReserve is the taint of nodes in the hard reserve of packing.reserve.hard.
var inHardReserve = corev1.Taint{Key: rank.ReserveKey, Effect: corev1.TaintEffectNoSchedule}

// TestDaemonsInHardReserve checks that no list of tolerations takes the chart's own pods off the
// hard reserve: without the plugin, the pods that its nodes are kept for get no GPU. A release from
// before the reserve has the lists of then with helm upgrade --reuse-values.
func TestDaemonsInHardReserve(t *testing.T) {
	for name, args := range map[string][]string{
		"by default": nil,
		"no list":    {"--set=node.tolerations=null,node.extraTolerations=null"},
		"empty":      {"--set-json=node.tolerations=[]"},
		"others":     {`--set-json=node.tolerations=[{"key": "team", "operator": "Exists"}]`, `--set-json=node.extraTolerations=[{"key": "zone", "value": "a"}]`},
		"the same":   {`--set-json=node.tolerations=[{"key": "gpu.tessera.dev/reserve", "operator": "Exists"}]`},
	} {
		t.Run(name, func(t *testing.T) {
			out, all, err := template(t, append(args, "--set=simulator.enabled=true")...)
			if err != nil {
				t.Fatalf("helm template: %v\n%s", err, all)
			}
			sets := daemonSets(t, out)
			if len(sets) != 3 {
				t.Errorf("%d DaemonSets, want those of plugin, supervisor and simulator", len(sets))
			}
			for _, set := range sets {
				tolerations := set.Spec.Template.Spec.Tolerations
				if n := tolerated(tolerations, inHardReserve); n != 1 {
					t.Errorf("%s tolerates %s %d times, want once: %v", set.Name, inHardReserve.ToString(), n, tolerations)
				}
				if team := slices.ContainsFunc(tolerations, func(c corev1.Toleration) bool { return c.Key == "team" }); team != (name == "others") {
					t.Errorf("%s tolerates a taint of one's own: %t", set.Name, team)
				}
			}
		})
	}
}

// TestWhoRemovesTheHardReserve checks that the controller and the Job of helm uninstall, without
// which the taint of the hard reserve stays, run even where each node has it. So does the Job that
// removes labels: Helm waits for it, too.
func TestWhoRemovesTheHardReserve(t *testing.T) {
	for name, args := range map[string][]string{
		"by default": nil, "no list": {"--set=controller.tolerations=null"}, "empty": {"--set-json=controller.tolerations=[]"},
	} {
		t.Run(name, func(t *testing.T) {
			out, all, err := templateWithHooks(t, append(args, "--set=controller.nodeLabels.enabled=true,packing.ranks=true")...)
			if err != nil {
				t.Fatalf("helm template: %v\n%s", err, all)
			}
			pods := map[string]corev1.PodSpec{}
			for doc := range strings.SplitSeq(out, "\n---\n") {
				var object struct {
					Metadata struct{ Name string }
					Spec     struct{ Template corev1.PodTemplateSpec }
				}
				if err := yaml.Unmarshal([]byte(doc), &object); err != nil {
					t.Fatal(err)
				}
				if pod := object.Spec.Template.Spec; len(pod.Containers) > 0 {
					pods[object.Metadata.Name] = pod
				}
			}
			for _, name := range []string{"tessera-controller", "tessera-remove-node-labels", "tessera-remove-node-taints"} {
				if tolerations := pods[name].Tolerations; tolerated(tolerations, inHardReserve) != 1 {
					t.Errorf("%s doesn't tolerate %s: %v", name, inHardReserve.ToString(), tolerations)
				}
			}
		})
	}
}

// tolerated counts the tolerations of a taint.
func tolerated(tolerations []corev1.Toleration, taint corev1.Taint) (n int) {
	for _, c := range tolerations {
		if tolerates(c, taint) {
			n++
		}
	}
	return n
}

// daemonSets finds the DaemonSets in what Helm rendered.
func daemonSets(t *testing.T, rendered string) []appsv1.DaemonSet {
	t.Helper()
	var sets []appsv1.DaemonSet
	for doc := range strings.SplitSeq(rendered, "\n---\n") {
		if !strings.Contains(doc, "\nkind: DaemonSet\n") {
			continue
		}
		var set appsv1.DaemonSet
		if err := yaml.UnmarshalStrict([]byte(doc), &set); err != nil {
			t.Fatal(err)
		}
		sets = append(sets, set)
	}
	if len(sets) < 2 {
		t.Fatalf("%d DaemonSets, want at least those of plugin and supervisor", len(sets))
	}
	return sets
}

// runsOn judges the required node affinity as the DaemonSet controller does: one
// term must match with all of its expressions.
func runsOn(t *testing.T, affinity *corev1.Affinity, node labels.Set) bool {
	t.Helper()
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true
	}
	for _, term := range affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		all := labels.NewSelector()
		for _, e := range term.MatchExpressions {
			operator := map[corev1.NodeSelectorOperator]selection.Operator{
				corev1.NodeSelectorOpIn: selection.In, corev1.NodeSelectorOpNotIn: selection.NotIn,
				corev1.NodeSelectorOpExists: selection.Exists, corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist,
			}[e.Operator]
			requirement, err := labels.NewRequirement(e.Key, operator, e.Values)
			if err != nil {
				t.Fatal(err)
			}
			all = all.Add(*requirement)
		}
		if all.Matches(node) {
			return true
		}
	}
	return false
}
