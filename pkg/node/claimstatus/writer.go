package claimstatus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	// workers is the number of concurrent writers.
	workers = 4
	// The first and the maximum delay after a failure.
	retryFirst = 500 * time.Millisecond
	retryLast  = time.Minute
	// notStoredFor is how long statuses wait after the server didn't store the field:
	// it may be upgraded, or its gate be switched on.
	notStoredFor = 10 * time.Minute
)

// errNotStored means that the server doesn't support status.devices.
var errNotStored = errors.New("the API server doesn't store status.devices (feature DRAResourceClaimDeviceStatus)")

// Writer writes the statuses of the claims of one node's pool. Its methods may
// be called concurrently.
type Writer struct {
	client       kubernetes.Interface
	claims       *draclient.Client
	driver, pool string
	clock        clock.WithTicker

	queue workqueue.TypedRateLimitingInterface[types.UID]
	// notStoredUntil is when to try again after the server didn't store the field; nil: it
	// has stored it, or wasn't asked.
	notStoredUntil atomic.Pointer[time.Time]
	// said ensures that a refusal of the server is logged only once.
	said sync.Once

	// pending has what isn't written yet: a *holding.Realized for each claim, by UID.
	pending sync.Map
}

// New returns a Writer for the devices of a driver in a pool; Run starts it.
func New(client kubernetes.Interface, driver, pool string) *Writer {
	return newWriter(client, driver, pool, clock.RealClock{})
}

func newWriter(client kubernetes.Interface, driver, pool string, clock clock.WithTicker) *Writer {
	return &Writer{
		client: client, claims: draclient.New(client), driver: driver, pool: pool, clock: clock,
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](retryFirst, retryLast),
			workqueue.TypedRateLimitingQueueConfig[types.UID]{Clock: clock}),
	}
}

// Enqueue queues a write of the claim's partitions and shares to its status. It doesn't
// block. For several calls about a claim, the last one counts.
func (w *Writer) Enqueue(claim holding.Realized) {
	uid := types.UID(claim.ClaimUID)
	w.pending.Store(uid, &claim)
	w.queue.AddAfter(uid, w.retryIn())
}

// retryIn returns how long writes are paused after the server didn't store a status; at
// most 0 if they aren't.
func (w *Writer) retryIn() time.Duration {
	until := w.notStoredUntil.Load()
	if until == nil {
		return 0
	}
	return until.Sub(w.clock.Now())
}

// pauseWrites pauses writes because the server didn't store a status.
func (w *Writer) pauseWrites() { w.notStoredUntil.Store(new(w.clock.Now().Add(notStoredFor))) }

// Run writes until ctx ends; it returns nil then.
func (w *Writer) Run(ctx context.Context) error {
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for w.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	w.queue.ShutDown()
	all.Wait()
	return nil
}

// next writes one status; false at the end.
func (w *Writer) next(ctx context.Context) bool {
	uid, ended := w.queue.Get()
	if ended {
		return false
	}
	defer w.queue.Done(uid)
	pending, ok := w.pending.Load(uid)
	if !ok {
		return true
	}
	realized := pending.(*holding.Realized)
	err := w.write(ctx, realized)
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KRef(realized.Namespace, realized.Name), "claimUID", uid)
	if err != nil && !final(err) {
		logger.V(4).Info("The claim's status isn't written yet", "err", err)
		w.queue.AddRateLimited(uid)
		return true
	}
	if err != nil {
		w.said.Do(func() {
			logger.V(2).Info("The status of claims will not show their MIG devices and shares", "err", err)
		})
		logger.V(4).Info("The claim's status can't be written", "err", err)
	}
	if errors.Is(err, errNotStored) {
		w.queue.Forget(uid)
		w.queue.AddAfter(uid, w.retryIn())
		return true
	}
	w.queue.Forget(uid)
	w.pending.CompareAndDelete(uid, realized) // if Enqueue has replaced it, the claim is in the queue again
	return true
}

// final reports whether retrying is useless.
func final(err error) bool {
	return errors.Is(err, errNotStored) || apierrors.IsForbidden(err) || apierrors.IsInvalid(err) ||
		apierrors.IsBadRequest(err) || apierrors.IsMethodNotSupported(err) || apierrors.IsUnsupportedMediaType(err)
}

// write writes the claim's status, if the claim is still the prepared one and
// the status isn't already correct.
func (w *Writer) write(ctx context.Context, realized *holding.Realized) error {
	claim, err := w.claims.ResourceClaims(realized.Namespace).Get(ctx, realized.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the claim: %w", err)
	}
	if string(claim.UID) != realized.ClaimUID {
		return nil // another claim with the same name
	}
	statuses := w.statuses(claim, realized)
	if len(statuses) == 0 || tells(claim, statuses) {
		return nil
	}
	if w.retryIn() > 0 {
		return errNotStored // one status in notStoredFor is enough to ask the server
	}
	err = w.apply(ctx, realized, statuses)
	if errors.Is(err, errNotStored) {
		w.pauseWrites()
	}
	return err
}
