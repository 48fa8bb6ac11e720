package node

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/endpoints"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/handover"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
)

// idlePlugin is a plugin that acts, and has nothing to do.
func idlePlugin(t tenure) *plugin {
	return &plugin{tenure: t, facts: facts.New("node-a"), driver: &driver.Follower{}}
}

// requestOf is the request of a plugin of this release.
func requestOf(pod types.UID) handover.Request {
	return handover.Request{PodUID: pod, Service: kubelet.ServiceSocket("/var/lib/kubelet", gpu.DriverName, pod), BesideDevicePlugin: true}
}

// idleProgram is a program whose plugins get requests with requestOf.
func idleProgram() *program {
	return &program{cfg: Config{NodeName: "node-a", PodUID: "pod", KubeletRoot: "/var/lib/kubelet"}, idle: endpoints.NewRegistry(), failed: newFailures()}
}

func TestHandoverIsRefused(t *testing.T) {
	p := idleProgram()
	p.failed.Next("failed", time.Now())
	for name, tc := range map[string]struct {
		tenure tenure
		pod    types.UID
		root   string
		want   string
	}{
		"first plugin":      {pod: "next"},
		"later plugin":      {tenure: tenure{tookOver: true, predecessor: "before"}, pod: "next"},
		"plugin before":     {tenure: tenure{tookOver: true, predecessor: "before"}, pod: "before", want: "has handed over to this one"},
		"it has failed":     {pod: "failed", want: "took over and ended"},
		"another directory": {pod: "next", root: "/dev/shm", want: "different --kubelet-root"},
	} {
		t.Run(name, func(t *testing.T) {
			r := requestOf(tc.pod)
			if tc.root != "" {
				r.Service = kubelet.ServiceSocket(tc.root, gpu.DriverName, tc.pod)
			}
			err := p.refuses(idlePlugin(tc.tenure), r)
			if (err == nil) != (tc.want == "") || (err != nil && !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// TestFailedSuccessorTriesAgain checks that a plugin that failed once in a rollout may soon
// take over again, and that one that fails each time is refused for longer each time.
func TestFailedSuccessorTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := idleProgram()
		refused := func(pod types.UID) bool { return p.refuses(idlePlugin(tenure{}), requestOf(pod)) != nil }
		for _, seconds := range []time.Duration{30, 60, 120, 240, 300, 300} {
			p.failed.Next("failing", time.Now())
			if refused("other") {
				t.Error("refused for the failure of another plugin")
			}
			<-time.After(seconds*time.Second - time.Millisecond)
			if !refused("failing") {
				t.Errorf("not refused for %d seconds", seconds)
			}
			<-time.After(time.Millisecond)
			if refused("failing") {
				t.Errorf("refused for more than %d seconds", seconds)
			}
		}
	})
}

// TestPodUIDNeedsTheKubelet checks that a plugin takes over only where the kubelet is
// known to support that.
func TestPodUIDNeedsTheKubelet(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}}
	for version, want := range map[string]types.UID{"v1.32.9": "", "v1.33.1": "pod", "": ""} {
		node.Status.NodeInfo.KubeletVersion = version
		_, ctx := ktesting.NewTestContext(t)
		p := idleProgram()
		p.client = fake.NewClientset(node)
		if got, err := p.usablePodUID(ctx); got != want || err != nil {
			t.Errorf("kubelet %q: %q, %v, want %q", version, got, err, want)
		}
	}
}

// TestUnknownKubeletIsAskedAgain checks that a plugin that can't read the kubelet's version
// doesn't report ready beside the acting one, whose pod would be deleted, and asks later.
func TestUnknownKubeletIsAskedAgain(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	client := fake.NewClientset()
	p := idleProgram()
	p.client, p.cfg.DataDir = client, t.TempDir()
	if _, err := p.ask(ctx, nil); err == nil || errors.Is(err, handover.ErrNobody) {
		t.Errorf("without the Node: %v", err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}}
	node.Status.NodeInfo.KubeletVersion = "v1.37.0"
	if _, err := client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got, err := p.usablePodUID(ctx); got != "pod" || err != nil {
		t.Errorf("with the Node: %q, %v", got, err)
	}
}

// TestReadyAfterTakingBack checks that a plugin that was registered, and took the node
// back, stays ready while it starts over.
func TestReadyAfterTakingBack(t *testing.T) {
	for name, tc := range map[string]struct {
		until time.Time
		want  bool
	}{
		"it took the node back":    {time.Now().Add(registerWithin), true},
		"and isn't registered yet": {time.Now().Add(-time.Second), false},
		"it started":               {time.Time{}, false},
	} {
		p := &plugin{tenure: tenure{graceUntil: tc.until, wasReady: true}, facts: facts.New("node-a")}
		if err := p.ready(); (err == nil) != tc.want {
			t.Errorf("%s: %v", name, err)
		}
		p.tenure.wasReady = false
		if p.ready() == nil {
			t.Errorf("%s, and wasn't ready before: ready", name)
		}
	}
}

// TestNotHandedOverWhileNobodyIsRegistered checks that a plugin that took the node back
// doesn't hand over again before the kubelet has registered it, or could have.
func TestNotHandedOverWhileNobodyIsRegistered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := idlePlugin(tenure{graceUntil: time.Now().Add(registerWithin)})
		refuses := func() error { return idleProgram().refuses(p, requestOf("next")) }
		if refuses() == nil {
			t.Error("hands over although neither plugin is registered")
		}
		registered := idlePlugin(p.tenure)
		registered.facts.SetRegistered()
		if err := idleProgram().refuses(registered, requestOf("next")); err != nil {
			t.Errorf("registered: %v", err)
		}
		<-time.After(registerWithin)
		if err := refuses(); err != nil {
			t.Errorf("the kubelet doesn't register it: %v", err)
		}
		if err := idleProgram().refuses(idlePlugin(tenure{}), requestOf("next")); err != nil {
			t.Errorf("it hasn't taken the node back: %v", err)
		}
	})
}

