package doctor

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// TestExamineNodes: the findings of the plugins' own doctors have their nodes, also where
// the doctor fails because of them; plugins that don't answer, or not in time, or not in
// JSON, and missing rights are noted; other pods aren't asked.
func TestExamineNodes(t *testing.T) {
	pod := func(name, component string) corev1.Pod {
		return kubectltest.Program(name, component, "node-of-"+name, true)
	}
	ended := pod("ended", "node")
	ended.Status.Phase = corev1.PodSucceeded
	pods := []corev1.Pod{pod("fine", "node"), pod("ill", "node"), pod("gone", "node"), pod("old", "node"), pod("long", "node"), pod("mine", "node"), pod("controller", "controller"), ended}
	run := func(_ context.Context, p *corev1.Pod, stdout, stderr io.Writer) error {
		text, fails := `{"findings": []}`, error(nil)
		switch p.Name {
		case "ill":
			text = `{"findings": [{"level": "trouble", "check": "journal", "what": "The record can't be read.", "do": "Delete it.", "path": "/var/lib/a.json"},
				{"level": "leftover", "check": "cdi", "what": "A spec has no claim.", "claim": "team/late", "path": "/etc/cdi/b.json"}]}`
			fails = errors.New("command terminated with exit code 1")
		case "gone":
			return errors.New("container not found")
		case "old":
			text, fails = "usage: kubelet-plugin", errors.New("command terminated with exit code 2")
			_, _ = io.WriteString(stderr, "unknown flag: -o\n")
		case "long":
			for {
				if _, err := io.WriteString(stdout, strings.Repeat(" ", maxAnswer)); err != nil {
					return err
				}
			}
		case "mine":
			return apierrors.NewForbidden(schema.GroupResource{Resource: "pods/exec"}, p.Name, nil)
		case "controller", "ended":
			t.Errorf("pod %s is asked", p.Name)
		}
		_, _ = io.WriteString(stdout, text)
		return fails
	}
	r := new(cluster.Reader)
	found, asked := examineNodes(t.Context(), r, pods, run)
	want := []finding{
		{Level: trouble, Check: "journal", Node: "node-of-ill", Subject: "/var/lib/a.json", What: "The record can't be read.", Do: "Delete it."},
		{Level: leftover, Check: "cdi", Node: "node-of-ill", Subject: "team/late", What: "A spec has no claim."},
	}
	if diff := cmp.Diff(want, found); diff != "" || asked != 2 {
		t.Errorf("%d answered, want 2; findings (-want +got):\n%s", asked, diff)
	}
	notes := []string{
		"The plugin of node-of-gone didn't answer: container not found.",
		"The plugin of node-of-old didn't answer: command terminated with exit code 2: unknown flag: -o.",
		"The plugin of node-of-long didn't answer: the answer is too long.",
		"You may not create pods/exec in namespace tessera-system: the plugins weren't asked for their own findings. Ask for the verb create on it.",
	}
	if diff := cmp.Diff(notes, r.Notes); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
}

// TestDoctorNamesTwoReleases reports a node whose slices two releases write.
func TestDoctorNamesTwoReleases(t *testing.T) {
	inv := &v1alpha1.GPUInventory{}
	inv.Status.Conditions = []metav1.Condition{
		{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue},
		{Type: v1alpha1.ConditionOverwritten, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonOtherRelease, Message: "Two releases."},
	}
	want := []finding{{Level: trouble, Check: "overwritten", What: "OtherRelease: Two releases."}}
	if diff := cmp.Diff(want, examinePlugin(inv)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	inv.Status.Conditions[1].Status = metav1.ConditionFalse
	if got := examinePlugin(inv); len(got) > 0 {
		t.Errorf("got %v after that has ended", got)
	}
}
