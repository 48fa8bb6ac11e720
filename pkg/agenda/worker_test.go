package agenda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

func TestOneOperationAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWorker(time.Second, time.Second)
		var order []string
		release := make(chan struct{})
		go func() {
			_ = w.Do(t.Context(), []gpu.UUID{"a", "b"}, func() error {
				<-release
				order = append(order, "first")
				return nil
			})
		}()
		synctest.Wait()
		if err := w.Do(t.Context(), []gpu.UUID{"c"}, func() error { return nil }); err != nil {
			t.Errorf("another GPU: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := w.Do(ctx, []gpu.UUID{"b"}, func() error { t.Error("two operations on a GPU"); return nil })
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "operation on GPU b") {
			t.Errorf("a wait that is too long: %v", err)
		}
		exchanged := make(chan struct{})
		go func() {
			defer close(exchanged)
			w.Exchange(func() { order = append(order, "exchanged") })
		}()
		close(release)
		<-exchanged
		if !slices.Equal(order, []string{"first", "exchanged"}) {
			t.Errorf("order %v", order)
		}
	})
}

func TestSuspendedOperationsWait(t *testing.T) {
	w := NewWorker(time.Second, time.Second)
	w.Suspend()
	w.Suspend()
	exchanged, ran := false, make(chan error)
	go func() {
		ran <- w.Do(t.Context(), []gpu.UUID{"a"}, func() error {
			if !exchanged {
				return errors.New("an operation on a suspended worker")
			}
			return nil
		})
	}()
	w.Exchange(func() { exchanged = true })
	if err := <-ran; err != nil {
		t.Error(err)
	}
}

func TestRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWorker(time.Second, time.Second)
		tries := map[gpu.UUID]int{}
		try := func(_ context.Context, uuid gpu.UUID) error {
			return w.Try(uuid, func() error {
				switch tries[uuid]++; {
				case uuid == "without a driver":
					return fmt.Errorf("read: %w", gpu.ErrNoDriver)
				case uuid == "fails twice" && tries[uuid] < 3:
					return errors.New("fails")
				}
				return nil
			})
		}
		uuids := []gpu.UUID{"works", "fails twice", "without a driver"}
		var errs []error
		for _, uuid := range uuids {
			errs = append(errs, try(t.Context(), uuid))
		}
		if errs[0] != nil || errs[1] == nil || errs[2] != nil {
			t.Errorf("errors: %v", errs)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		w.Sweep(ctx, try, func(klog.Logger, gpu.UUID, error) {})
		for i, want := range []int{1, 3, 1} {
			if tries[uuids[i]] != want {
				t.Errorf("a GPU that %s was tried %d times, want %d", uuids[i], tries[uuids[i]], want)
			}
		}
	})
}

func TestEachJoinsErrors(t *testing.T) {
	err := Each([]gpu.UUID{"a", "b", "c"}, func(uuid gpu.UUID) error {
		if uuid == "b" {
			return nil
		}
		return errors.New(string(uuid))
	})
	if err == nil || err.Error() != "a\nc" {
		t.Errorf("got %v", err)
	}
}
