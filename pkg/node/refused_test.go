package node

import (
	"context"
	"errors"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/handover"
)

// TestRefusedSuccessorAsksSeldom: a plugin that is refused each time asks every few seconds,
// and both plugins log once why.
func TestRefusedSuccessorAsksSeldom(t *testing.T) {
	dir, err := os.MkdirTemp("", "data") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	held, locked, err := datadir.TryLock(dir)
	if err != nil || !locked {
		t.Fatalf("locked %t, error %v", locked, err)
	}
	defer held.Close()
	newLogger := func(t *testing.T) (klog.Logger, func() int) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		return logger, func() int { return len(logger.GetSink().(ktesting.Underlier).GetBuffer().Data()) }
	}
	var refusals atomic.Int32
	logger, refusalsLogged := newLogger(t)
	acting, stop := context.WithCancel(klog.NewContext(t.Context(), logger))
	ended := make(chan error, 1)
	go func() { // outside of the bubble, where a wait for a connection would stop the clock
		_, err := handover.Await(acting, datadir.HandoverSocketOf(dir), func(handover.Request) error {
			refusals.Add(1)
			return errors.New("not now")
		})
		ended <- err
	}()
	for {
		conn, err := net.Dial("unix", datadir.HandoverSocketOf(dir))
		if err == nil {
			conn.Close() // refused, as it sends no request
			break
		}
		select {
		case <-time.After(time.Millisecond):
		case <-t.Context().Done():
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		p := &program{
			cfg: Config{NodeName: "node-0", DataDir: dir, KubeletRoot: "/var/lib/kubelet"}, podUID: ptr.To(types.UID("b")), step: func(string) {},
			opener: driver.NewOpener(driverroot.NewHost(t.TempDir()), ""),
		}
		logger, requestsLogged := newLogger(t)
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		asks := make(chan error, 1)
		go func() {
			_, err := p.acquire(ctx)
			asks <- err
		}()
		before, logged := 0, 0
		const most = 14 // one every 5 seconds
		for minute, mostLines := range []int{4, 0, 0} {
			time.Sleep(time.Minute)
			attempts := int(refusals.Load()) - before
			lines := requestsLogged() + refusalsLogged() - logged
			if attempts == 0 || attempts > most || lines > mostLines || minute == 0 && lines == 0 {
				t.Errorf("minute %d: %d requests and %d log lines, want at most %d and %d", minute, attempts, lines, most, mostLines)
			}
			before, logged = before+attempts, logged+lines
		}
		cancel()
		if err := <-asks; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
