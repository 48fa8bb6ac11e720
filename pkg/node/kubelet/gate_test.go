package kubelet_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"

	"github.com/tessera-dra/tessera/pkg/node/kubelet"
)

// service is the kubelet's end of a plugin's socket.
func (f *fixture) service(t *testing.T) drapbv1.DRAPluginClient {
	t.Helper()
	return drapbv1.NewDRAPluginClient(dial(t, f.register(t).GetEndpoint()))
}

func prepareRequest(name string) *drapbv1.NodePrepareResourcesRequest {
	return &drapbv1.NodePrepareResourcesRequest{Claims: []*drapbv1.Claim{{Namespace: "default", Name: name, Uid: name}}}
}

func unprepareRequest(name string) *drapbv1.NodeUnprepareResourcesRequest {
	return &drapbv1.NodeUnprepareResourcesRequest{Claims: []*drapbv1.Claim{{Namespace: "default", Name: name, Uid: name}}}
}

// later calls the plugin, and returns a channel for the result.
func later(t *testing.T, c drapbv1.DRAPluginClient, name string) <-chan error {
	t.Helper()
	result := make(chan error, 1)
	go func() {
		got, err := c.NodePrepareResources(t.Context(), prepareRequest(name))
		if err == nil && (len(got.GetClaims()[name].GetDevices()) != 1 || got.GetClaims()[name].GetError() != "") {
			err = errors.New("answer: " + got.String())
		}
		result <- err
	}()
	return result
}

// awaitCall waits until the plugin has a call in progress.
func (f *fixture) awaitCall(t *testing.T) {
	t.Helper()
	for f.plugin.OldestCall() == 0 {
		select {
		case <-time.After(time.Millisecond):
		case <-t.Context().Done():
			t.Fatal("the plugin gets no call")
		}
	}
}

// calls returns the UIDs of claims that the plugin has prepared and unprepared.
func (c *claims) calls() (prepared, unprepared []types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append(prepared, c.prepared...), append(unprepared, c.unprepared...)
}

// TestHandOver checks that no call fails while one plugin takes over from another:
// neither one in progress, nor those that come before the next plugin serves.
func TestHandOver(t *testing.T) {
	before := runAs(t, kubeletRoot(t), "pod-a", "running", "waiting")
	c := before.service(t)
	before.claims.began = make(chan types.UID)
	running := later(t, c, "running")
	<-before.claims.began
	if err := before.plugin.HandOver(t.Context(), kubelet.ServiceSocket(before.root, driver, "pod-b")); err != nil {
		t.Fatal(err)
	}
	waiting := later(t, c, "waiting")

	after := runAs(t, before.root, "pod-b", "running", "waiting")
	for name, result := range map[string]<-chan error{"running": running, "waiting": waiting} {
		if err := <-result; err != nil {
			t.Errorf("prepare of %s: %v", name, err)
		}
	}
	after.register(t) // both are registered at the same time
	if _, err := c.NodeUnprepareResources(t.Context(), unprepareRequest("running")); err != nil {
		t.Errorf("unprepare: %v", err)
	}
	older := drapbv1beta1.NewDRAPluginClient(dial(t, before.register(t).GetEndpoint()))
	got, err := older.NodeUnprepareResources(t.Context(), &drapbv1beta1.NodeUnprepareResourcesRequest{
		Claims: []*drapbv1beta1.Claim{{Namespace: "default", Name: "bad", Uid: "bad"}},
	})
	if err != nil || got.GetClaims()["bad"].GetError() != "disk full" {
		t.Errorf("unprepare by v1beta1: %v, %v, want the next plugin's answer", got, err)
	}
	prepared, unprepared := before.claims.calls()
	if len(prepared)+len(unprepared) > 0 {
		t.Errorf("after it has handed over, the plugin prepared %v and unprepared %v", prepared, unprepared)
	}
	prepared, unprepared = after.claims.calls()
	if len(prepared) != 2 {
		t.Errorf("the next plugin prepared %v, want both claims", prepared)
	}
	if diff := cmp.Diff([]types.UID{"running", "bad"}, unprepared); diff != "" {
		t.Errorf("the next plugin unprepared (-want +got):\n%s", diff)
	}
}

