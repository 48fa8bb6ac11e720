package lease

import (
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// A controller that is stopped for a while (SIGSTOP, a virtual machine that is paused, a
// node that swaps) still acts as the leader when it continues: leader election gives up only
// after RenewDeadline. Until then it would overwrite the slices of the new leader with those
// from its outdated cache.

// writeWithin is how long after a renewal of the Lease the controller may write: as long as
// it tries to renew the Lease, and less than another controller waits.
const writeWithin = RenewDeadline + RetryPeriod

var errNotLeading = errors.New("nothing is written: this controller has not renewed its Lease for too long, and another may lead")

// fence refuses to write once another controller may lead. It can't stop a request that was
// sent before: one that is in flight when the leader is cut off or paused may still be
// carried out afterwards. Most requests name a resource version or a UID, by which the API
// server refuses them if another leader has changed the object since.
type fence struct {
	clock clock.PassiveClock

	mu      sync.Mutex
	renewed time.Time // when the last renewal that succeeded began; zero: not the holder
}

func (f *fence) set(renewed time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.renewed = renewed
}

// mayWrite reports whether no other controller can lead. It uses the longer time of two clocks:
// the monotonic clock stops while a machine is suspended, and the wall clock may be set back.
func (f *fence) mayWrite() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.clock.Now()
	passed := max(now.Sub(f.renewed), now.Round(0).Sub(f.renewed.Round(0)))
	return !f.renewed.IsZero() && passed < writeWithin
}

// fencedTransport refuses requests that change objects of the cluster while the controller may
// not write.
type fencedTransport struct {
	fence *fence
	next  http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t fencedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if !changes(r) || t.fence.mayWrite() {
		return t.next.RoundTrip(r)
	}
	if r.Body != nil {
		_ = r.Body.Close()
	}
	return nil, errNotLeading
}

// WrappedRoundTripper lets client-go find the transport that it wraps.
func (t fencedTransport) WrappedRoundTripper() http.RoundTripper { return t.next }

// changes reports whether a request changes objects of the cluster. Reviews of the rights of
// those who read metrics don't, and every replica has metrics.
func changes(r *http.Request) bool {
	if r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodOptions {
		return false
	}
	return !strings.HasPrefix(r.URL.Path, "/apis/authentication.k8s.io/") && !strings.HasPrefix(r.URL.Path, "/apis/authorization.k8s.io/")
}
