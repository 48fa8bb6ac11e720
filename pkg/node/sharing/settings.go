package sharing

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// settings returns the journal's settings of a GPU. Unreadable ones count as the
// driver's initial values.
func (v *visit) settings(uuid gpu.UUID) holding.Settings {
	if s, ok := v.m.cfg.Journal.Settings(uuid); ok && s.BootID == v.m.cfg.BootID {
		return s
	}
	s := holding.Settings{GPU: uuid, BootID: v.m.cfg.BootID}
	if slices.ContainsFunc(v.m.cfg.Journal.UnreadableSettings(), func(u journal.UnreadableGPU) bool { return u.GPU == uuid }) {
		s.ComputeModeBefore, s.TimeSliceBefore = string(nvml.ComputeDefault), gpu.DefaultTimeSlice
	}
	return s
}

// save writes the settings to the journal, or deletes them if none is changed.
func (v *visit) save(s holding.Settings) error {
	if s.ComputeModeBefore == "" && s.TimeSliceBefore == "" {
		return v.m.cfg.Journal.DeleteSettings(s.GPU)
	}
	return v.m.cfg.Journal.PutSettings(s)
}

// applyMode applies the compute mode that claims need.
func (v *visit) applyMode(ctx context.Context, uuid gpu.UUID) error {
	switch {
	case v.m.cfg.ExclusiveProcess && v.plan.hasWhole(uuid):
		return v.setMode(ctx, uuid)
	case v.settings(uuid).ComputeModeBefore == "":
		v.m.setOthersMode(uuid, "")
		return nil
	case v.plan.mayUse(uuid): // a claim whose record can't be read
		return nil
	default:
		return v.restoreMode(ctx, uuid)
	}
}

// setMode sets the compute mode that admits one process, the daemon's server. While
// the daemon is away it sets the mode that admits none: otherwise a client that
// doesn't find the daemon would be that one process, without limits. A mode that
// somebody else has set stays.
func (v *visit) setMode(ctx context.Context, uuid gpu.UUID) error {
	server := v.m.server(uuid) // before the mode is read: a later one may come after a reset
	mode, err := v.mode(uuid)
	if errors.Is(err, nvml.ErrNotSupported) {
		klog.FromContext(ctx).Info("The GPU has no compute modes: processes that aren't clients of its MPS daemon can use it too, without limits", "gpu", uuid)
		return nil
	}
	if err != nil {
		return err
	}
	s, want := v.settings(uuid), nvml.ComputeExclusiveProcess
	if v.m.isClosed(&v.plan, uuid) {
		want = nvml.ComputeProhibited
	}
	if left, err := v.leaveMode(ctx, s, mode, want); left || err != nil {
		return err
	}
	if err := v.changeMode(ctx, s, mode, want); err != nil {
		return err
	}
	v.m.sawMode(uuid, server)
	return nil
}

// leaveMode reports whether somebody else has set the mode, so that it stays. The
// error says that no MPS server can use the GPU in that mode.
func (v *visit) leaveMode(ctx context.Context, s holding.Settings, mode, want nvml.ComputeMode) (bool, error) {
	switch {
	case mode == nvml.ComputeProhibited && !s.Closed && want == mode:
		return true, nil // it is closed
	case mode == nvml.ComputeProhibited && !s.Closed:
		return true, fmt.Errorf("the compute mode of the GPU is %s, which lets no process use it, and Tessera didn't set that: have whoever did set another (nvidia-smi -i %s -c DEFAULT)", mode, s.GPU)
	case mode == nvml.ComputeExclusiveThread:
		return true, nil
	case mode == nvml.ComputeDefault && s.ComputeModeBefore != "":
		opened, err := v.isOpenedByOthers(ctx, s)
		if !opened || err != nil {
			return false, err
		}
		return true, v.leaveOpen(s)
	}
	return false, nil
}

// isOpenedByOthers reports whether somebody else has set the default mode that was
// just read. A reset of the GPU sets it too, but ends the MPS server.
func (v *visit) isOpenedByOthers(ctx context.Context, s holding.Settings) (bool, error) {
	if s.OpenedByOthers || !v.m.servedAll(s.GPU) {
		return s.OpenedByOthers, nil
	}
	// The last report of the supervisor may be older than the mode.
	if err := v.m.list(ctx); err != nil {
		return false, fmt.Errorf("find out who has set the compute mode of the GPU: %w", err)
	}
	return v.m.servedAll(s.GPU), nil
}

// leaveOpen records that somebody else has set the default mode: with the next MPS
// server it would look like a reset of the GPU.
func (v *visit) leaveOpen(s holding.Settings) error {
	if !s.OpenedByOthers {
		s.OpenedByOthers, s.Closed = true, false
		if err := v.save(s); err != nil {
			return err
		}
	}
	v.m.setOthersMode(s.GPU, fmt.Sprintf("somebody has set the compute mode of the GPU to %s while MPS clients use it: processes that aren't clients can use it too, without limits; "+
		"to keep them off again: nvidia-smi -i %s -c EXCLUSIVE_PROCESS", nvml.ComputeDefault, s.GPU))
	return nil
}

