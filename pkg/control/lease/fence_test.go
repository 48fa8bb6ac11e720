package lease

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/leaderelection/resourcelock"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/tessera-dra/tessera/pkg/clocktest"
)

// fakeLock is a Lease that can be written, or not.
type fakeLock struct {
	resourcelock.Interface
	err error
}

func (l *fakeLock) Create(context.Context, resourcelock.LeaderElectionRecord) error { return l.err }
func (l *fakeLock) Update(context.Context, resourcelock.LeaderElectionRecord) error { return l.err }

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestFence: nothing is written by a controller that hasn't the Lease, or may have lost it.
func TestFence(t *testing.T) {
	var (
		held     = resourcelock.LeaderElectionRecord{HolderIdentity: "me"}
		released = resourcelock.LeaderElectionRecord{}
		refused  = errors.New("refused")
	)
	for name, tc := range map[string]struct {
		do       func(lock resourcelock.Interface, l *fakeLock, c *testingclock.FakeClock)
		mayWrite bool
	}{
		"never held": {func(resourcelock.Interface, *fakeLock, *testingclock.FakeClock) {}, false},
		"created": {func(lock resourcelock.Interface, _ *fakeLock, _ *testingclock.FakeClock) {
			_ = lock.Create(t.Context(), held)
		}, true},
		"not acquired": {func(lock resourcelock.Interface, l *fakeLock, _ *testingclock.FakeClock) {
			l.err = refused
			_ = lock.Update(t.Context(), held)
		}, false},
		"renewed in time": {func(lock resourcelock.Interface, _ *fakeLock, c *testingclock.FakeClock) {
			for range 10 {
				_ = lock.Update(t.Context(), held)
				c.Step(RetryPeriod)
			}
		}, true},
		"a renewal fails": {func(lock resourcelock.Interface, l *fakeLock, c *testingclock.FakeClock) {
			_ = lock.Update(t.Context(), held)
			l.err = refused
			c.Step(RetryPeriod)
			_ = lock.Update(t.Context(), held)
		}, true},
		"renewals fail": {func(lock resourcelock.Interface, l *fakeLock, c *testingclock.FakeClock) {
			_ = lock.Update(t.Context(), held)
			l.err = refused
			for c.Step(RetryPeriod); c.Since(time.Unix(1000, 0)) < writeWithin; c.Step(RetryPeriod) {
				_ = lock.Update(t.Context(), held)
			}
		}, false},
		"paused": {func(lock resourcelock.Interface, _ *fakeLock, c *testingclock.FakeClock) {
			_ = lock.Update(t.Context(), held)
			c.Step(time.Minute)
		}, false},
		"paused while it renews": {func(lock resourcelock.Interface, l *fakeLock, c *testingclock.FakeClock) {
			_ = Lock{&slowLock{l, c}, lock.(Lock).fence}.Update(t.Context(), held)
		}, false},
		"released": {func(lock resourcelock.Interface, _ *fakeLock, _ *testingclock.FakeClock) {
			_ = lock.Update(t.Context(), held)
			_ = lock.Update(context.Background(), released)
		}, false},
		"perhaps released": {func(lock resourcelock.Interface, l *fakeLock, _ *testingclock.FakeClock) {
			_ = lock.Update(t.Context(), held)
			l.err = refused
			_ = lock.Update(context.Background(), released)
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			c, l := testingclock.NewFakeClock(time.Unix(1000, 0)), &fakeLock{}
			f := &fence{clock: c}
			tc.do(Lock{l, f}, l, c)
			if got := f.mayWrite(); got != tc.mayWrite {
				t.Errorf("may write: %t, want %t", got, tc.mayWrite)
			}
		})
	}
}

// slowLock takes a minute to be written.
type slowLock struct {
	resourcelock.Interface
	clock *testingclock.FakeClock
}

func (l *slowLock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	l.clock.Step(time.Minute)
	return l.Interface.Update(ctx, r)
}

// TestFenceOfASetClock: a clock that is set back keeps the fence from nothing, and one that
// is set forwards closes it until the next renewal.
func TestFenceOfASetClock(t *testing.T) {
	for name, tc := range map[string]struct {
		by, later time.Duration
		mayWrite  bool
	}{
		"forwards":                   {by: 3 * time.Hour},
		"back":                       {by: -3 * time.Hour, mayWrite: true},
		"back, and paused":           {by: -3 * time.Hour, later: time.Minute},
		"the machine was suspended":  {by: time.Minute},
		"forwards by a few seconds":  {by: RetryPeriod, mayWrite: true},
		"back by a few seconds":      {by: -RetryPeriod, later: RetryPeriod, mayWrite: true},
		"back by a minute, and long": {by: -time.Minute, later: writeWithin},
	} {
		t.Run(name, func(t *testing.T) {
			now := time.Now()
			c := testingclock.NewFakePassiveClock(now)
			lock := Lock{&fakeLock{}, &fence{clock: c}}
			held := resourcelock.LeaderElectionRecord{HolderIdentity: "me"}
			if err := lock.Update(t.Context(), held); err != nil {
				t.Fatal(err)
			}
			c.SetTime(clocktest.Shift(now.Add(tc.later), tc.by))
			if got := lock.fence.mayWrite(); got != tc.mayWrite {
				t.Errorf("may write: %t, want %t", got, tc.mayWrite)
			}
			if err := lock.Update(t.Context(), held); err != nil {
				t.Fatal(err)
			}
			if !lock.fence.mayWrite() {
				t.Error("closed after the next renewal")
			}
		})
	}
}

// TestFencedRequests: a closed fence lets those requests through that change nothing.
func TestFencedRequests(t *testing.T) {
	passed := roundTripper(func(*http.Request) (*http.Response, error) { return &http.Response{StatusCode: http.StatusOK}, nil })
	closed := fencedTransport{&fence{clock: testingclock.NewFakePassiveClock(time.Unix(1000, 0))}, passed}
	const slices = "/apis/resource.k8s.io/v1/resourceslices"
	for name, tc := range map[string]struct {
		method, path string
		passes       bool
	}{
		"list":           {http.MethodGet, slices, true},
		"create":         {http.MethodPost, slices, false},
		"update":         {http.MethodPut, slices + "/a", false},
		"patch":          {http.MethodPatch, slices + "/a", false},
		"delete":         {http.MethodDelete, slices + "/a", false},
		"review a token": {http.MethodPost, "/apis/authentication.k8s.io/v1/tokenreviews", true},
		"review rights":  {http.MethodPost, "/apis/authorization.k8s.io/v1/subjectaccessreviews", true},
	} {
		t.Run(name, func(t *testing.T) {
			body := &closable{Reader: strings.NewReader("{}")}
			r, err := http.NewRequestWithContext(t.Context(), tc.method, "https://server"+tc.path, body)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := closed.RoundTrip(r)
			if passes := err == nil; passes != tc.passes || !passes && !errors.Is(err, errNotLeading) {
				t.Errorf("got %v, want it to pass: %t", err, tc.passes)
			}
			if resp == nil && !body.closed {
				t.Error("the request's body isn't closed")
			}
		})
	}
}

type closable struct {
	io.Reader
	closed bool
}

func (c *closable) Close() error { c.closed = true; return nil }
