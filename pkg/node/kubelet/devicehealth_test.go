package kubelet

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

const (
	healthy   = kubeletplugin.HealthStatusHealthy
	unhealthy = kubeletplugin.HealthStatusUnhealthy
	unknown   = kubeletplugin.HealthStatusUnknown
)

// TestDeviceHealth: each device that a claim holds has the health of its GPU.
func TestDeviceHealth(t *testing.T) {
	const sick, other, gone = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21"), gpu.UUID("GPU-08779614-8a10-0135-bada-13f71feaef21"), gpu.UUID("GPU-ef0ae64b-8a10-0135-bada-13f71feaef21")
	part := gpu.Partition{GPU: sick, Profile: "1g.10gb", Placement: gpu.Placement{Start: 2, Size: 1}}
	j := JournalOf(t, []holding.Record{
		{ClaimUID: "a", Holdings: []holding.Holding{
			holding.New("gpu-980fb007-mps4-2", gpu.Share{Of: gpu.Whole{GPU: sick}, Count: 4, Number: 2}),
			holding.New("gpu-08779614", gpu.Whole{GPU: other}),
		}},
		{ClaimUID: "b", Holdings: []holding.Holding{holding.New("gpu-980fb007-mig-1g10gb-2", part), holding.New("gpu-ef0ae64b", gpu.Whole{GPU: gone})}},
		{ClaimUID: "c", Holdings: []holding.Holding{holding.New("gpu-980fb007-ts4-1", gpu.Replica{GPU: sick, Count: 4, Number: 1})}},
		// The same device again: an administrator's, and two shares by size.
		{ClaimUID: "d", Holdings: []holding.Holding{{Device: "gpu-08779614", GPU: other, Admin: true}}},
		{ClaimUID: "e", Holdings: []holding.Holding{{Device: "gpu-980fb007-mps", GPU: sick, ShareID: "1"}, {Device: "gpu-980fb007-mps", GPU: sick, ShareID: "2"}}},
	}...)
	type all map[string]kubeletplugin.DeviceHealth
	every := func(is kubeletplugin.HealthStatus, message string) all {
		list := all{}
		for _, name := range []string{"gpu-08779614", "gpu-980fb007-mig-1g10gb-2", "gpu-980fb007-mps", "gpu-980fb007-mps4-2", "gpu-980fb007-ts4-1", "gpu-ef0ae64b"} {
			list[name] = kubeletplugin.DeviceHealth{PoolName: "node-a", DeviceName: name, Health: is, Message: message, HealthCheckTimeout: healthTimeout}
		}
		return list
	}
	known := every(unhealthy, "ResetRequired: XID 46")
	known["gpu-08779614"] = kubeletplugin.DeviceHealth{PoolName: "node-a", DeviceName: "gpu-08779614", Health: healthy, HealthCheckTimeout: healthTimeout}
	known["gpu-ef0ae64b"] = kubeletplugin.DeviceHealth{PoolName: "node-a", DeviceName: "gpu-ef0ae64b", Health: unknown, Message: "this node has no GPU " + string(gone) + " now", HealthCheckTimeout: healthTimeout}
	found := func(f *facts.Facts) {
		f.Found(gpu.Node{Name: "node-a", GPUs: []gpu.GPU{{UUID: sick, Conditions: []gpu.Condition{{Type: gpu.ResetRequired, Message: "XID 46"}}}, {UUID: other}}})
	}
	for name, tc := range map[string]struct {
		facts func(*facts.Facts)
		want  all
	}{
		"not read yet": {facts: func(*facts.Facts) {}, want: every(unknown, "the GPUs of this node have not been read yet")},
		"known":        {facts: found, want: known},
		"no driver": {
			facts: func(f *facts.Facts) { f.Missing(facts.ReasonNVMLError, "driver/library version mismatch") },
			want:  every(unknown, "driver/library version mismatch"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := facts.New("node-a")
			tc.facts(f)
			devices, changed := Config{Pool: "node-a", Journal: j, Facts: f}.deviceHealth()
			got := all{}
			for _, d := range devices {
				if _, twice := got[d.DeviceName]; twice {
					t.Errorf("%s is reported twice", d.DeviceName)
				}
				got[d.DeviceName] = d
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			found(f)
			select {
			case <-changed:
			default:
				t.Error("a reading of the hardware doesn't lead to another report")
			}
		})
	}
}

// TestOutdatedHealth: nobody knows how a GPU is that hasn't been looked at for too long.
func TestOutdatedHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := facts.New("node-a")
		f.Found(gpu.Node{Name: "node-a", GPUs: []gpu.GPU{{UUID: "GPU-0"}}})
		c := Config{Journal: JournalOf(t, holding.Record{ClaimUID: "a", Holdings: []holding.Holding{{Device: "gpu-0", GPU: "GPU-0"}}}), Facts: f}
		f.RereadGPUs()
		<-time.After(healthKnownWithin)
		if got, _ := c.deviceHealth(); got[0].Health != healthy {
			t.Errorf("after %s: %+v", healthKnownWithin, got)
		}
		<-time.After(time.Second)
		if got, _ := c.deviceHealth(); got[0].Health != unknown || !strings.Contains(got[0].Message, "has not been able to look at the GPUs since") {
			t.Errorf("a second later: %+v", got)
		}
	})
}

