//go:build integration

package crash_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestNextClaim has a claim's GPU wanted by another as soon as the claim is
// deleted, before the kubelet has unprepared it.
func TestNextClaim(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.serve(t)
	old, anew := n.newClaim(t, n.whole(0)), n.newClaim(t, n.whole(0))
	p.mustPrepare(t, old)

	old.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "trainer", UID: "1"}}
	if _, err := shared.api.ResourceV1().ResourceClaims("default").UpdateStatus(t.Context(), old, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "trainer"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	pod, err := shared.api.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	current, err := shared.api.ResourceV1().ResourceClaims("default").Get(t.Context(), old.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	current.Status.ReservedFor[0].UID = pod.UID
	if _, err := shared.api.ResourceV1().ResourceClaims("default").UpdateStatus(t.Context(), current, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.prepare(t, anew); err == nil || !strings.Contains(err.Error(), "pod default/trainer uses it") {
		t.Errorf("while the pod lives: got %v, want a refusal that names it", err)
	}

	now := int64(0)
	if err := shared.api.CoreV1().Pods("default").Delete(t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		t.Fatal(err)
	}
	// The cluster's claim controller removes a pod that is gone from the claim.
	if current, err = shared.api.ResourceV1().ResourceClaims("default").Get(t.Context(), old.Name, metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	current.Status.ReservedFor = nil
	if _, err := shared.api.ResourceV1().ResourceClaims("default").UpdateStatus(t.Context(), current, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	prepared := make(chan error, 1)
	go func() {
		_, err := p.prepare(t, anew)
		prepared <- err
	}()
	p.waitLog(t, "Waiting for a claim to release its devices")
	released := time.Now()
	p.mustUnprepare(t, old)
	if err := <-prepared; err != nil {
		t.Errorf("after the pod is gone: %v", err)
	}
	t.Logf("prepared %s after the release began", time.Since(released))
	n.check(t, "with the next claim")
}

// TestJournalUnreadable damages a record between two plugins.
func TestJournalUnreadable(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.serve(t)
	broken, good := n.newClaim(t, n.whole(0)), n.newClaim(t, n.whole(1))
	p.mustPrepare(t, broken)
	p.mustPrepare(t, good)
	p.kill()
	if err := os.Truncate(filepath.Join(n.journal(), string(broken.UID)+".json"), 40); err != nil {
		t.Fatal(err)
	}
	p = n.serve(t)
	p.mustPrepare(t, good)
	if specs, _ := filepath.Glob(filepath.Join(n.cdi, "*claim_*")); len(specs) != 2 {
		t.Errorf("CDI specs: %v, want those of both claims", specs)
	}
	p.mustUnprepare(t, broken)
	p.mustUnprepare(t, good)
	n.checkEmpty(t)
}
