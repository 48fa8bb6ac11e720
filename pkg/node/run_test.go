package node

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/report"
)

// A plugin that the kubelet doesn't register stops a rollout; a node without a
// driver doesn't.
func TestReadyOnceRegistered(t *testing.T) {
	p := &plugin{facts: facts.New("node-a")}
	if p.facts.Trouble() == nil {
		t.Fatal("there is no trouble without a driver")
	}
	if err := p.ready(); err == nil {
		t.Error("ready before the kubelet has registered it")
	}
	p.facts.SetRegistered()
	if err := p.ready(); err != nil {
		t.Errorf("registered, without a driver: %v, want ready", err)
	}
}

// TestRegistersBesideADevicePlugin checks that the kubelet can unprepare, after a restart
// and after an upgrade, where a device plugin came to a node with pods that have claims.
func TestRegistersBesideADevicePlugin(t *testing.T) {
	for name, tookOver := range map[string]bool{"restart": false, "upgrade": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				known := facts.New("node-a")
				r, err := report.New(report.Config{NodeName: "node-a", REST: &rest.Config{Host: "http://localhost"}, Facts: known})
				if err != nil {
					t.Fatal(err)
				}
				p := &plugin{tenure: tenure{tookOver: tookOver}, facts: known, reporter: r, driver: driver.New(driver.Config{})}
				known.SawNode(true, "a device plugin offers 8 nvidia.com/gpu on node node-a")
				ctx, cancel := context.WithTimeout(t.Context(), registerWithin)
				defer cancel()
				if err := p.mayRegister(ctx); err != nil {
					t.Errorf("not registered within %s: %v", registerWithin, err)
				}
			})
		})
	}
}

// TestSuccessorHasSeenTheNode checks that a plugin that took over doesn't register, and so
// prepares nothing, before it could know of a device plugin.
func TestSuccessorHasSeenTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &plugin{tenure: tenure{tookOver: true}, facts: facts.New("node-a"), driver: driver.New(driver.Config{})}
		may := make(chan error, 1)
		go func() { may <- p.mayRegister(t.Context()) }()
		<-time.After(firstLookWithin + time.Second)
		synctest.Wait()
		if len(may) > 0 {
			t.Error("registers although the Node hasn't been seen")
		}
		p.facts.SawNode(true, "")
		if err := <-may; err != nil {
			t.Error(err)
		}
	})
}

// TestEndIsNotWaitedForLong: a part that hangs doesn't keep the plugin from
// ending, so that the next one gets the lock.
func TestEndIsNotWaitedForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := make(chan error)
		p := idlePlugin(tenure{})
		p.cancel, p.parts = func() {}, &errgroup.Group{}
		p.parts.Go(func() error { return <-hangs })
		if err := p.end(); err == nil || !strings.Contains(err.Error(), "did not stop") {
			t.Errorf("got %v, want an error that says that the plugin did not stop", err)
		}
		hangs <- os.ErrClosed
		if err := p.end(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("got %v, want what the parts returned", err)
		}
	})
}
