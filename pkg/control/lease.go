package control

import (
	"fmt"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/utils/clock"
)

const (
	leaseName = "tessera-controller"
	// A controller that ends gives its lease back and the next takes over at
	// once; these say how soon one that died is replaced.
	leaseDuration = 10 * time.Second
	renewDeadline = 7 * time.Second
	retryPeriod   = 2 * time.Second
)

// newLock returns the lock on the Lease by which one controller leads, and the
// configuration of a controller that writes only while it may lead. Unlike the
// manager's own, the lock records no event: the Lease says who leads and since when, and a
// controller that is started again writes nothing else.
func newLock(c Config) (Config, resourcelock.Interface, error) {
	lock, err := newPlainLock(c)
	if err != nil || !c.LeaderElect {
		return c, lock, err
	}
	f := &fence{clock: clock.RealClock{}}
	c.REST = rest.CopyConfig(c.REST)
	c.REST.Wrap(f.transport)
	return c, fencedLock{lock, f}, nil
}

func newPlainLock(c Config) (resourcelock.Interface, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("name this controller: %w", err)
	}
	config := clientConfig(c.REST)
	config.Timeout = renewDeadline / 2 // one request that hangs doesn't lose the Lease
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client for the Lease: %w", err)
	}
	return resourcelock.New(resourcelock.LeasesResourceLock, c.Namespace, leaseName, kube.CoreV1(), kube.CoordinationV1(),
		resourcelock.ResourceLockConfig{Identity: host + "_" + string(uuid.NewUUID())})
}
