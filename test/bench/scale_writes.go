package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tessera-dra/tessera/test/metrics"
)

// writesOf prints how many objects were written while f ran, Leases aside. Nothing else
// may write.
func (s *scaleBench) writesOf(ctx context.Context, name string, f func() error) error {
	before, err := s.apiWrites(ctx)
	if err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	after, err := s.apiWrites(ctx)
	if err != nil {
		return err
	}
	s.figure(s.sized(name, "writes"), after-before)
	return nil
}

// apiWrites returns the number of requests that wrote something, dry runs aside, as the API server
// counts them.
func (s *scaleBench) apiWrites(ctx context.Context) (n float64, err error) {
	families, err := s.serverMetrics(ctx)
	if err != nil {
		return 0, err
	}
	for _, m := range families["apiserver_request_total"].GetMetric() {
		switch metrics.Label(m, "verb") {
		case "POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION":
			if metrics.Label(m, "resource") != "leases" && metrics.Label(m, "dry_run") == "" {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n, nil
}

func (s *scaleBench) serverMetrics(ctx context.Context) (metrics.Families, error) {
	return metrics.Server(ctx, s.kube.Discovery().RESTClient(), "/metrics")
}

// processorTimes returns what the API server and the controller have used since their
// starts, in seconds.
func (s *scaleBench) processorTimes(ctx context.Context) (server, controller float64, err error) {
	families, err := s.serverMetrics(ctx)
	if err != nil {
		return 0, 0, err
	}
	for _, m := range families["process_cpu_seconds_total"].GetMetric() {
		server = m.GetCounter().GetValue()
	}
	controller, err = s.running.metric(ctx, "process_cpu_seconds_total")
	return server, controller, err
}

// processorTimeOf prints what the API server and the running controller use while f runs.
func (s *scaleBench) processorTimeOf(ctx context.Context, name string, f func() error) error {
	server, controller, err := s.processorTimes(ctx)
	if err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	server2, controller2, err := s.processorTimes(ctx)
	if err != nil {
		return err
	}
	s.figure(s.sized(name+"_server_cpu", "s"), server2-server)
	s.figure(s.sized(name+"_cpu", "s"), controller2-controller)
	return nil
}

// idleWrites counts writes and processor time while nothing happens.
func (s *scaleBench) idleWrites(ctx context.Context) error {
	before, err := s.running.processorTime(ctx)
	if err != nil {
		return err
	}
	s.progress("watching the idle controller for %v", s.scaleIdle)
	if err := s.writesOf(ctx, "controller_idle", func() error { return pause(ctx, s.scaleIdle) }); err != nil {
		return err
	}
	after, err := s.running.processorTime(ctx)
	if err != nil {
		return err
	}
	s.figure(s.sized("controller_idle_cpu", "percent"), 100*(after-before).Seconds()/s.scaleIdle.Seconds())
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// claims creates claims that have a partition each, and deletes them again.
func (s *scaleBench) claims(ctx context.Context) error {
	const perSecond, seconds = 50, 20
	devices, err := s.partitionNames(ctx)
	if err != nil {
		return err
	}
	before, err := s.running.processorTime(ctx)
	if err != nil {
		return err
	}
	writes, _ := s.pools.counts()
	start := monotonic()
	tick := time.NewTicker(time.Second / perSecond)
	defer tick.Stop()
	failed := make(chan error, perSecond*seconds)
	for i := range perSecond * seconds {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		go func() {
			failed <- s.claim(ctx, fmt.Sprintf("claim-%d", i), devices[rand.IntN(len(devices))])
		}()
	}
	for range cap(failed) {
		if err := <-failed; err != nil {
			return err
		}
	}
	s.figure("claims_per_s", perSecond*seconds/(monotonic()-start).Seconds())
	after, err := s.running.processorTime(ctx)
	if err != nil {
		return err
	}
	s.figure(s.sized("claim_cpu", "ms"), float64((after-before).Milliseconds())/(perSecond*seconds))
	now, _ := s.pools.counts()
	s.figure(s.sized("claims_slice", "writes"), float64(now-writes))
	return nil
}

// partitionNames lists the names of a node's partitions, which all nodes have.
func (s *scaleBench) partitionNames(ctx context.Context) (names []string, err error) {
	list, err := s.kube.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourcev1.ResourceSliceSelectorNodeName + "=" + hollowName(0)})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	for _, d := range ofType(list.Items, "mig") {
		names = append(names, d.Name)
	}
	return names, nil
}

// claim creates a claim, gives it a device of a random node, and deletes it after a second.
func (s *scaleBench) claim(ctx context.Context, name, device string) error {
	claims := s.kube.ResourceV1().ResourceClaims("default")
	c, err := claims.Create(ctx, &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourcev1.ResourceClaimSpec{
		Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{
			{Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: driver}},
		}},
	}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create claim %s: %w", name, err)
	}
	c.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
		Results: []resourcev1.DeviceRequestAllocationResult{{Request: "gpu", Driver: driver, Pool: s.random(), Device: device}},
	}}
	if _, err := claims.UpdateStatus(ctx, c, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("allocate claim %s: %w", name, err)
	}
	if err := pause(ctx, time.Second); err != nil {
		return err
	}
	if err := claims.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete claim %s: %w", name, err)
	}
	return nil
}

// awaitLeader waits until the program holds the Lease.
func (c *controllerProcess) awaitLeader(ctx context.Context) error {
	return wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, timeout, true, func(ctx context.Context) (bool, error) {
		leads, err := c.metric(ctx, "leader_election_master_status")
		return err == nil && leads == 1, nil
	})
}
