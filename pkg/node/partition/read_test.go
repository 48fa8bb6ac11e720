package partition_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestReadWhileMade has a partition made and destroyed while the node is read.
func TestReadWhileMade(t *testing.T) {
	n := newNode(t, newHardware())
	p := part(gpu0, "1g.18gb", 0)
	n.prepare(t, part(gpu0, "1g.18gb", 1))
	n.unprepare(t, part(gpu0, "1g.18gb", 1)) // the mode lingers
	got, err := n.read(nil, func() (gpu.Node, error) {
		n.prepare(t, p)
		mig := n.hw.now(gpu0)
		n.unprepare(t, p)
		return gpu.Node{GPUs: []gpu.GPU{{UUID: gpu0, MIG: &mig}}}, nil
	})
	want := gpu.Node{GPUs: []gpu.GPU{{UUID: gpu0, MIG: &gpu.MIG{Switchable: true, Profiles: profiles()}}}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("read, %v (-want +got):\n%s", err, diff)
	}
}

// TestFactsStayWhileTheModeIsOurs checks that a GPU's facts are reported as before
// while MIG mode is on for a claim.
func TestFactsStayWhileTheModeIsOurs(t *testing.T) {
	n := newNode(t, newHardware())
	off := gpu.MIG{Switchable: true, Profiles: profiles()}
	before := gpu.GPU{UUID: gpu0, Index: 1, Minor: 1, MemoryReservedBytes: 1 << 20, Fabric: &gpu.Fabric{CliqueID: 1}, MIG: &off}
	n.prepare(t, part(gpu0, "1g.18gb", 1))
	foreign := n.hw.foreign(part(gpu0, "1g.18gb", 2), true)
	mig := n.hw.now(gpu0)
	lost := gpu.Condition{Type: gpu.Lost}
	now := gpu.GPU{UUID: gpu0, Index: 2, Minor: 9, MemoryReservedBytes: 2 << 20, MIG: &mig, Conditions: []gpu.Condition{lost}}
	read := func() (gpu.Node, error) { return gpu.Node{GPUs: []gpu.GPU{now}}, nil }
	got, err := n.read([]gpu.GPU{before}, read)
	want := before
	want.MIG = &gpu.MIG{Switchable: true, Profiles: profiles(), Instances: []gpu.Instance{foreign}}
	want.Conditions = []gpu.Condition{lost}
	if diff := cmp.Diff(gpu.Node{GPUs: []gpu.GPU{want}}, got); diff != "" || err != nil {
		t.Errorf("read, %v (-want +got):\n%s", err, diff)
	}
}

// TestModeSwitchedIsTold checks that the number of the GPU's device node is read before a
// partition is created, and that none is created as long as it can't be read.
func TestModeSwitchedIsTold(t *testing.T) {
	n := newNode(t, newHardware())
	var told []string
	var fails error
	n.hw.fault = func(call string, uuid gpu.UUID) error {
		if call != "minor" {
			return nil
		}
		told = append(told, fmt.Sprintf("%s enabled=%t instances=%d", uuid, n.hw.now(uuid).Enabled, len(n.hw.now(uuid).Instances)))
		return fails
	}
	p := part(gpu0, "1g.18gb", 0)
	n.prepare(t, p)
	n.unprepare(t, p)
	if err := n.ClearMIG(t.Context(), gpu0); err != nil {
		t.Fatal(err)
	}
	want := []string{string(gpu0) + " enabled=true instances=0", string(gpu0) + " enabled=false instances=0"}
	if diff := cmp.Diff(want, told); diff != "" {
		t.Errorf("told (-want +got):\n%s", diff)
	}
	fails = errors.New("no answer")
	n.hold(t, p)
	for range 2 {
		if _, err := n.Ensure(t.Context(), p); !errors.Is(err, fails) {
			t.Errorf("make: %v, want %v", err, fails)
		}
		if _, err := n.Find(t.Context(), p); !errors.Is(err, fails) {
			t.Errorf("find: %v, want %v", err, fails)
		}
		n.checkThere(t, gpu0, true)
	}
	fails = nil
	if _, err := n.Ensure(t.Context(), p); err != nil {
		t.Errorf("make, when it can be read: %v", err)
	}
}

// TestGPUsThatAreNotRead checks that a GPU which was being changed while the node was read is
// reported as before: the instances that it had when it was last read may have been ours,
// though no record says so any more.
func TestGPUsThatAreNotRead(t *testing.T) {
	n := newNode(t, newHardware())
	before := gpu.GPU{UUID: gpu0, Index: 3, MIG: &gpu.MIG{Switchable: true, Profiles: profiles()}, Conditions: []gpu.Condition{{Type: gpu.CDIFailed}}}
	last := gpu.GPU{
		UUID: gpu0, MIG: &gpu.MIG{Enabled: true, Pending: true, Instances: []gpu.Instance{{Profile: "1g.18gb", UUID: "MIG-gone"}}},
		Conditions: []gpu.Condition{{Type: gpu.DeviceNodeMissing}},
	}
	read := gpu.GPU{UUID: gpu1, MIG: last.MIG}
	n.BeginReading()
	want := before
	want.Conditions = last.Conditions
	got := n.Hide(gpu.Node{GPUs: []gpu.GPU{last, read}}, []gpu.UUID{gpu0}, []gpu.GPU{before})
	if diff := cmp.Diff([]gpu.GPU{want, read}, got.GPUs); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// read reads the node as the driver does.
func (n *node) read(before []gpu.GPU, read func() (gpu.Node, error)) (node gpu.Node, err error) {
	n.BeginReading()
	node, err = read()
	return n.Hide(node, nil, before), err
}

func checkRead(t testing.TB, n *node, foreign gpu.Instance) {
	got, err := n.read(nil, func() (gpu.Node, error) {
		var facts gpu.Node
		for _, uuid := range []gpu.UUID{gpu0, gpu1} {
			mig := n.hw.now(uuid)
			facts.GPUs = append(facts.GPUs, gpu.GPU{UUID: uuid, MIG: &mig})
		}
		return facts, nil
	})
	want := gpu.Node{GPUs: []gpu.GPU{
		{UUID: gpu0, MIG: &gpu.MIG{Switchable: true, Profiles: profiles()}},
		{UUID: gpu1, MIG: &gpu.MIG{Enabled: true, Pending: true, Switchable: true, Profiles: profiles(), Instances: []gpu.Instance{foreign}}},
	}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("read, %v (-want +got):\n%s", err, diff)
	}
}
