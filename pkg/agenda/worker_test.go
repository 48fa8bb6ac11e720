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
		unlock, err := w.Lock(t.Context(), []gpu.UUID{"a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			<-release
			order = append(order, "first")
			unlock()
		}()
		other, err := w.Lock(t.Context(), []gpu.UUID{"c"})
		if err != nil {
			t.Fatalf("another GPU: %v", err)
		}
		other()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = w.Lock(ctx, []gpu.UUID{"b"})
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "operation on GPU b") {
			t.Errorf("a wait that is too long: %v", err)
		}
		suspended := make(chan struct{})
		go func() {
			defer close(suspended)
			w.Suspend()
			order = append(order, "suspended")
		}()
		close(release)
		<-suspended
		if !slices.Equal(order, []string{"first", "suspended"}) {
			t.Errorf("order %v", order)
		}
	})
}

func TestSuspendedOperationsWait(t *testing.T) {
	w := NewWorker(time.Second, time.Second)
	w.Suspend()
	w.Suspend()
	resumed, began := false, make(chan error)
	go func() {
		unlock, err := w.Lock(t.Context(), []gpu.UUID{"a"})
		if err == nil {
			defer unlock()
			if !resumed {
				err = errors.New("an operation on a suspended worker")
			}
		}
		began <- err
	}()
	resumed = true
	w.Resume()
	if err := <-began; err != nil {
		t.Error(err)
	}
}

func TestRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWorker(time.Second, time.Second)
		tries := map[gpu.UUID]int{}
		try := func(_ context.Context, uuid gpu.UUID) error {
			var err error
			switch tries[uuid]++; {
			case uuid == "without a driver":
				err = fmt.Errorf("read: %w", gpu.ErrNoDriver)
			case uuid == "fails twice" && tries[uuid] < 3:
				err = errors.New("fails")
			}
			return w.Tried(uuid, err)
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
