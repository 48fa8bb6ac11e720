package sharing

import (
	"errors"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// mayTryAgain reports whether a Join that has failed may succeed soon. A daemon that fails has
// ten seconds, from the beginning of its fault if that is known: of the devices that are refused
// only, because another daemon of the record may have failed for longer.
func (m *Manager) mayTryAgain(r holding.Record, err error, attempt int, began time.Time) bool {
	refusal, ok := errors.AsType[*gpu.RefusedError](err)
	if !ok {
		return false
	}
	if !errors.Is(err, mps.ErrDaemonFails) {
		return attempt == 1
	}
	for _, g := range r.Holdings {
		if !slices.Contains(refusal.Silicon, g.Base()) {
			continue
		}
		if since, _ := m.fault(r.Daemon(g)); !since.IsZero() && since.Before(began) {
			began = since
		}
	}
	return time.Since(began) < failsFor
}

// refused returns the error as a refusal of the record's devices that have the daemon.
func refused(r holding.Record, daemon string, err error) error {
	var silicon []gpu.Device
	for _, g := range r.Holdings {
		if r.Daemon(g) == daemon && !slices.Contains(silicon, g.Base()) {
			silicon = append(silicon, g.Base())
		}
	}
	return &gpu.RefusedError{Silicon: silicon, Action: "serve MPS clients", Err: err}
}

// judgeMode returns an error of setting the GPU's compute mode as a refusal, if it is one.
func judgeMode(uuid gpu.UUID, err error) error {
	if !nvml.IsRefusal(err) {
		return err
	}
	return &gpu.RefusedError{Silicon: []gpu.Device{gpu.Whole{GPU: uuid}}, Action: "change its compute mode", Err: err}
}