// TestHandOverWaitsForCalls checks that a plugin hasn't handed over while a call that
// can't be interrupted goes on.
func TestHandOverWaitsForCalls(t *testing.T) {
	before := runAs(t, kubeletRoot(t), "pod-a", "stuck")
	before.claims.began, before.claims.ends = make(chan types.UID), make(chan struct{})
	defer close(before.claims.ends)
	later(t, before.service(t), "stuck")
	<-before.claims.began
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := before.plugin.HandOver(ctx, kubelet.ServiceSocket(before.root, driver, "pod-b"))
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "calls to end") {
		t.Errorf("got %v, want an error that names the calls", err)
	}
}

// TestEndOfAHandOver checks that a plugin that has handed over removes its sockets only
// after the calls that it has passed on, and at once if the next plugin has ended.
func TestEndOfAHandOver(t *testing.T) {
	before := runAs(t, kubeletRoot(t), "pod-a", "one", "two")
	c := before.service(t)
	if err := before.plugin.HandOver(t.Context(), kubelet.ServiceSocket(before.root, driver, "pod-b")); err != nil {
		t.Fatal(err)
	}
	one := later(t, c, "one")
	before.awaitCall(t)
	ended := make(chan error, 1)
	go func() { ended <- before.stop() }()
	after := runAs(t, before.root, "pod-b", "one", "two")
	if err := <-one; err != nil {
		t.Errorf("the call that had been passed on: %v", err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}

	c = after.service(t)
	if err := after.plugin.HandOver(t.Context(), kubelet.ServiceSocket(before.root, driver, "pod-c")); err != nil {
		t.Fatal(err)
	}
	two := later(t, c, "two")
	after.awaitCall(t)
	after.plugin.EndForwarding()
	if err := <-two; err == nil {
		t.Error("a call of a plugin that has ended succeeded")
	}
}

// TestUnprepareOvertakesAWaitingPrepare checks that a prepare that waits for the next
// plugin doesn't reach it after the claim's unprepare.
func TestUnprepareOvertakesAWaitingPrepare(t *testing.T) {
	before := runAs(t, kubeletRoot(t), "pod-a", "claim")
	c := before.service(t)
	if err := before.plugin.HandOver(t.Context(), kubelet.ServiceSocket(before.root, driver, "pod-b")); err != nil {
		t.Fatal(err)
	}
	prepare := later(t, c, "claim")
	before.awaitCall(t)
	unprepare := make(chan error, 1)
	go func() {
		_, err := c.NodeUnprepareResources(t.Context(), unprepareRequest("claim"))
		unprepare <- err
	}()
	if err := <-prepare; status.Code(err) != codes.Canceled {
		t.Errorf("the prepare: %v, want it cancelled", err)
	}
	after := runAs(t, before.root, "pod-b", "claim")
	if err := <-unprepare; err != nil {
		t.Error(err)
	}
	if prepared, unprepared := after.claims.calls(); len(prepared) > 0 || len(unprepared) != 1 {
		t.Errorf("the next plugin prepared %v and unprepared %v, want the unprepare only", prepared, unprepared)
	}
}

// TestHealthEndsWithAHandOver checks that a kubelet doesn't ask a plugin for health that
// has handed over.
func TestHealthEndsWithAHandOver(t *testing.T) {
	f := runAs(t, kubeletRoot(t), "pod-a")
	stream, err := drahealthv1.NewDRAResourceHealthClient(dial(t, f.register(t).GetEndpoint())).
		NodeWatchResources(t.Context(), &drahealthv1.NodeWatchResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := f.plugin.HandOver(t.Context(), "/nowhere"); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("got %v, want an end that the kubelet doesn't try again after", err)
	}
}
