package prepare

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// TestClasses checks whose failure an error is.
func TestClasses(t *testing.T) {
	refused := &gpu.RefusedError{Silicon: []gpu.Device{gpu.Whole{GPU: "GPU-1"}}, Action: "be used whole", Err: nvml.ErrInUse}
	_, unsupported := sharing.ReadTimeSlice(t.Context(), func(context.Context, ...string) (string, error) {
		return "Not Supported", errors.New("exit status 1")
	}, "GPU-1")
	unseen, other := facts.New("node-0"), facts.New("node-0")
	unseen.Found(gpu.Node{})
	other.SawNode(true, "a device plugin serves the GPUs")
	for want, all := range map[class][]error{
		ofDevice: {
			refused,
			errors.Join(refused, context.DeadlineExceeded), // of the undoing
			nvml.ErrLost,
			nvml.ErrNotResponding,
			facts.Dead(gpu.GPU{Conditions: []gpu.Condition{{Type: gpu.Unreadable}}}),
		},
		ofNode: {
			mps.ErrUnavailable,
			gpu.ErrNoDriver,
			cdi.ErrNoDriver,
			nvml.ErrDriverNotLoaded,
			nvml.ErrNoPermission,
			errors.New("no space left on device"),
			other.MayPrepare(),
		},
		ofClaim: {
			claim.ErrPermanent,
			unsupported,
		},
		ofMoment: {
			ErrHeld,
			partition.ErrHeld,
			partition.ErrNoDevice,
			errUnprepared,
			errGivenUp,
			errReallocated,
			context.Canceled,
			context.DeadlineExceeded,
			unseen.MayPrepare(),
		},
	} {
		for _, err := range all {
			if got := classOf(fmt.Errorf("prepare: %w", err)); got != want {
				t.Errorf("%v is of the %s, want %s", err, got, want)
			}
			if got := classOf(errors.Join(failedAt(t.Context(), stepState, err), nvml.ErrLost)); got != want {
				t.Errorf("%v, with an error of the undoing, is of the %s, want %s", err, got, want)
			}
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if got := classOf(failedAt(ended, stepHardware, errors.New("Unknown Error"))); got != ofMoment {
		t.Errorf("an error of a call that has ended is of the %s", got)
	}
}

// TestOutcomesNobodyTakes checks that no prepare waits for a receiver that is away.
func TestOutcomesNobodyTakes(t *testing.T) {
	p := New(Config{})
	r := holding.Record{Holdings: []holding.Holding{{Device: "gpu-1", GPU: "GPU-1"}}}
	for range mostOutcomes + 1 {
		p.note(r, gpu.Whole{GPU: "GPU-1"}, "can't be used whole: in use")
	}
	if got := len(p.Outcomes()); got != mostOutcomes {
		t.Errorf("%d outcomes wait, want %d", got, mostOutcomes)
	}
}
