//go:build integration

package crash_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// destroy destroys a GPU instance as an administrator would with nvidia-smi.
func (n *node) destroy(t *testing.T, gpu int, start uint32) {
	t.Helper()
	err := n.hardware.ChangeGPU(gpu, func(g *nvmlsim.GPUState) error {
		g.Instances = slices.DeleteFunc(g.Instances, func(i nvmlsim.GPUInstance) bool { return i.Start == start })
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestDestroyedByOthers has a partition vanish while a claim holds it.
func TestDestroyedByOthers(t *testing.T) {
	t.Parallel()
	for name, destroyAndMend := range map[string]func(*testing.T, *node, *plugin, *resourceapi.ResourceClaim) *plugin{
		"made again by a prepare": func(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) *plugin {
			n.destroy(t, 1, 2)
			p.mustPrepare(t, c)
			return p
		},
		"made again at the start": func(t *testing.T, n *node, p *plugin, _ *resourceapi.ResourceClaim) *plugin {
			p.kill() // alive, it may mend it before the doctor has looked three times
			n.destroy(t, 1, 2)
			n.finds(t, "instance-missing")
			return n.serve(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			c, other := n.newClaim(t, n.part(1, "2g20gb-2")), n.newClaim(t, n.part(1, "1g10gb-0"))
			p := n.serve(t)
			p.mustPrepare(t, other)
			p.mustPrepare(t, c)
			n.check(t, "before")
			p = destroyAndMend(t, n, p, c)
			n.check(t, "afterwards")
			n.has(t, 1, "0+1", "2+2")
			n.destroy(t, 1, 2)
			p.mustUnprepare(t, c)
			n.has(t, 1, "0+1")
			p.mustUnprepare(t, other)
			n.checkEmpty(t)
		})
	}
}

// TestInUse has a process that doesn't let go.
func TestInUse(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c, other := n.newClaim(t, n.part(1, "2g20gb-2")), n.newClaim(t, n.part(1, "1g10gb-0"))
	p := n.serve(t)
	p.mustPrepare(t, c)
	processes := func(of ...nvmlsim.Process) {
		err := n.hardware.ChangeGPU(1, func(g *nvmlsim.GPUState) error {
			g.Processes = of
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	id := n.hardware.State().GPUs[1].Instances[0].ID
	processes(nvmlsim.Process{PID: 4711, Name: "trainer", GPUInstance: id})
	if err := p.unprepare(t, c); err == nil || !strings.Contains(err.Error(), "4711") {
		t.Errorf("while process 4711 uses the instance: got %v, want an error that names it", err)
	}
	n.has(t, 1, "2+2")
	p.mustPrepare(t, other)
	p.kill() // and after a restart it is the same
	p = n.serve(t)
	if err := p.unprepare(t, c); err == nil {
		t.Error("unprepared while a process uses the instance")
	}
	processes()
	p.mustUnprepare(t, c)
	n.has(t, 1, "0+1")
	p.mustUnprepare(t, other)
	n.checkEmpty(t)
}

// TestGPULost has one of two GPUs fall off the bus.
func TestGPULost(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	gone, stays := n.newClaim(t, n.part(1, "2g20gb-2")), n.newClaim(t, n.part(0, "2g20gb-2"))
	after, late := n.newClaim(t, n.part(0, "1g10gb-0")), n.newClaim(t, n.part(1, "1g10gb-0"))
	p := n.serve(t)
	p.mustPrepare(t, gone)
	p.mustPrepare(t, stays)
	if err := n.hardware.Lose(1); err != nil {
		t.Fatal(err)
	}
	n.finds(t, "gpu-gone")
	for _, restart := range []bool{false, true} {
		if restart {
			p.kill()
			p = n.serve(t)
		}
		if _, err := p.prepare(t, late); err == nil {
			t.Error("prepared a partition of a lost GPU")
		}
		p.mustPrepare(t, stays)
		p.mustPrepare(t, after)
		p.mustUnprepare(t, after)
	}
	p.mustUnprepare(t, gone)
	p.mustUnprepare(t, late)
	p.mustUnprepare(t, stays)
	n.has(t, 0)
	p.kill()
	n.reboot(t)
	p = n.serve(t)
	p.mustPrepare(t, late)
	n.check(t, "after a reboot that has brought the GPU back")
	p.mustUnprepare(t, late)
	n.checkEmpty(t)
}

// TestReboot has everything in memory forgotten.
func TestReboot(t *testing.T) {
	t.Parallel()
	for name, step := range map[string]string{"at rest": "", "while making": "partition.created", "while noting": "journal.gpu.put.synced#2"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			c, other, whole := n.newClaim(t, n.part(1, "2g20gb-2")), n.newClaim(t, n.part(1, "1g10gb-0")), n.newClaim(t, n.whole(0))
			p := n.serve(t)
			p.mustPrepare(t, other)
			p.mustPrepare(t, whole)
			if step == "" {
				p.mustPrepare(t, c)
			}
			p.kill()
			if step != "" {
				n.dieIn(t, step, func(p *plugin) error { return prepareIt(t, n, p, c) })
			}
			n.reboot(t)

			p = n.serve(t)
			n.check(t, "after the reboot")
			n.has(t, 1)
			p.mustUnprepare(t, other) // its pod was deleted meanwhile
			n.has(t, 1)
			p.mustPrepare(t, c)
			p.mustPrepare(t, whole)
			n.check(t, "after the kubelet has come back")
			n.has(t, 1, "2+2")
			p.mustUnprepare(t, whole)
			p.mustUnprepare(t, c)
			n.checkEmpty(t)
		})
	}
}

// TestWiped has the CDI directory of a node with partitions emptied. The kubelet doesn't ask
// again, and containers that are started again need all specifications, those of the files
// about their devices too.
func TestWiped(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c := n.newClaim(t, n.part(1, "2g20gb-2"), n.part(1, "1g10gb-0"))
	p := n.serve(t)
	p.mustPrepare(t, c)
	before := n.specs(t)
	p.kill() // alive, it may mend it before the doctor has looked three times
	n.wipeCDI(t)
	n.finds(t, "cdi-device-missing")
	p = n.serve(t)
	n.check(t, "after recovery")
	if diff := cmp.Diff(before, n.specs(t)); diff != "" {
		t.Errorf("the CDI specs differ from those before (-before +after):\n%s", diff)
	}
	p.mustUnprepare(t, c)
	n.checkEmpty(t)
}

// specs are the CDI directory's files.
func (n *node) specs(t *testing.T) map[string]string {
	t.Helper()
	files, err := os.ReadDir(n.cdi)
	if err != nil {
		t.Fatal(err)
	}
	specs := map[string]string{}
	for _, f := range files {
		data, err := os.ReadFile(filepath.Join(n.cdi, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		specs[f.Name()] = string(data)
	}
	return specs
}

// TestGPURecordUnreadable damages a GPU's record between two plugins: nothing
// on that GPU is taken for ours any more, and so nothing is destroyed.
func TestGPURecordUnreadable(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c, other, late := n.newClaim(t, n.part(1, "2g20gb-2")), n.newClaim(t, n.part(0, "1g10gb-0")), n.newClaim(t, n.part(1, "1g10gb-0"))
	p := n.serve(t)
	p.mustPrepare(t, c)
	p.mustPrepare(t, other)
	p.kill()
	uuid := n.host.Machine.GPUs[1].UUID
	if err := os.Truncate(filepath.Join(n.journal(), "gpus", uuid+".json"), 60); err != nil {
		t.Fatal(err)
	}

	p = n.serve(t)
	n.finds(t, "gpu-record-unreadable")
	n.has(t, 1, "2+2")
	n.hasCondition(t, p, uuid, "StateUnreadable")
	if _, err := p.prepare(t, late); err == nil {
		t.Error("made a partition on a GPU whose record can't be read")
	}
	p.mustPrepare(t, c) // as it is
	p.mustUnprepare(t, c)
	p.mustUnprepare(t, late)
	n.has(t, 1, "2+2") // nobody knows that it was ours
	p.mustUnprepare(t, other)
	n.has(t, 0)

	// Somebody follows the doctor's advice.
	n.destroy(t, 1, 2)
	if err := n.hardware.ChangeGPU(1, func(g *nvmlsim.GPUState) error {
		g.MIGCurrent, g.MIGPending = false, false
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	p.mustPrepare(t, late)
	n.check(t, "afterwards")
	p.mustUnprepare(t, late)
	n.checkEmpty(t)
}

// hasCondition waits until the node's GPUInventory has it.
func (n *node) hasCondition(t *testing.T, p *plugin, uuid, condition string) {
	t.Helper()
	var inventory v1alpha1.GPUInventory
	err := p.poll(t, func() bool {
		if err := shared.objects.Get(t.Context(), client.ObjectKey{Name: n.name}, &inventory); err != nil {
			return false
		}
		for _, g := range inventory.Status.GPUs {
			for _, c := range g.Conditions {
				if g.UUID == uuid && string(c.Type) == condition {
					return true
				}
			}
		}
		return false
	})
	if err != nil {
		t.Errorf("GPU %s never gets the condition %s: %v; there is %+v", uuid, condition, err, inventory.Status.GPUs)
	}
}

// TestOthersInstances has instances, and the mode, that others have made come
// out of everything unharmed.
func TestOthersInstances(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	others := n.hardware.GPUs()[1]
	if _, err := others.SetMIGMode(true); err != nil {
		t.Fatal(err)
	}
	at := uint32(4)
	instance, err := others.CreateInstance(19, &at) // 1g.10gb
	if err != nil {
		t.Fatal(err)
	}
	if _, err := instance.CreateCompute(0, nil); err != nil {
		t.Fatal(err)
	}
	theirs, ours := n.newClaim(t, n.part(1, "1g10gb-4")), n.newClaim(t, n.part(1, "1g10gb-0"))
	overlapping, whole := n.newClaim(t, n.part(1, "2g20gb-4")), n.newClaim(t, n.whole(1))
	p := n.serve(t)
	p.mustPrepare(t, theirs)
	p.mustPrepare(t, ours)
	n.check(t, "with theirs and ours")
	n.has(t, 1, "0+1", "4+1")
	p.kill()
	p = n.serve(t)
	n.check(t, "after a restart")
	p.mustUnprepare(t, theirs)
	p.mustUnprepare(t, ours)
	for _, c := range []*resourceapi.ResourceClaim{overlapping, whole} {
		if _, err := p.prepare(t, c); err == nil {
			t.Errorf("prepared %v in spite of others' instance", c.Status.Allocation.Devices.Results)
		}
		p.mustUnprepare(t, c)
	}
	r := n.doctor(t, "--strict", "--looks", "30", "--pause", "1s")
	if !r.Healthy {
		t.Errorf("at the end the doctor finds %s", findings(r))
	}
	n.has(t, 1, "4+1")
	if !n.hardware.State().GPUs[1].MIGCurrent {
		t.Error("others' MIG mode was switched off")
	}
}

// TestDriverReloaded has the hardware forget everything in the same boot, once without a
// plugin and once with one.
func TestDriverReloaded(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c, other := n.newClaim(t, n.part(1, "2g20gb-2"), n.part(0, "1g10gb-0")), n.newClaim(t, n.part(1, "1g10gb-0"))
	p := n.serve(t)
	p.mustPrepare(t, c)
	p.mustPrepare(t, other)
	p.kill() // alive, it may mend it before the doctor has looked three times
	if err := n.hardware.Reboot(); err != nil {
		t.Fatal(err)
	}
	n.finds(t, "instance-missing")
	p = n.serve(t)
	n.check(t, "after recovery")
	n.has(t, 1, "0+1", "2+2")
	if err := n.hardware.Reboot(); err != nil {
		t.Fatal(err)
	}
	p.mustUnprepare(t, other)
	p.kill()
	p = n.serve(t)
	n.check(t, "after recovery from the second time")
	n.has(t, 0, "0+1")
	n.has(t, 1, "2+2")
	p.mustPrepare(t, c)
	p.mustUnprepare(t, c)
	n.checkEmpty(t)
}
