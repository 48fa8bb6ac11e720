package node

import (
	"context"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// sharingState lets the doctor read MPS daemons, compute modes and time slices.
type sharingState struct {
	ctx     context.Context //nolint:containedctx // of one examination
	daemons interface {
		List(ctx context.Context) (mps.Report, error)
	}
	runDir mps.RunDir
	// session and smi are nil where there is no driver.
	session *nvml.Session
	smi     sharing.SMI
}

// askWithin bounds each question.
const askWithin = 10 * time.Second

func (s sharingState) Daemons() ([]mps.State, error) {
	ctx, cancel := context.WithTimeout(s.ctx, askWithin)
	defer cancel()
	report, err := s.daemons.List(ctx)
	return report.Daemons, err
}

func (s sharingState) Remains() ([]string, error) { return s.runDir.Names() }

func (s sharingState) ComputeMode(uuid gpu.UUID) (nvml.ComputeMode, error) {
	if s.session == nil {
		return "", nvml.ErrDriverNotLoaded
	}
	return s.session.ComputeMode(uuid)
}

func (s sharingState) TimeSlice(uuid gpu.UUID) (string, error) {
	if s.smi == nil {
		return "", nvml.ErrDriverNotLoaded
	}
	ctx, cancel := context.WithTimeout(s.ctx, askWithin)
	defer cancel()
	return sharing.ReadTimeSlice(ctx, s.smi, uuid)
}
