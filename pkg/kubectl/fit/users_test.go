package fit_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
)

// reserve reserves a claim for a PodGroup, and for pods.
func reserve(c resourceapi.ResourceClaim, group string, pods ...string) resourceapi.ResourceClaim {
	if group != "" {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
			APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: group, UID: types.UID(group),
		})
	}
	for _, p := range pods {
		by := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: p, UID: types.UID(p)}
		c.Status.ReservedFor = append(c.Status.ReservedFor, by)
	}
	return c
}

// member returns a pod of a PodGroup that names a claim.
func member(name, group, claim string) corev1.Pod {
	p := *podWith(claim)
	p.Name, p.UID = name, types.UID(name)
	p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &group}
	return p
}

// TestUsers: a claim is used by the pods for which it is reserved, and by those of its
// PodGroups that name it and haven't ended; a group without such pods stands for itself.
func TestUsers(t *testing.T) {
	other := member("other-claim", "gang", "another")
	ended, elsewhere := member("ended", "gang", "c"), member("elsewhere", "gang", "c")
	ended.Status.Phase = corev1.PodSucceeded
	elsewhere.Namespace = "another"
	groups := fit.GroupsOf([]corev1.Pod{
		member("gang-1", "gang", "c"), member("gang-0", "gang", "c"), member("stranger", "strangers", "c"), *podWith("c"),
		other, ended, elsewhere,
	})
	of, foreign := claim("c"), claim("c")
	foreign.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{APIGroup: "example.com", Resource: "pods", Name: "x"}}
	ofGang := []fit.User{{Pod: "gang-0", UID: "gang-0", Group: "gang"}, {Pod: "gang-1", UID: "gang-1", Group: "gang"}}
	for name, tc := range map[string]struct {
		claim resourceapi.ResourceClaim
		want  []fit.User
	}{
		"nobody":          {of, nil},
		"pods":            {reserve(of, "", "b", "a"), []fit.User{{Pod: "a", UID: "a"}, {Pod: "b", UID: "b"}}},
		"PodGroup":        {reserve(of, "gang"), ofGang},
		"unknown group":   {reserve(of, "unseen", "a"), []fit.User{{Pod: "a", UID: "a"}, {Group: "unseen"}}},
		"another's kind":  {foreign, nil},
		"group and a pod": {reserve(of, "gang", "gang-0"), ofGang},
	} {
		if diff := cmp.Diff(tc.want, groups.UsersOf(&tc.claim)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	all := []resourceapi.ResourceClaim{of, reserve(claim("d"), "gang"), reserve(claim("e"), "", "a")}
	if diff := cmp.Diff([]string{"ns"}, fit.GroupNamespaces(all)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestClaimOfAPodGroup: a pod may use its PodGroup's claim, and a reason names the group
// that has a device.
func TestClaimOfAPodGroup(t *testing.T) {
	group := reserve(claim("gang-gpu", "gpu-0"), "gang")
	group.OwnerReferences = []metav1.OwnerReference{
		{APIVersion: "scheduling.k8s.io/v1beta1", Kind: "PodGroup", Name: "gang", UID: "gang", Controller: new(true)},
	}
	o := fit.Objects{
		Nodes: []corev1.Node{node("node-0")}, Slices: []resourceapi.ResourceSlice{slice("node-0", "gpu-0")},
		Classes: []resourceapi.DeviceClass{anyDevice()}, Claims: []resourceapi.ResourceClaim{group, claim("waits")},
	}
	j := fit.NewJudge(o)
	p := podWith()
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("t")}}
	p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: new("gang-gpu")}}
	if got := j.ClaimsOf(p, o.Claims); len(got.Missing) == 0 {
		t.Error("a pod outside of the group may use its claim")
	}
	p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: new("gang")}
	if got := j.ClaimsOf(p, o.Claims); len(got.Missing) > 0 || len(got.Allocated) != 1 {
		t.Errorf("%+v", got)
	}
	answer, err := j.Fits(t.Context(), j.Nodes(), j.ClaimsOf(podWith("waits"), o.Claims), 1)
	if err != nil || answer.Reason == nil {
		t.Fatalf("%+v, %v", answer, err)
	}
	const want = "It fits on node-0 after the end of claim ns/gang-gpu (PodGroup gang)."
	if answer.Reason.Change != want {
		t.Errorf("%s\nwant %s", answer.Reason.Change, want)
	}
}
