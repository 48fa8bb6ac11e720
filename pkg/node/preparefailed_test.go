package node

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestGPURefusesAPartition checks that a GPU which refuses one partition has the condition
// PrepareFailed after one prepare, while the rest of it is given to claims, and until a claim is
// given what it refused.
func TestGPURefusesAPartition(t *testing.T) {
	d, _ := startDivided(t)
	m, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.ClearFaults(), m.Close()); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithCancel(d.ctx)
	var running sync.WaitGroup
	running.Go(func() { d.health.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	name := installed.Names()[0]
	refused, beside := name+"-mig-3g40gb-4", name+"-mig-1g10gb-0"
	condition := func() gpu.Condition {
		state, _ := d.facts.State()
		all := state.Node.GPUs[0].Conditions
		if i := slices.IndexFunc(all, func(c gpu.Condition) bool { return c.Type == gpu.PrepareFailed }); i >= 0 {
			return all[i]
		}
		return gpu.Condition{}
	}
	// The two attempts of one prepare.
	if err := m.Fault(nvmlsim.Fault{Call: "DeviceCreateGpuInstanceWithPlacement", GPU: 0, Code: nvmlsim.Unknown, Count: 2}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.preparer.Prepare(d.ctx, claimOf("refused", refused)); err == nil {
		t.Fatal("prepared")
	}
	d.eventually(t, "the condition", func() bool { return condition().Type == gpu.PrepareFailed })
	if c := condition(); !slices.Equal(c.Refused, []gpu.DeviceName{refused}) || !strings.Contains(c.Message, "can't create a 3g.40gb partition") || c.RetryAt.IsZero() {
		t.Errorf("%+v", c)
	}
	for _, one := range []struct {
		device gpu.DeviceName
		ends   bool
	}{{beside, false}, {installed.Names()[1], false}, {refused, true}} {
		c := claimOf(string(one.device), one.device)
		if _, err := d.preparer.Prepare(d.ctx, c); err != nil {
			t.Errorf("prepare %s: %v", one.device, err)
		}
		if one.ends {
			d.eventually(t, "the end of the condition", func() bool { return condition().Type == "" })
		} else if condition().Type == "" {
			t.Errorf("the condition has ended with a claim of %s", one.device)
		}
		if err := d.unprepare(c); err != nil {
			t.Error(err)
		}
	}
}
