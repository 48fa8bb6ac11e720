package healthmonitor_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

const (
	gpu0 = gpu.UUID("GPU-00000000-8a10-0135-bada-13f71feaef21")
	gpu1 = gpu.UUID("GPU-11111111-8a10-0135-bada-13f71feaef21")
)

var (
	pod   = healthmonitor.Pod{Namespace: "default", Name: "training", UID: "00000000-0000-0000-0000-000000000001"}
	other = healthmonitor.Pod{Namespace: "default", Name: "inference", UID: "00000000-0000-0000-0000-000000000002"}
	// client has an MPS daemon of its own.
	client = healthmonitor.Pod{Name: "client", UID: "c", MPS: true}
)

func TestErrorOfAProgram(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.xid(gpu0, 31)
		n.has(gpu0)
		time.Sleep(time.Second) // the kernel log may be behind
		if n.eventsWith("training GPUError: XID 31: ") != 1 || n.eventsWith("GPU "+string(gpu0)+": XID 31: ") != 1 {
			t.Errorf("events %q, want one on the pod and one on the node", n.events)
		}
		if files, _ := filepath.Glob(filepath.Join(n.dir, "health", "*")); len(files) > 0 {
			t.Errorf("stored %v, want nothing", files)
		}
	})
}

// TestResetRequired: at once, for all plugins, until the driver has taken it back.
func TestResetRequired(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.set(gpu0, gpu.RecoveryReset, nil)
		n.xid(gpu0, 95)
		n.has(gpu0, gpu.ResetRequired)
		n.has(gpu1)
		n.stop()
		n.startWithoutDriver()
		n.facts.Found(gpu.Node{Name: "node-0", GPUs: []gpu.GPU{{UUID: gpu0}}})
		n.has(gpu0, gpu.ResetRequired) // before the driver was asked
		n.drive()
		n.set(gpu0, gpu.RecoveryNone, nil)
		n.monitor.SawEvent(gpu0)
		n.has(gpu0, gpu.ResetRequired) // one reading is not enough
		time.Sleep(10 * time.Second)
		n.has(gpu0)
		if n.eventsWith("GPURecovered") != 1 {
			t.Errorf("events %q, want one GPURecovered", n.events)
		}
		n.restart()
		n.has(gpu0)
	})
}

// TestSilentGPU: a GPU that doesn't answer keeps neither its own XIDs nor another
// GPU's waiting.
func TestSilentGPU(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.mu.Lock()
		n.hangs[gpu0] = true
		n.mu.Unlock()
		n.set(gpu1, gpu.RecoveryReset, nil)
		time.Sleep(time.Second)
		n.xid(gpu0, 79)
		n.xid(gpu1, 95)
		n.has(gpu1, gpu.ResetRequired)
		time.Sleep(6 * time.Second)
		n.has(gpu0, gpu.ResetRequired) // RebootRequired might end pods, and the driver has not said it
		time.Sleep(5 * time.Second)
		n.has(gpu0, gpu.NotResponding, gpu.ResetRequired)
	})
}

// TestXIDsWhileSilent: an XID that comes while a call to the driver hangs doesn't wait for
// the next one, which may hang too.
func TestXIDsWhileSilent(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.mu.Lock()
		n.hangs[gpu0] = true
		n.mu.Unlock()
		n.monitor.SawEvent(gpu0)
		time.Sleep(2 * time.Second)
		n.xid(gpu0, 95)
		time.Sleep(4 * time.Second)
		n.has(gpu0, gpu.ResetRequired)
		n.xid(gpu0, 48)
		time.Sleep(5 * time.Second)
		n.has(gpu0, gpu.NotResponding, gpu.ResetRequired, gpu.NeedsInspection)
	})
}

// TestSlowGPU: while the driver takes some time to say what the GPU needs, an XID opens no
// condition that the driver would contradict.
func TestSlowGPU(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.mu.Lock()
		n.takes = 4 * time.Second
		n.mu.Unlock()
		for _, code := range []uint64{79, 95, 31} {
			n.xid(gpu0, code)
		}
		for range 15 {
			time.Sleep(time.Second)
			n.has(gpu0)
		}
		if n.eventsWith("training GPUError: XID 31") != 1 {
			t.Errorf("the events %q; want one on the pod", n.events)
		}
	})
}

// TestSilenceWithoutEvent: a GPU that only the reading of its facts has found silent is
// reported until it has answered twice, as one that comes and goes must.
func TestSilenceWithoutEvent(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		found := func(conditions ...gpu.Condition) {
			n.facts.Found(gpu.Node{Name: "node-0", GPUs: []gpu.GPU{{UUID: gpu0, Conditions: conditions}}})
		}
		n.set(gpu0, gpu.RecoveryUnsupported, nvml.ErrNotResponding)
		found(gpu.Condition{Type: gpu.NotResponding, Message: "no answer"})
		n.has(gpu0, gpu.NotResponding)
		n.set(gpu0, gpu.RecoveryNone, nil)
		found()
		n.has(gpu0, gpu.NotResponding)
		time.Sleep(10 * time.Second)
		n.has(gpu0)
	})
}