// changeMode writes the compute mode to the journal, then sets it.
func (v *visit) changeMode(ctx context.Context, s holding.Settings, mode, want nvml.ComputeMode) error {
	remembered := s
	s.OpenedByOthers = false
	if s.ComputeModeBefore == "" && mode != want {
		s.ComputeModeBefore = string(mode)
	}
	s.Closed = s.Closed || want == nvml.ComputeProhibited
	if s != remembered {
		if err := v.save(s); err != nil {
			return err
		}
	}
	if mode != want {
		v.m.cfg.Step("sharing.modeIntended")
		if err := v.m.call("mode", func() error { return v.m.hw.SetComputeMode(s.GPU, want) }); err != nil {
			return err
		}
		v.m.cfg.Step("sharing.modeSet")
		klog.FromContext(ctx).V(2).Info("Compute mode set", "gpu", s.GPU, "mode", want, "before", mode)
	}
	if !s.Closed || want == nvml.ComputeProhibited {
		return nil
	}
	if s.Closed = false; s.ComputeModeBefore == string(want) {
		s.ComputeModeBefore = "" // the original mode
	}
	if err := v.save(s); err != nil {
		return err
	}
	v.m.cfg.Step("sharing.modeOpened")
	return nil
}

// mode reads the GPU's compute mode.
func (v *visit) mode(uuid gpu.UUID) (mode nvml.ComputeMode, err error) {
	if v.m.hw == nil {
		return "", gpu.ErrNoDriver
	}
	err = v.m.call("mode", func() error {
		mode, err = v.m.hw.ComputeMode(uuid)
		return err
	})
	return mode, err
}

// restoreMode restores the compute mode, unless somebody else has changed it since.
func (v *visit) restoreMode(ctx context.Context, uuid gpu.UUID) error {
	if err := v.m.knowDaemons(ctx); err != nil {
		return err // a daemon that no claim needs must end first
	}
	if names := v.unwanted(nil); len(names) > 0 { // their last claim has begun to leave just now
		return fmt.Errorf("MPS daemons that no claim needs still run: %s", strings.Join(names, ", "))
	}
	s := v.settings(uuid)
	mode, err := v.mode(uuid)
	if err != nil && !errors.Is(err, nvml.ErrNotSupported) {
		return err
	}
	ours := mode == nvml.ComputeExclusiveProcess || mode == nvml.ComputeProhibited && s.Closed
	if before := nvml.ComputeMode(s.ComputeModeBefore); ours && mode != before {
		err := v.m.call("mode", func() error { return v.m.hw.SetComputeMode(uuid, before) })
		if err != nil {
			return err
		}
		v.m.cfg.Step("sharing.modeBack")
		klog.FromContext(ctx).V(2).Info("Compute mode put back", "gpu", uuid, "mode", before)
	}
	s.ComputeModeBefore, s.Closed, s.OpenedByOthers = "", false, false
	if err := v.save(s); err != nil {
		return err
	}
	v.m.setOthersMode(uuid, "")
	v.m.cfg.Step("sharing.modeForgotten")
	return nil
}

// knowRemains finds out, once, whether an earlier plugin has left a daemon on the GPU
// that no claim needs. The supervisor is asked only if it has left the directory of
// one.
func (m *Manager) knowRemains(ctx context.Context, uuid gpu.UUID) error {
	m.mu.Lock()
	listed := m.listed
	m.mu.Unlock()
	if listed {
		return nil
	}
	p := m.planNow()
	remains, err := m.cfg.Remains()
	unwanted := func(d mps.Daemon) bool { return !p.wants(d.Name) && m.mayBeOn(d, uuid) }
	if err == nil && !slices.ContainsFunc(remains, unwanted) {
		return nil
	}
	if err := m.list(ctx); err != nil && !m.nothingRemains(err) {
		return fmt.Errorf("an MPS daemon that no claim needs may still be on GPU %s: %w", uuid, err)
	}
	return nil
}

// mayBeOn reports whether the daemon, of whose directory this is known, may be on the
// GPU. Only the name of a shared device says which GPU it is of.
func (m *Manager) mayBeOn(d mps.Daemon, uuid gpu.UUID) bool {
	if !holding.IsOwnDaemon(d.Name) {
		return gpu.DeviceName(d.Name).MayBeOf(uuid)
	}
	there := func(device gpu.UUID) bool { on := m.gpuOf(device); return on == uuid || on == "" }
	return len(d.Devices) == 0 || slices.ContainsFunc(d.Devices, there)
}

// gpuOf returns the GPU that a daemon's device is or is of, empty for a MIG device that
// the journal doesn't have.
func (m *Manager) gpuOf(device gpu.UUID) gpu.UUID {
	if device.IsWhole() {
		return device
	}
	for _, r := range m.cfg.Journal.GPUs() {
		for _, p := range r.Partitions {
			if p.Made != nil && p.Made.UUID == device {
				return r.GPU
			}
		}
	}
	return ""
}

// knowDaemons finds out, once, which daemons there are.
func (m *Manager) knowDaemons(ctx context.Context) error {
	m.mu.Lock()
	listed := m.listed
	m.mu.Unlock()
	if listed {
		return nil
	}
	if err := m.list(ctx); err != nil {
		if m.nothingRemains(err) {
			return nil
		}
		return err
	}
	return m.stopOrphans(ctx)
}
