// Package lease lets one controller of a cluster lead, by a Lease, and keeps it from writing once
// another one may lead (ADR 60).
package lease

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/utils/clock"
)

// Name of the Lease, which controllers of all versions and the chart's roles know. It needn't be
// the name under which they write, publish.FieldManager.
const Name = "tessera-controller"

// A controller that ends gives its Lease back and the next takes over at once; these say how
// soon one that died is replaced.
const (
	Duration      = 10 * time.Second
	RenewDeadline = 7 * time.Second
	RetryPeriod   = 2 * time.Second
)

// Lock is the lock on the Lease by which one controller leads. Unlike the manager's own, it
// records no event: the Lease says who leads and since when, and a controller that is started
// again writes nothing else.
type Lock struct {
	resourcelock.Interface
	fence *fence
}

// New returns the lock on the Lease in a namespace, which this process doesn't hold yet.
func New(c *rest.Config, namespace string) (Lock, error) {
	host, err := os.Hostname()
	if err != nil {
		return Lock{}, fmt.Errorf("read the host name for the Lease: %w", err)
	}
	c = rest.CopyConfig(c)
	c.Timeout = RenewDeadline / 2 // one request that hangs doesn't lose the Lease
	kube, err := kubernetes.NewForConfig(c)
	if err != nil {
		return Lock{}, fmt.Errorf("make a client for the Lease: %w", err)
	}
	lock, err := resourcelock.New(resourcelock.LeasesResourceLock, namespace, Name, kube.CoreV1(), kube.CoordinationV1(),
		resourcelock.ResourceLockConfig{Identity: host + "_" + string(uuid.NewUUID())})
	return Lock{lock, &fence{clock: clock.RealClock{}}}, err
}

// Fence returns the configuration of clients that write only while the holder of the lock may
// lead.
func (l Lock) Fence(c *rest.Config) *rest.Config {
	c = rest.CopyConfig(c)
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return fencedTransport{l.fence, next} })
	return c
}

// Create implements resourcelock.Interface.
func (l Lock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.record(r, func() error { return l.Interface.Create(ctx, r) })
}

// Update implements resourcelock.Interface.
func (l Lock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.record(r, func() error { return l.Interface.Update(ctx, r) })
}

// record records in the fence when the Lease was acquired, renewed or released.
func (l Lock) record(r resourcelock.LeaderElectionRecord, write func() error) error {
	begun := l.fence.clock.Now()
	if r.HolderIdentity == "" { // it is released
		begun = time.Time{}
		l.fence.set(begun)
	}
	err := write()
	if err == nil {
		l.fence.set(begun)
	}
	return err
}