// TestStorm: thousands of XIDs lead to few readings, and to one event on each object.
func TestStorm(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		for range 5000 {
			n.xid(gpu0, 31)
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if n.readings[gpu0] > 30 || n.eventsWith("training GPUError") != 1 || len(n.events) != 3 {
			t.Errorf("%d readings and the events %q; want at most 30 readings and one event on each pod and the node", n.readings[gpu0], n.events)
		}
	})
}

// TestEventsOfOneError: a GPU that falls off the bus sends several events, a moment
// apart, which are one change.
func TestEventsOfOneError(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.set(gpu0, gpu.RecoveryUnsupported, nvml.ErrLost)
		n.monitor.SawEvent(gpu0)
		time.Sleep(5 * time.Millisecond)
		n.xid(gpu0, 79)
		n.has(gpu0, gpu.Lost, gpu.RebootRequired)
	})
}

// TestStormOnAnotherGPU: errors of one GPU don't suppress the events of another.
func TestStormOnAnotherGPU(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		for range 600 {
			n.xid(gpu0, 13)
			time.Sleep(100 * time.Millisecond)
		}
		n.xid(gpu1, 31)
		time.Sleep(2 * time.Second)
		if n.eventsWith("XID 31") == 0 {
			t.Errorf("%d events, none of XID 31", len(n.events))
		}
	})
}

// TestUnreadableRecord: its content may be forgotten, which the GPU says until the
// driver was loaded again.
func TestUnreadableRecord(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.set(gpu0, gpu.RecoveryReset, nil)
		n.xid(gpu0, 95)
		n.has(gpu0, gpu.ResetRequired)
		n.stop()
		file := filepath.Join(n.dir, "health", string(gpu0)+".json")
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, data[:len(data)/2], 0o600); err != nil {
			t.Fatal(err)
		}
		n.set(gpu0, gpu.RecoveryNone, nil)
		n.start()
		for range 2 { // also after another restart
			time.Sleep(time.Minute)
			n.has(gpu0, gpu.NeedsInspection)
			n.restart()
		}
		n.reload()
		time.Sleep(time.Minute)
		n.has(gpu0)
	})
}

// TestVitalsThatCannotBeRead checks that a failed reading sets a condition, and that the
// journal has nothing of it.
func TestVitalsThatCannotBeRead(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.set(gpu0, gpu.RecoveryUnsupported, errors.New("unknown error"))
		time.Sleep(5 * time.Minute)
		n.has(gpu0, gpu.VitalsUnreadable)
		if len(n.journal.AllHealth()) > 0 {
			t.Errorf("the journal has %+v, want nothing", n.journal.AllHealth())
		}
		n.set(gpu0, gpu.RecoveryReset, nil)
		time.Sleep(5 * time.Second)
		n.has(gpu0, gpu.ResetRequired)
	})
}

func TestHolders(t *testing.T) {
	small, large := holding.Partition{Profile: "1g.10gb", Start: 4, Size: 1}, holding.Partition{Profile: "3g.40gb", Size: 4}
	claim := func(name string, h holding.Holding) holding.Record {
		return holding.Record{ClaimUID: name, Namespace: "ns", Name: name, Holdings: []holding.Holding{h}, Pods: []holding.Pod{{UID: name, Name: name}}}
	}
	claims := []holding.Record{
		claim("small", holding.Holding{GPU: gpu0, Partition: small}),
		claim("large", holding.Holding{GPU: gpu0, Partition: large}),
		claim("look", holding.Holding{GPU: gpu0, Admin: true}),
		claim("other", holding.Holding{GPU: gpu1}),
	}
	instances := []gpu.Instance{
		{Profile: "1g.10gb", Placement: gpu.Placement{Start: 4, Size: 1}, GPUInstanceID: 9},
		{Profile: "3g.40gb", Placement: gpu.Placement{Size: 4}, GPUInstanceID: 1},
	}
	id := func(n int) *int { return &n }
	for name, tc := range map[string]struct {
		x    gpu.XID
		want []string
	}{
		"a partition":         {gpu.XID{GPU: gpu0, GPUInstance: id(9), ComputeInstance: id(0)}, []string{"small"}},
		"a GPU":               {gpu.XID{GPU: gpu0}, []string{"small", "large"}},
		"an unknown instance": {gpu.XID{GPU: gpu0, GPUInstance: id(5)}, []string{"small", "large"}},
		"another GPU":         {gpu.XID{GPU: gpu1}, []string{"other"}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, p := range healthmonitor.Holders(tc.x, claims, instances) {
				got = append(got, p.Name)
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

// TestMPSDaemonFails: an outage of seconds is no condition, a longer one is until clients
// are served. Only pods that are clients of MPS have an event.
func TestMPSDaemonFails(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.use(client, healthmonitor.Pod{Name: "whole", UID: "w"})
		n.setFault(true)
		time.Sleep(5 * time.Second)
		n.setFault(false)
		time.Sleep(20 * time.Second)
		n.has(gpu0)
		n.setFault(true)
		time.Sleep(20 * time.Second)
		n.has(gpu0, gpu.MPSDaemonFailed)
		n.has(gpu1)
		if n.eventsWith("client MPSDaemonFailed") != 1 || n.eventsWith("whole MPSDaemonFailed") > 0 {
			t.Errorf("events %q, want one on the client of MPS", n.events)
		}
		n.setFault(false)
		time.Sleep(10 * time.Second)
		n.has(gpu0)
	})
}

// TestVitalsThatCannotBeReadNowAndThen checks that a reading that fails, and succeeds when it
// is repeated, changes no condition: each change is published with the GPU's devices.
func TestVitalsThatCannotBeReadNowAndThen(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		for range 10 {
			n.set(gpu0, gpu.RecoveryUnsupported, errors.New("unknown error"))
			n.monitor.SawEvent(gpu0)
			n.has(gpu0)
			n.set(gpu0, gpu.RecoveryUnsupported, nil)
			time.Sleep(5 * time.Second)
		}
	})
}

