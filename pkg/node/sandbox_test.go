package node

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// restartSandbox ends all processes of the node, and removes what isn't on a disk. The kernel,
// and so the boot ID, and the GPUs stay as they are. Talos 1.14 runs the kubelet, the
// container runtime and all pods in namespaces that it can restart in this way.
func (c *computer) restartSandbox(t *testing.T) {
	t.Helper()
	run := filepath.Dir(c.daemons.Dir)
	if err := errors.Join(os.RemoveAll(c.host.Path(run)), os.RemoveAll(c.host.Path(c.cdi()))); err != nil {
		t.Fatal(err)
	}
	c.daemons = nodetest.NewDaemons(c.host.Path("/"), c.daemons.Dir)
}

// TestSandboxRestarts checks that all claims have their devices, daemons and specs again when the
// plugin has started, that the kubelet can prepare the claims of pods that stay and unprepare
// the others, and that nothing is left in the end.
func TestSandboxRestarts(t *testing.T) {
	for _, kind := range kinds() {
		t.Run(kind.name, func(t *testing.T) {
			c := newComputer(t)
			fresh := c.machine.State().GPUs
			stays, goes := claimOf("stays", kind.with...), claimOf("goes", kind.near...)
			p, err := c.start()
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(p.prepare(stays), p.prepare(goes), p.end()); err != nil {
				t.Fatal(err)
			}
			before := c.machine.State().GPUs
			c.restartSandbox(t)
			if p, err = c.start(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, c.machine.State().GPUs); diff != "" {
				t.Errorf("the GPUs after the start (-before the restart +now):\n%s", diff)
			}
			if err := errors.Join(c.doctor(p.ctx), p.refuses(stays), p.refuses(goes)); err != nil {
				t.Error(err)
			}
			if err := errors.Join(p.unprepare(goes), p.prepare(stays), c.doctor(p.ctx)); err != nil {
				t.Errorf("the kubelet's calls: %v", err)
			}
			if err := errors.Join(p.unprepare(stays), p.leaveHost(), c.doctor(p.ctx), c.checkFiles(), p.end()); err != nil {
				t.Errorf("the end: %v", err)
			}
			// A switch of the MIG mode gives a GPU another minor number, which depends on the
			// order in which GPUs are switched.
			if diff := cmp.Diff(fresh, c.machine.State().GPUs, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(nvmlsim.GPUState{}, "Minor")); diff != "" {
				t.Errorf("the GPUs in the end (-in the beginning +now):\n%s", diff)
			}
		})
	}
}
