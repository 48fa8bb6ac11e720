package healthmonitor_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// divide has the facts show GPUs that can be divided.
func (n *node) divide() {
	profiles := []gpu.Profile{
		{Name: "1g.10gb", Placements: []gpu.Placement{{Start: 0, Size: 1}, {Start: 4, Size: 1}}},
		{Name: "3g.40gb", Placements: []gpu.Placement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}},
	}
	n.facts.Found(gpu.Node{Name: "node-0", GPUs: []gpu.GPU{{UUID: gpu0, Index: 3, MIG: &gpu.MIG{Profiles: profiles}}, {UUID: gpu1}}})
}

func partition(profile string, start, size int) gpu.Partition {
	return gpu.Partition{GPU: gpu0, Profile: profile, Placement: gpu.Placement{Start: start, Size: size}}
}

// refuse has a claim of a pod be refused a partition of gpu0.
func (n *node) refuse(pod string, device gpu.DeviceName, p gpu.Partition) {
	n.sawOutcome(prepare.Outcome{
		Device: device, Silicon: p, Problem: "can't create a " + p.Profile + " partition: Unknown Error",
		Namespace: "default", Pods: []holding.Pod{{UID: pod, Name: pod}},
	})
}

func (n *node) give(silicon gpu.Device) { n.sawOutcome(prepare.Outcome{Silicon: silicon}) }

func (n *node) sawOutcome(o prepare.Outcome) {
	o.GPU, o.At, o.Load = o.Silicon.Parent(), time.Now(), health.Load{Boot: "boot"}
	n.monitor.SawOutcome(n.t.Context(), o)
}

// refused returns the condition PrepareFailed of gpu0 in the facts, and the time until its pause
// ends; the zero Condition if there is none.
func (n *node) refused() (gpu.Condition, time.Duration) {
	known, _ := n.facts.State()
	for _, c := range known.Node.GPUs[0].Conditions {
		if c.Type == gpu.PrepareFailed {
			return c, time.Until(c.RetryAt)
		}
	}
	return gpu.Condition{}, 0
}

// wantRefused checks the condition. Pauses may end with a second.
func (n *node) wantRefused(pause time.Duration, devices ...gpu.DeviceName) {
	n.t.Helper()
	c, left := n.refused()
	if diff := cmp.Diff(devices, c.Refused); diff != "" || left > pause || pause-left >= time.Second {
		n.t.Errorf("refused for %v, want %v; devices (-want +got):\n%s", left, pause, diff)
	}
}

const (
	large = gpu.DeviceName("gpu-00000000-mig-3g40gb-4")
	small = gpu.DeviceName("gpu-00000000-mig-1g10gb-4")
)

// TestRefusedDevice checks the condition of a GPU that refuses a claim, until a claim is given
// the same, and that it survives the plugin.
func TestRefusedDevice(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.divide()
		n.refuse("stuck", large, partition("3g.40gb", 4, 4))
		n.has(gpu0, gpu.PrepareFailed)
		n.has(gpu1)
		time.Sleep(10*time.Second - 100*time.Millisecond) // has waits for a while
		n.wantRefused(50*time.Second, large)
		if c, _ := n.refused(); !strings.Contains(c.Message, string(large)+": the GPU can't create a 3g.40gb partition: Unknown Error") {
			t.Errorf("message %q", c.Message)
		}
		n.stop()
		n.startWithoutDriver()
		n.divide()
		n.wantRefused(50*time.Second, large) // before the driver was asked
		n.drive()
		n.divide()
		n.give(partition("1g.10gb", 0, 1)) // which needs other silicon
		n.give(gpu.Whole{GPU: gpu1})
		n.has(gpu0, gpu.PrepareFailed)
		n.give(partition("3g.40gb", 4, 4))
		n.has(gpu0)
		n.refuse("another", large, partition("3g.40gb", 4, 4))
		n.has(gpu0, gpu.PrepareFailed)
		n.give(partition("1g.10gb", 4, 1)) // in its turn
		n.has(gpu0)
		n.restart()
		n.has(gpu0)
		if begun, ended := n.eventsWith("PrepareFailed: GPU "+string(gpu0)), n.eventsWith("GPURecovered"); begun != 2 || ended != 2 {
			t.Errorf("events %q, want one of each beginning and each end on the node", n.events)
		}
	})
}

