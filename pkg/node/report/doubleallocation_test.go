package report_test

import (
	"context"
	"errors"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/report"
)

// TestDoubleAllocation checks that the condition is there when it is reported, stays as it
// is through a restart of the plugin, is written again for another version of the API server
// or after the controller has ended it, and stays away with an object that was deleted.
func TestDoubleAllocation(t *testing.T) {
	s := newServer(t)
	r, stop := start(t, s)
	r.Found(node(h100))
	r.SetRegistered()
	eventually(t, s, "a plugin at work", ready(report.ReasonRegistered))
	reported := func(version, message, want string) {
		t.Helper()
		if err := r.ReportDoubleAllocation(t.Context(), version, message); err != nil {
			t.Fatal(err)
		}
		inv, _ := s.get()
		c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionDoubleAllocation)
		if c == nil || c.Status != metav1.ConditionTrue || c.Reason != v1alpha1.DoubleAllocationReason(version) || c.Message != want || c.LastTransitionTime.IsZero() {
			t.Errorf("got %+v, want it True with the message %q", c, want)
		}
	}
	reported("v1.36.3", "first", "first")
	_, before := s.get()
	reported("v1.36.3", "second", "first")
	if _, writes := s.get(); writes != before {
		t.Errorf("%d writes, want none", writes-before)
	}

	stop()
	r, _ = start(t, s)
	r.Found(node(h100))
	r.SetRegistered()
	reported("v1.36.3", "third", "first")
	reported("v1.37.1", "fourth", "fourth")

	s.change("gpuinventories", func() (string, any) {
		inv := s.inventory.DeepCopy()
		meta.SetStatusCondition(&inv.Status.Conditions, metav1.Condition{
			Type: v1alpha1.ConditionDoubleAllocation, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNewVersion,
		})
		s.store(inv)
		return "MODIFIED", inv
	})
	s.request(1)
	inv := eventually(t, s, "an answer", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.PublishResponse == 1 })
	if meta.IsStatusConditionTrue(inv.Status.Conditions, v1alpha1.ConditionDoubleAllocation) {
		t.Error("the plugin set the condition again that the controller had ended")
	}
	reported("v1.37.1", "fifth", "fifth")

	s.remove()
	inv = eventually(t, s, "a new object", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.RegisteredAt != nil })
	if c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionDoubleAllocation); c != nil {
		t.Errorf("the new object has %+v", c)
	}
}

// TestDoubleAllocationWithoutServer: a report that can't be written is an error, so that it
// is repeated.
func TestDoubleAllocationWithoutServer(t *testing.T) {
	s := newServer(t)
	r, _ := start(t, s)
	r.Found(node(h100))
	r.SetRegistered()
	eventually(t, s, "a plugin at work", ready(report.ReasonRegistered))
	s.setAway(true)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.ReportDoubleAllocation(ctx, "v1.36.3", "x"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}
