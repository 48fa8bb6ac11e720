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
	"k8s.io/utils/ptr"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/handover"
	"github.com/tessera-dra/tessera/pkg/pacetest"
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
	var refusals atomic.Int32
	logger, refusalsLogged := pacetest.Logger(t)
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
		p := idleProgram()
		p.cfg.DataDir, p.podUID, p.opener = dir, ptr.To(types.UID("b")), driver.NewOpener(driverroot.NewHost(t.TempDir()), "")
		logger, requestsLogged := pacetest.Logger(t)
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		asks := make(chan error, 1)
		go func() {
			_, err := p.wait(ctx)
			asks <- err
		}()
		const most = 14 // one every 5 seconds
		pacetest.Minutes(t, func() int { return int(refusals.Load()) }, func() int { return requestsLogged() + refusalsLogged() },
			func() { time.Sleep(time.Minute) },
			pacetest.Bound{Attempts: most, Lines: 4}, pacetest.Bound{Attempts: most}, pacetest.Bound{Attempts: most})
		cancel()
		if err := <-asks; err != nil {
			t.Error(err)
		}
	})
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