// TestRefusedDeviceThatIsUnlisted checks that the condition ends when a claim is given anything of a
// GPU whose tables don't list the refused device any more: all of the GPU is kept from claims then.
func TestRefusedDeviceThatIsUnlisted(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.divide()
		n.refuse("stuck", "gpu-00000000-mig-2g20gb-4", partition("2g.20gb", 4, 2))
		n.has(gpu0, gpu.PrepareFailed)
		n.give(gpu.Whole{GPU: gpu1})
		n.has(gpu0, gpu.PrepareFailed)
		n.give(partition("1g.10gb", 0, 1))
		n.has(gpu0)
	})
}

// TestWhoIsToldOfARefusal checks that the pods of a claim that was refused are told, once in a
// while, and its neighbours aren't.
func TestWhoIsToldOfARefusal(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.divide()
		told := func(want ...string) {
			t.Helper()
			n.mu.Lock()
			defer n.mu.Unlock()
			var got []string
			for _, e := range n.events {
				if strings.Contains(e, " PrepareFailed: ") {
					got = append(got, e)
				}
			}
			if n.events = nil; !cmp.Equal(want, got) {
				t.Errorf("pods were told %q, want %q", got, want)
			}
		}
		const minute = "GPU 3 can't create a 3g.40gb partition: Unknown Error; that part of it gets no new pods for 1 minute"
		n.refuse("a", large, partition("3g.40gb", 4, 4))
		told("a PrepareFailed: " + minute)
		time.Sleep(20 * time.Second)
		n.refuse("a", large, partition("3g.40gb", 4, 4)) // the kubelet tries again
		n.refuse("b", small, partition("1g.10gb", 4, 1)) // it was allocated before
		told("b PrepareFailed: GPU 3 can't create a 1g.10gb partition: Unknown Error; that part of it gets no new pods for 40 seconds")
		time.Sleep(40 * time.Second)
		n.refuse("c", large, partition("3g.40gb", 4, 4))
		told("c PrepareFailed: " + strings.Replace(minute, "1 minute", "2 minutes", 1))
		time.Sleep(5 * time.Minute)
		n.refuse("a", large, partition("3g.40gb", 4, 4))
		told("a PrepareFailed: " + strings.Replace(minute, "1 minute", "4 minutes", 1))
		n.sawOutcome(prepare.Outcome{
			Device: "gpu-11111111", Silicon: gpu.Whole{GPU: gpu1}, Problem: "can't be used whole: in use", Namespace: "default", Pods: []holding.Pod{{UID: "d", Name: "d"}},
		})
		told("d PrepareFailed: GPU 0 can't be used whole: in use; it gets no new pods for 1 minute")
	})
}

// TestRetriesOfTheKubelet has the kubelet prepare the claim of a pod again and again.
func TestRetriesOfTheKubelet(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.divide()
		try := func() { n.refuse("stuck", large, partition("3g.40gb", 4, 4)) }
		stored := func() string {
			t.Helper()
			data, err := os.ReadFile(filepath.Join(n.dir, "health", string(gpu0)+".json"))
			if err != nil {
				t.Fatal(err)
			}
			return string(data)
		}
		for _, pause := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
			pause *= time.Minute
			try()
			n.wantRefused(pause, large)
			before := stored()
			for range 5 { // within the pause, that changes nothing
				time.Sleep(pause / 6)
				try()
			}
			if after := stored(); after != before {
				t.Errorf("stored %s after tries in the pause, want what it was, %s", after, before)
			}
			n.wantRefused(pause-5*(pause/6), large)
			time.Sleep(pause - 5*(pause/6))
		}
		n.give(partition("3g.40gb", 4, 4))
		n.has(gpu0)
	})
}

// TestManyPodsAreRefused checks that storms of refusals stay small.
func TestManyPodsAreRefused(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.divide()
		for i := range 1000 {
			n.refuse(fmt.Sprint("pod-", i), large, partition("3g.40gb", 4, 4))
		}
		n.wantRefused(time.Minute, large)
		if onNode := n.eventsWith("PrepareFailed: GPU " + string(gpu0)); onNode != 1 || len(n.events) != 1001 {
			t.Errorf("%d events on the node and %d in all, want one on the node and on each pod", onNode, len(n.events))
		}
	})
}