// TestNotHandedOverToOneThatCannotRegister checks that the kubelet keeps a plugin that it
// can call.
func TestNotHandedOverToOneThatCannotRegister(t *testing.T) {
	const devicePlugin, draDriver = "a device plugin offers 8 nvidia.com/gpu", "another DRA driver is alive"
	for name, tc := range map[string]struct {
		devicePlugin, draDriver string
		older                   bool
		want                    string
	}{
		"alone":                      {},
		"alone, to an older release": {older: true},
		"beside a device plugin":     {devicePlugin: devicePlugin},
		"beside a device plugin, to an older release": {devicePlugin: devicePlugin, older: true, want: devicePlugin},
		"beside a DRA driver":                         {draDriver: draDriver, want: draDriver},
	} {
		t.Run(name, func(t *testing.T) {
			p, r := idlePlugin(tenure{}), requestOf("next")
			r.BesideDevicePlugin = !tc.older
			p.facts.SetRegistered()
			p.facts.SawNode(true, tc.devicePlugin)
			p.facts.SetOtherDriver(tc.draDriver)
			err := idleProgram().refuses(p, r)
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// TestRequestOfThisRelease checks that the acting plugin is told that this one registers
// beside a device plugin.
func TestRequestOfThisRelease(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	var acting sync.WaitGroup
	defer acting.Wait()
	defer cancel()
	uid := types.UID("next")
	p := idleProgram()
	p.cfg.DataDir, p.podUID, p.opener = t.TempDir(), &uid, driver.NewOpener(driverroot.NewHost(t.TempDir()), "")
	requests := make(chan handover.Request, 1)
	acting.Go(func() {
		_, _ = handover.Await(ctx, datadir.HandoverSocketOf(p.cfg.DataDir), func(r handover.Request) error {
			requests <- r
			return errors.New("not now")
		})
	})
	for {
		_, err := p.ask(ctx, handover.ErrRefused)
		if errors.Is(err, handover.ErrRefused) {
			break
		}
		if !errors.Is(err, handover.ErrNobody) {
			t.Fatal(err)
		}
		<-time.After(time.Millisecond)
	}
	if r := <-requests; !r.BesideDevicePlugin || r.PodUID != uid {
		t.Errorf("request %+v", r)
	}
}

// TestHangingDiskIsUnhealthy checks the health of a plugin that opens its state.
func TestHangingDiskIsUnhealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := idleProgram()
		p.enter(stage{state: opening})
		<-time.After(openWithin)
		if err := p.healthy(t.Context()); err != nil {
			t.Error(err)
		}
		<-time.After(time.Second)
		if p.healthy(t.Context()) == nil {
			t.Error("healthy after the deadline")
		}
	})
}

// TestReadyBesideAnOlderRelease checks that a plugin becomes ready even if the acting one
// doesn't hand over to it, so that a rollout deletes the pod of the acting one.
func TestReadyBesideAnOlderRelease(t *testing.T) {
	path := t.TempDir()
	acting, err := datadir.Lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		p := idleProgram()
		p.cfg.PodUID, p.cfg.DataDir = "", path
		p.enter(stage{state: waiting, unready: errNotActing})
		type result struct {
			tenure tenure
			err    error
		}
		acquired := make(chan result)
		go func() {
			tenure, err := p.wait(ctx)
			acquired <- result{tenure, err}
		}()
		<-time.After(standByAfter - time.Second)
		if p.ready(ctx) == nil {
			t.Error("ready at once: the acting plugin may be starting")
		}
		<-time.After(askEvery + 2*time.Second)
		if err := p.ready(ctx); err != nil {
			t.Errorf("%s later: %v, want it ready", standByAfter, err)
		}
		if err := acting.Close(); err != nil {
			t.Error(err)
		}
		r := <-acquired
		if r.err != nil || r.tenure.tookOver {
			t.Errorf("after the end of the acting plugin: %+v", r)
		}
		cancel()
		if err := r.tenure.dir.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestUnregisteredSuccessorEnds checks that a plugin that took over gives the node back
// when the kubelet doesn't register it.
func TestUnregisteredSuccessorEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		tookOver, registered bool
		conflict             string
		ends                 bool
	}{
		"registered":           {tookOver: true, registered: true},
		"not registered":       {tookOver: true, ends: true},
		"it was there first":   {},
		"beside a DRA driver":  {tookOver: true, conflict: "another DRA driver is alive", ends: true},
		"registered beside it": {tookOver: true, registered: true, conflict: "another DRA driver is alive"},
	} {
		t.Run(name, func(t *testing.T) {
			// The path is too long for a socket: a wait for a connection would stop the clock.
			dir, err := datadir.Lock(t.Context(), filepath.Join(t.TempDir(), strings.Repeat("x", 100)))
			if err != nil {
				t.Fatal(err)
			}
			defer dir.Close()
			synctest.Test(t, func(t *testing.T) {
				plugin := idlePlugin(tenure{tookOver: tc.tookOver})
				plugin.dir = dir
				plugin.facts.SetOtherDriver(tc.conflict)
				if tc.registered {
					plugin.facts.SetRegistered()
				}
				ctx, cancel := context.WithTimeout(t.Context(), registerWithin+time.Second)
				defer cancel()
				if _, err := idleProgram().offer(ctx, plugin); (err != nil) != tc.ends {
					t.Errorf("got %v", err)
				}
			})
		})
	}
}
