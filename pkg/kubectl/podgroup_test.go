package kubectl

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// gang reserves the claim of pod train-0 for a PodGroup instead, which has the pods.
func gang(s *kubectltest.Server, pods ...string) {
	c := s.Items[kubectltest.Resources+"resourceclaims"][0].(resourceapi.ResourceClaim)
	c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "gang", UID: "g"}}
	s.Items[kubectltest.Resources+"resourceclaims"][0] = c
	all := []any{}
	for _, name := range pods {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}}
		p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: new("gang")}
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("train-gpu")}}
		all = append(all, p)
	}
	s.Items["/api/v1/namespaces/team/pods"] = all
}

// TestPodGroups: the pods of the PodGroup for which a claim is reserved are shown, and
// evicted; where they aren't known, the group is.
func TestPodGroups(t *testing.T) {
	for name, tc := range map[string]struct {
		pods      []string
		forbidden bool
		drain     []string
		get       string
	}{
		"known": {[]string{"gang-1", "gang-0"}, false, []string{
			"team/gang-0 of PodGroup team/gang (claim train-gpu, gpu-00000002)\n",
			"team/gang-1 of PodGroup team/gang (claim train-gpu, gpu-00000002)\n",
		}, " gang-0,gang-1\n"},
		"none": {nil, false, []string{"the pods of PodGroup team/gang (claim train-gpu, gpu-00000002)\n"}, " podgroup/gang\n"},
		"forbidden": {[]string{"gang-0"}, true, []string{
			"the pods of PodGroup team/gang (", "note: You may not list pods in namespace team: which pods its PodGroups have isn't known.",
		}, " podgroup/gang\n"},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubectltest.New(t)
			kubectltest.Taint(s)
			gang(s, tc.pods...)
			if tc.forbidden {
				s.Forbidden = []string{"/api/v1/namespaces/team/pods"}
			}
			out := run(t, s, terminal.Screen{}, "", "drain", "node/1", "--dry-run")
			for _, want := range tc.drain {
				if !strings.Contains(out, want) {
					t.Errorf("drain says nothing of %q:\n%s", want, out)
				}
			}
			if out := run(t, s, terminal.Screen{}, "", "get"); !strings.Contains(out, tc.get) {
				t.Errorf("get doesn't show %q:\n%s", tc.get, out)
			}
			if out := run(t, s, terminal.Screen{Width: 80}, "", "map"); strings.Contains(out, "(train-gpu)") {
				t.Errorf("the map shows the claim as if no pod used it:\n%s", out)
			}
		})
	}
}