// TestEndUnlisted checks that Lost of a GPU that is gone from the facts is ended, and doesn't
// begin again until the GPU is back.
func TestEndUnlisted(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.set(gpu0, gpu.RecoveryNotRead, fmt.Errorf("find it: %w", nvml.ErrLost))
		n.monitor.SawEvent(gpu0)
		n.has(gpu0, gpu.Lost)
		began := n.eventsWith("Lost: ") // on the node, and on the pods
		ending := health.Ending{Type: gpu.Lost, By: "ann", Why: "bound to vfio", At: time.Now()}
		if err := n.monitor.EndUnlisted(t.Context(), gpu0, ending, time.Now()); err == nil || !strings.Contains(err.Error(), "claim default/") {
			t.Errorf("end it for a GPU that a claim has: %v", err)
		}
		n.use()
		n.list(true)
		if err := n.monitor.EndUnlisted(t.Context(), gpu0, ending, time.Now()); !errors.Is(err, errListed) {
			t.Errorf("end it for a GPU that NVML lists: %v", err)
		}
		n.has(gpu0, gpu.Lost)
		n.list(false)
		if err := n.monitor.EndUnlisted(t.Context(), gpu0, ending, time.Now()); err != nil {
			t.Error(err)
		}
		time.Sleep(5 * time.Minute)
		if n.eventsWith("Lost: ") != began || n.eventsWith("Lost was ended by ann: bound to vfio") != 1 {
			t.Errorf("events %q, want that it was lost once, and that ann ended it", n.events)
		}
		if all := n.journal.AllHealth(); len(all) != 1 || len(all[0].State.Causes) > 0 || len(all[0].State.Ended) != 1 {
			t.Errorf("the journal has %+v, want the ending", all)
		}
		n.facts.Found(gpu.Node{Name: "node-0", GPUs: []gpu.GPU{{UUID: gpu0}, {UUID: gpu1, Index: 1}}})
		time.Sleep(time.Minute)
		n.has(gpu0, gpu.Lost) // it is back, and has fallen off the bus
	})
}

// TestEndByHand: recorded, with an event, and it stays ended after a restart.
func TestEndByHand(t *testing.T) {
	inBubble(t, func(t *testing.T, n *node) {
		n.set(gpu0, gpu.RecoveryIMEX, nil)
		n.monitor.SawEvent(gpu0)
		n.has(gpu0, gpu.IMEXRecoveryRequired)
		if err := n.monitor.End(t.Context(), gpu0, health.Ending{Type: gpu.IMEXRecoveryRequired, By: "ann", Why: "tested it", At: time.Now()}, time.Now()); err != nil {
			t.Fatal(err)
		}
		n.has(gpu0)
		if n.eventsWith("training IMEXRecoveryRequired") > 0 {
			t.Error("a pod has an event of a condition that doesn't block the GPU")
		}
		if n.eventsWith("IMEXRecoveryRequired was ended by ann: tested it") != 1 || n.eventsWith("GPURecovered") > 0 {
			t.Errorf("events %q, want that ann ended it", n.events)
		}
		n.restart()
		n.has(gpu0)
		if err := n.monitor.End(t.Context(), gpu1, health.Ending{Type: gpu.IMEXRecoveryRequired, By: "ann", Why: "tested it", At: time.Now()}, time.Now()); err == nil {
			t.Error("a condition that isn't there was ended")
		}
	})
}