// TestHealthByCondition says of every condition what a pod's status shows.
func TestHealthByCondition(t *testing.T) {
	for condition, want := range map[gpu.ConditionType]kubeletplugin.HealthStatus{
		gpu.Lost:                 unhealthy,
		gpu.DeviceNodeMissing:    unhealthy,
		gpu.ResetRequired:        unhealthy,
		gpu.BusResetRequired:     unhealthy,
		gpu.RebootRequired:       unhealthy,
		gpu.PeersMustDrain:       unhealthy,
		gpu.RowRemapFailed:       unhealthy,
		gpu.FabricNotReady:       unhealthy,
		gpu.UnusableUUID:         unhealthy,
		gpu.AttributesUnreadable: healthy,
		gpu.VitalsUnreadable:     healthy,
		gpu.NotResponding:        unknown,
		gpu.Unreadable:           unknown,
		gpu.StateUnreadable:      healthy,
		gpu.CDIFailed:            healthy,
		gpu.MPSDaemonFailed:      unhealthy,
		gpu.PrepareFailed:        unhealthy,
		gpu.ComputeModeChanged:   healthy,
		gpu.TimeSliceUnsupported: healthy,
		gpu.IMEXRecoveryRequired: healthy,
		gpu.RowRemapPending:      healthy,
		gpu.NVLinkDown:           healthy,
		gpu.NeedsInspection:      healthy,
	} {
		if got := healthWith(gpu.Condition{Type: condition}); got != want {
			t.Errorf("%s: %s, want %s", condition, got, want)
		}
	}
}

// TestMPSDaemonFailed: only clients of MPS on the GPU are unhealthy.
func TestMPSDaemonFailed(t *testing.T) {
	const uuid = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	state := facts.State{Known: true, Node: gpu.Node{GPUs: []gpu.GPU{{UUID: uuid, Conditions: []gpu.Condition{{Type: gpu.MPSDaemonFailed, Message: "no server"}}}}}}
	for _, tc := range []struct {
		held    holding.Holding
		health  kubeletplugin.HealthStatus
		message string
	}{
		{holding.Holding{GPU: uuid, MPS: &holding.MPS{}}, unhealthy, "MPSDaemonFailed: no server"},
		{holding.Holding{GPU: uuid}, healthy, ""},
	} {
		if health, message := reportedHealth(state, tc.held); health != tc.health || message != tc.message {
			t.Errorf("%+v: %s %q, want %s %q", tc.held, health, message, tc.health, tc.message)
		}
	}
}

// TestPrepareFailed: only devices that need what the GPU refuses are unhealthy.
func TestPrepareFailed(t *testing.T) {
	const uuid = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	large := gpu.Profile{Name: "3g.40gb", Placements: []gpu.Placement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}}
	state := facts.State{Known: true, Node: gpu.Node{GPUs: []gpu.GPU{{
		UUID: uuid, MIG: &gpu.MIG{Profiles: []gpu.Profile{large}},
		Conditions: []gpu.Condition{{Type: gpu.PrepareFailed, Message: "refused", Refused: []gpu.DeviceName{"gpu-980fb007-mig-3g40gb-4"}}},
	}}}}
	part := func(n int) gpu.Device {
		return gpu.Partition{GPU: uuid, Profile: large.Name, Placement: large.Placements[n]}
	}
	for device, want := range map[gpu.Device]kubeletplugin.HealthStatus{
		part(0):                          healthy,
		gpu.Share{Of: part(0)}:           healthy,
		part(1):                          unhealthy,
		gpu.Share{Of: part(1)}:           unhealthy,
		gpu.Whole{GPU: uuid}:             unhealthy,
		gpu.Replica{GPU: uuid, Count: 2}: unhealthy,
		gpu.Share{Of: gpu.Whole{GPU: uuid}, Count: 2}: unhealthy,
	} {
		message := ""
		if want == unhealthy {
			message = "PrepareFailed: refused"
		}
		name, _ := gpu.NameAll(state.Node.GPUs).Name(device)
		if is, said := reportedHealth(state, holding.New(name, device)); is != want || said != message {
			t.Errorf("%v: %s %q, want %s %q", device, is, said, want, message)
		}
	}
}

// TestWorstHealthOfADevice: of several holdings of a device the worst counts, in any order.
func TestWorstHealthOfADevice(t *testing.T) {
	const uuid = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	f := facts.New("node-a")
	f.Found(gpu.Node{Name: "node-a", GPUs: []gpu.GPU{{UUID: uuid, Conditions: []gpu.Condition{
		{Type: gpu.MPSDaemonFailed, Message: "no server"}, {Type: gpu.NVLinkDown, Message: "link 3"},
	}}}})
	share := holding.Holding{Device: "gpu-980fb007-mps4-0", GPU: uuid, MPS: &holding.MPS{}}
	admin := holding.Holding{Device: share.Device, GPU: uuid, Admin: true}
	for _, holdings := range [][]holding.Holding{{share, admin}, {admin, share}} {
		got, _ := Config{Journal: JournalOf(t, holding.Record{ClaimUID: "a", Holdings: holdings}), Facts: f}.deviceHealth()
		if len(got) != 1 || got[0].Health != unhealthy || got[0].Message != "MPSDaemonFailed: no server; NVLinkDown: link 3" {
			t.Errorf("%+v", got)
		}
	}
}

// TestWorstConditionCounts: the order of conditions doesn't matter, and all messages
// are there.
func TestWorstConditionCounts(t *testing.T) {
	const uuid = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	down, hangs, reset := gpu.Condition{Type: gpu.NVLinkDown, Message: "link 3"}, gpu.Condition{Type: gpu.NotResponding, Message: "hangs"}, gpu.Condition{Type: gpu.ResetRequired, Message: "XID 46"}
	for _, tc := range []struct {
		conditions []gpu.Condition
		health     kubeletplugin.HealthStatus
		message    string
	}{
		{[]gpu.Condition{down}, healthy, "NVLinkDown: link 3"},
		{[]gpu.Condition{down, hangs}, unknown, "NotResponding: hangs; NVLinkDown: link 3"},
		{[]gpu.Condition{down, hangs, reset}, unhealthy, "ResetRequired: XID 46; NotResponding: hangs; NVLinkDown: link 3"},
	} {
		health, message := reportedHealth(facts.State{Known: true, Node: gpu.Node{GPUs: []gpu.GPU{{UUID: uuid, Conditions: tc.conditions}}}}, holding.Holding{GPU: uuid})
		if health != tc.health || message != tc.message {
			t.Errorf("%v: %s %q, want %s %q", tc.conditions, health, message, tc.health, tc.message)
		}
	}
}
